"""A job on GPUs that nobody here has: simulated and priced."""
