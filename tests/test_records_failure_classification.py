"""What an exception, or an end, says of the batch: every way to run out of memory, and none."""

import signal
from pathlib import Path

import pytest
import torch
from builders.memory_messages import DEVICE_MESSAGES, HOST_MESSAGES

from trials.devices.device import DeviceError, DeviceOutOfMemoryError
from trials.models.adapter_targets import TargetError
from trials.models.experts import ExpertsError
from trials.records import failure_classification as outcome_module
from trials.records.failure_classification import classify, ending, host_oom_kills, is_final
from trials.records.observation import Outcome
from trials.training.recipe_check import RecipeError

DEVICE = [
    torch.OutOfMemoryError(DEVICE_MESSAGES[0]),
    torch.OutOfMemoryError("another text, some day"),
    DeviceOutOfMemoryError("12 bytes of live tensors exceed the budget of 8 bytes"),
    *(RuntimeError(message) for message in DEVICE_MESSAGES if "at line" not in message),
    Exception("cudaErrorMemoryAllocation: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("NCCL error in: x.cpp:1, unhandled cuda error\nCuda failure 2 'out of memory'"),
    RuntimeError("NCCL error in: x.cpp:1\nLast error:\nFailed to CUDA calloc 6291456 bytes"),
]
HOST = [
    MemoryError(),
    OSError(12, "in another language"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    RuntimeError("NCCL error in: x.cpp:1\nLast error:\nFailed to CUDA host alloc 512 bytes"),
    *(RuntimeError(message) for message in HOST_MESSAGES),
]
NEITHER = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: unspecified launch failure"),
    RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    RuntimeError("CUDA error: no kernel image is available for execution on the device"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm(handle)`"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("GET was unable to find an engine to execute this computation"),
    RuntimeError("cudaErrorHostMemoryAlreadyRegistered: resource already mapped"),
    RuntimeError("out of resource: shared memory, Required: 147456, Hardware limit: 101376."),
    ValueError("expected sequence of length 8"),
    KeyError("memory"),
]


@pytest.mark.parametrize("error", DEVICE, ids=str)
def test_every_way_to_run_out_of_device_memory_is_known(error: BaseException) -> None:
    """PyTorch's classes, and the messages of CUDA, its libraries and Triton."""
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


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    """An exception that has been raised, from another if there is one."""
    try:
        raise error from cause
    except type(error) as caught:
        return caught


@pytest.mark.parametrize("cause", [DEVICE[0], MemoryError()], ids=repr)
def test_an_exception_is_told_by_the_one_it_was_raised_from(cause: BaseException) -> None:
    """Libraries wrap what they cannot handle; the line is then that of the one that knew."""
    wrapped = raised(RuntimeError("the forward pass failed"), ValueError("as it says"))
    assert classify(wrapped)[0] is Outcome.FAILED
    wrapped = raised(RuntimeError("the forward pass failed"), raised(ValueError("no"), cause))
    assert classify(wrapped) == classify(cause)


def pin_memory(error: BaseException) -> None:
    """Raises, as DeepSpeed's function of that name does when the host has no memory to pin."""
    raise error


def test_pinning_host_memory_speaks_of_the_device_and_means_the_host() -> None:
    """PyTorch says the same of cudaHostAlloc as of any CUDA call: what was being done decides."""
    message = "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"
    with pytest.raises(RuntimeError) as elsewhere:
        raise RuntimeError(message)
    assert classify(elsewhere.value)[0] is Outcome.OUT_OF_MEMORY
    with pytest.raises(RuntimeError) as pinning:
        pin_memory(RuntimeError(message))
    assert classify(pinning.value) == (Outcome.HOST_OUT_OF_MEMORY, message.splitlines()[0])
    with pytest.raises(torch.OutOfMemoryError) as allocating:
        pin_memory(torch.OutOfMemoryError(DEVICE_MESSAGES[0]))
    assert classify(allocating.value)[0] is Outcome.OUT_OF_MEMORY


BITSANDBYTES = "Error {} at line 380 in file /src/csrc/{}"


@pytest.mark.parametrize(
    ("code", "last", "outcome", "detail"),
    [
        (1, BITSANDBYTES.format("out of memory", "ops.cu"), Outcome.OUT_OF_MEMORY, "Error out of"),
        (
            1,
            BITSANDBYTES.format("out of memory", "pythonInterface.cpp"),
            Outcome.HOST_OUT_OF_MEMORY,
            "Error out of memory at line 380",
        ),
        (
            1,
            BITSANDBYTES.format("an illegal memory access was encountered", "ops.cu"),
            Outcome.FAILED,
            "the child ended with exit code 1: Error an illegal memory access",
        ),
        (
            -signal.SIGABRT,
            "  what():  std::bad_alloc",
            Outcome.HOST_OUT_OF_MEMORY,
            "  what():  std::bad_alloc",
        ),
        (
            -signal.SIGABRT,
            "free(): invalid pointer",
            Outcome.FAILED,
            "the child was killed by SIGABRT: free(): invalid pointer",
        ),
        (
            -signal.SIGKILL,
            "a warning: CUDA out of memory",
            Outcome.FAILED,
            "the child was killed by SIGKILL",
        ),
        (0, "anything", Outcome.FAILED, "the child ended with exit code 0"),
        (-40, "anything", Outcome.FAILED, "the child was killed by signal 40"),
    ],
)
def test_an_end_is_told_by_its_code_and_what_was_printed(
    code: int, last: str, outcome: Outcome, detail: str
) -> None:
    """Libraries in C print an error and end the process; what a signal killed, it killed."""
    found, said = ending(code, ["a warning", last], killed_for_memory=False)
    assert found is outcome
    assert said.startswith(detail)
    assert ending(code, [], killed_for_memory=False)[0] is Outcome.FAILED


def test_only_what_the_kernel_killed_can_have_been_killed_for_memory() -> None:
    """It kills by SIGKILL; another process may have been the one it chose."""
    killed = ending(-signal.SIGKILL, [], killed_for_memory=True)
    assert killed[0] is Outcome.HOST_OUT_OF_MEMORY
    assert ending(-signal.SIGSEGV, [], killed_for_memory=True)[0] is Outcome.FAILED


def test_kills_for_memory_are_counted_by_machine_and_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both files of the kernel, either of which may not be there; a group's kill is no other."""
    vmstat, events = tmp_path / "vmstat", tmp_path / "memory.events"
    vmstat.write_text("nr_free_pages 7\noom_kill 3\nthp_fault_alloc 9\n", encoding="ascii")
    monkeypatch.setattr(outcome_module, "OOM_COUNTERS", (vmstat, events))
    assert host_oom_kills() == 3
    events.write_text("max 5\noom 2\noom_kill 1\noom_group_kill 4\n", encoding="ascii")
    assert host_oom_kills() == 4
