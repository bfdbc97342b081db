"""Cluster files, launch and preemption notices."""
