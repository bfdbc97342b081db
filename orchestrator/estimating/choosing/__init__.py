"""Choice of recipes, and of changes by which a job fits."""
