"""Tables of measurements as run folders."""
