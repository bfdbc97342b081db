"""The child's side of a trial: the training step itself, with torch."""
