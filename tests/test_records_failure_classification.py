"""Classification of exceptions and process ends: out of memory, thrashing or failure."""

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
def test_every_device_memory_error_is_recognised(error: BaseException) -> None:
    """Classes of PyTorch, and messages of CUDA, its libraries and Triton."""
    outcome, detail = classify(error)
    assert outcome is Outcome.OUT_OF_MEMORY
    assert "\n" not in detail
    assert detail
    assert not is_final(error)


@pytest.mark.parametrize("error", HOST, ids=repr)
def test_host_memory_errors_are_not_device_memory_errors(error: BaseException) -> None:
    """Both use the same words; the allocator that raised the error decides."""
    assert classify(error)[0] is Outcome.HOST_OUT_OF_MEMORY


@pytest.mark.parametrize("error", NEITHER, ids=str)
def test_other_errors_are_failures_with_their_name(error: BaseException) -> None:
    """A corrupt CUDA context or a lack of shared memory says nothing about the batch size."""
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
def test_errors_that_a_retry_cannot_fix_are_final(error: BaseException) -> None:
    """The machine or the recipe is wrong."""
    assert classify(error)[0] is Outcome.FAILED
    assert is_final(error)


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    """An exception that has been raised, from a cause if there is one."""
    try:
        raise error from cause
    except type(error) as caught:
        return caught


@pytest.mark.parametrize("cause", [DEVICE[0], MemoryError()], ids=repr)
def test_an_exception_is_classified_by_its_cause(cause: BaseException) -> None:
    """Libraries wrap errors that they cannot handle; the reported line is that of the cause."""
    wrapped = raised(RuntimeError("the forward pass failed"), ValueError("as it says"))
    assert classify(wrapped)[0] is Outcome.FAILED
    wrapped = raised(RuntimeError("the forward pass failed"), raised(ValueError("no"), cause))
    assert classify(wrapped) == classify(cause)


def pin_memory(error: BaseException) -> None:
    """Fail as DeepSpeed's function of that name does when the host has no memory to pin."""
    raise error


def test_a_failure_to_pin_host_memory_is_a_host_memory_error() -> None:
    """PyTorch reports cudaHostAlloc like any CUDA call, so the failed operation decides."""
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
def test_a_process_end_is_classified_by_exit_code_and_output(
    code: int, last: str, outcome: Outcome, detail: str
) -> None:
    """C libraries print an error and exit; a signal is reported by its name."""
    actual, reason = ending(code, ["a warning", last], killed_for_memory=False)
    assert actual is outcome
    assert reason.startswith(detail)
    assert ending(code, [], killed_for_memory=False)[0] is Outcome.FAILED


def test_only_sigkill_can_be_a_kill_for_memory() -> None:
    """The kernel kills by SIGKILL, and it may have chosen another process."""
    killed = ending(-signal.SIGKILL, [], killed_for_memory=True)
    assert killed[0] is Outcome.HOST_OUT_OF_MEMORY
    assert ending(-signal.SIGSEGV, [], killed_for_memory=True)[0] is Outcome.FAILED


def test_kills_for_memory_are_counted_by_machine_and_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel has a file for each, either may be absent; kills of other groups do not count."""
    vmstat, events = tmp_path / "vmstat", tmp_path / "memory.events"
    vmstat.write_text("nr_free_pages 7\noom_kill 3\nthp_fault_alloc 9\n", encoding="ascii")
    monkeypatch.setattr(outcome_module, "OOM_COUNTERS", (vmstat, events))
    assert host_oom_kills() == 3
    events.write_text("max 5\noom 2\noom_kill 1\noom_group_kill 4\n", encoding="ascii")
    assert host_oom_kills() == 4
