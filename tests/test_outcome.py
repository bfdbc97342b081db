"""What an exception says of the batch: every way to run out of memory, and what is none."""

import pytest
import torch

from trials.devices.device import DeviceError, DeviceOutOfMemoryError
from trials.models.experts import ExpertsError
from trials.models.targets import TargetError
from trials.observation import Outcome
from trials.outcome import classify, is_final
from trials.recipe_check import RecipeError

DEVICE = [
    torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 44.35 GiB "
        "of which 1.20 GiB is free."
    ),
    DeviceOutOfMemoryError("12 bytes of live tensors exceed the budget of 8 bytes"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cusparse error: CUSPARSE_STATUS_INSUFFICIENT_RESOURCES"),
    RuntimeError("Error out of memory at line 380 in file /src/csrc/pythonInterface.cpp"),
    Exception("cudaErrorMemoryAllocation: out of memory"),
    RuntimeError("NCCL error: unhandled cuda error: out of memory"),
]
HOST = [
    MemoryError(),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 68719476736 bytes. Error code 12 (Cannot allocate memory)"
    ),
    OSError(12, "Cannot allocate memory"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 512 bytes."),
]
NEITHER = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: unspecified launch failure"),
    RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    RuntimeError("CUDA error: no kernel image is available for execution on the device"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
    RuntimeError("out of resource: shared memory, Required: 147456, Hardware limit: 101376."),
    ValueError("expected sequence of length 8"),
    KeyError("memory"),
]


@pytest.mark.parametrize("error", DEVICE, ids=str)
def test_every_way_to_run_out_of_device_memory_is_known(error: BaseException) -> None:
    """PyTorch's classes, and the messages of CUDA, its libraries and bitsandbytes."""
    outcome, detail = classify(error)
    assert outcome is Outcome.OUT_OF_MEMORY
    assert "\n" not in detail
    assert detail
    assert not is_final(error)


@pytest.mark.parametrize("error", HOST, ids=repr)
def test_memory_of_the_host_is_not_that_of_the_device(error: BaseException) -> None:
    """The same words stand in both; which allocator said them decides."""
    assert classify(error)[0] is Outcome.HOST_OUT_OF_MEMORY


@pytest.mark.parametrize("error", NEITHER, ids=str)
def test_what_is_not_memory_is_a_failure_with_its_name(error: BaseException) -> None:
    """A spoilt CUDA context says nothing of the batch, a lack of shared memory neither."""
    outcome, detail = classify(error)
    assert outcome is Outcome.FAILED
    assert detail.startswith(f"{type(error).__name__}: ")
    assert not is_final(error)


@pytest.mark.parametrize(
    "error",
    [
        DeviceError("another GPU"),
        ExpertsError("no"),
        ImportError("no"),
        ModuleNotFoundError("no"),
        RecipeError("no"),
        TargetError("no"),
    ],
    ids=repr,
)
def test_what_the_next_try_cannot_mend_is_final(error: BaseException) -> None:
    """The machine or the recipe is not what it must be."""
    assert classify(error)[0] is Outcome.FAILED
    assert is_final(error)
