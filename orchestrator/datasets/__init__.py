"""Training examples in any common format, and their lengths in tokens."""
