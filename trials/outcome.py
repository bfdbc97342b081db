"""What an exception in the child says of the batch. By its class first, then by known words."""

from trials.observation import Outcome

# By name, so that nothing is imported to ask: torch.OutOfMemoryError and the one it was called
# before 2.5, and this project's own on devices that only count.
DEVICE_CLASSES = frozenset({"OutOfMemoryError", "DeviceOutOfMemoryError"})
# In lower case; each is part of a message that means the device has no memory left.
DEVICE_WORDS = (
    "cuda out of memory",  # PyTorch's allocator, where it is wrapped by another exception
    "cuda error: out of memory",  # cudaErrorMemoryAllocation, outside the allocator
    "cuda driver error: out of memory",  # the driver, under expandable segments
    "cublas_status_alloc_failed",  # cuBLAS: no memory for its handle or workspace
    # cublasCreate takes memory for its workspace, and says this when it gets none.
    "cublas_status_not_initialized",
    "cudnn_status_alloc_failed",  # cuDNN, as cuBLAS
    "cusparse_status_insufficient_resources",
    "cudaerrormemoryallocation",
    "cuda_error_out_of_memory",
    "error out of memory at line",  # bitsandbytes: CUDA_CHECK_RETURN in its csrc
    "out of memory in file",  # bitsandbytes, as above
    "nccl error: unhandled cuda error: out of memory",
    "tried to allocate",  # PyTorch's allocator, whatever stands around it
)
HOST_WORDS = (
    "can't allocate memory",  # DefaultCPUAllocator, with the errno's text
    "cannot allocate memory",  # the same errno, from everybody else (ENOMEM)
    "not enough memory: you tried to allocate",  # DefaultCPUAllocator on some platforms
    "cudahostalloc",  # pinned host memory
    "cudaerrorhostmemoryalreadyregistered",
    "unable to allocate pinned memory",
    "std::bad_alloc",
)
# Retrying in a fresh child changes none of these: the machine or the recipe is not what it must be.
FINAL_CLASSES = frozenset(
    {
        "DeviceError",
        "ExpertsError",
        "ImportError",
        "KernelError",
        "ModuleNotFoundError",
        "RecipeError",
        "TargetError",
    }
)


def classify(error: BaseException) -> tuple[Outcome, str]:
    """The outcome an exception stands for, and one line on it.

    A CUDA error that spoils the context (an illegal address, an assertion on the device, an ECC
    error) is FAILED like any other: the child is replaced after it, and with it the context.
    """
    line = (str(error).strip() or repr(error)).splitlines()[0]
    words = str(error).lower()
    names = {cls.__name__ for cls in type(error).__mro__}
    if isinstance(error, MemoryError) or any(part in words for part in HOST_WORDS):
        return Outcome.HOST_OUT_OF_MEMORY, line
    if names & DEVICE_CLASSES or any(part in words for part in DEVICE_WORDS):
        return Outcome.OUT_OF_MEMORY, line
    return Outcome.FAILED, f"{type(error).__name__}: {line}"


def is_final(error: BaseException) -> bool:
    """Whether trying again cannot help."""
    return not FINAL_CLASSES.isdisjoint(cls.__name__ for cls in type(error).__mro__)
