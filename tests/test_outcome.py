"""What an exception says of the batch: every way to run out of memory, and what is none."""

import pytest
import torch
from memory_messages import DEVICE_MESSAGES, HOST_MESSAGES

from trials.devices.device import DeviceError, DeviceOutOfMemoryError
from trials.models.experts import ExpertsError
from trials.models.targets import TargetError
from trials.observation import Outcome
from trials.outcome import classify, is_final
from trials.recipe_check import RecipeError

DEVICE = [
    torch.OutOfMemoryError(DEVICE_MESSAGES[0]),
    torch.OutOfMemoryError("another text, some day"),
    DeviceOutOfMemoryError("12 bytes of live tensors exceed the budget of 8 bytes"),
    *(RuntimeError(message) for message in DEVICE_MESSAGES),
    Exception("cudaErrorMemoryAllocation: out of memory"),
]
HOST = [
    MemoryError(),
    OSError(12, "Cannot allocate memory"),
    *(RuntimeError(message) for message in HOST_MESSAGES),
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
