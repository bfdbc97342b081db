"""Optimizer steps of recipes: the optimizer, its precision, and state on device or host."""
