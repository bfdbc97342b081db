"""Out-of-memory messages of PyTorch, CUDA's libraries and the host's allocators.

Bitsandbytes raises nothing: it prints and exits (``fault_worker``).
"""

DEVICE_MESSAGES = (
    (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 44.35 GiB "
        "of which 1.20 GiB is free."
    ),
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "CUDA driver error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cusparse error: CUSPARSE_STATUS_INSUFFICIENT_RESOURCES",
)
HOST_MESSAGES = (
    (
        "[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 68719476736 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "DefaultCPUAllocator: not enough memory: you tried to allocate 512 bytes.",
    "std::bad_alloc",
)
