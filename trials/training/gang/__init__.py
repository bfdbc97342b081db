"""Several ranks that train one model: their processes, and the parent that they share."""
