"""Notes below the table of an estimate."""
