"""What to run, what nodes cost, what a sweep will cost, and what went wrong."""
