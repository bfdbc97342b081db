"""Layouts of several GPUs that configurations state."""
