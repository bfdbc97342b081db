"""Notes below the tables of estimates and rankings."""
