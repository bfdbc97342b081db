"""What a child that imports PyTorch and its like is told by its environment."""

# transformers would fetch kernels from the hub, PyTorch would touch the GPU to see if there is one.
CHILD_VARIABLES = {"USE_HUB_KERNELS": "NO", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
