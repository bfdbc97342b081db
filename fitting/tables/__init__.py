"""Other projects' CSV files in, data frames out."""
