"""A GPU simulated from the training code: what a step does, traced, replayed on a model of it."""
