"""The driver: plan, trials, observations."""
