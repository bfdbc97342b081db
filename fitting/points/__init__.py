"""Observations as arrays."""
