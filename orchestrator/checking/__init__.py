"""Checks of a training before it starts."""
