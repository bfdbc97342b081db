"""Which trial goes to which node, and which is worth its price."""
