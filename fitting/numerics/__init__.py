"""Least squares, intervals and uncertainty, independent of GPUs."""
