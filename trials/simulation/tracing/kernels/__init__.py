"""Kernels of a GPU that PyTorch cannot trace without one, declared with their buffers and costs."""
