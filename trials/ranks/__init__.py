"""Several GPUs that train one model, by PyTorch's own code."""
