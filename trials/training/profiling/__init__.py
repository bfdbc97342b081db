"""Times of a step by stage, layer and kernel."""
