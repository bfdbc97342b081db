"""One folder with everything that a sweep produced."""
