"""The job priced on every offer, and what to measure next."""
