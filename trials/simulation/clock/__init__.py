"""Durations of a GPU's kernels, one module for each class of operator. No torch."""
