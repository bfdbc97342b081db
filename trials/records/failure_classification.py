"""What an exception in the child, or its end, says of the batch. No torch here.

An exception is told by its class first, then by known words; a process that ended without a word by
its exit code, by what it printed, and by the kernel's count of processes killed for memory.
"""

import contextlib
import errno
import signal
import traceback
from collections.abc import Sequence
from pathlib import Path

from trials.records.observation import Outcome

# By name, so that nothing is imported to ask: torch.OutOfMemoryError and the one it was called
# before 2.5, and this project's own on devices that only count.
DEVICE_CLASSES = frozenset({"OutOfMemoryError", "DeviceOutOfMemoryError"})
CUDA_OUT_OF_MEMORY = "cuda error: out of memory"  # cudaErrorMemoryAllocation, from any CUDA call
# In lower case; each is part of a message that means the device has no memory left.
DEVICE_WORDS = (
    CUDA_OUT_OF_MEMORY,
    "cuda out of memory",  # PyTorch's allocator, where it is wrapped by another exception
    "cuda driver error: out of memory",  # the driver, under expandable segments
    "cudaerrormemoryallocation",  # the same error by the runtime's name for it
    "cuda_error_out_of_memory",  # and by the driver's
    "cublas_status_alloc_failed",  # cuBLAS: no memory for its handle or workspace
    # What cublasCreate says when it gets no memory for its workspace (discuss.pytorch.org/t/125450)
    # and after an assertion on the device has failed; the latter is raised before it comes to that.
    "cublas_status_not_initialized when calling `cublascreate",
    "cudnn_status_alloc_failed",  # cuDNN until 8
    "cudnn_status_internal_error_device_allocation_failed",  # cuDNN from 9 on
    "cusparse_status_insufficient_resources",
    # Loading a kernel takes memory outside PyTorch's allocator (gpuAssert in Triton's driver.c).
    "triton error [cuda]: out of memory",
    "out of memory at line",  # bitsandbytes: BNB_CHECK_RETURN in its csrc/compat.cuh
    "unhandled cuda error: out of memory",  # NCCL, as the next three
    "cuda failure 'out of memory'",
    "cuda failure 2 'out of memory'",
    "failed to cuda calloc",  # its alloc.h, and the last thing it says of the one above
)
# Asked before those of the device: where both stand, the device is only who was asked.
HOST_WORDS = (
    "can't allocate memory",  # DefaultCPUAllocator, with the errno's text
    "cannot allocate memory",  # the same errno, from everybody else (ENOMEM)
    "not enough memory: you tried to allocate",  # DefaultCPUAllocator on some platforms
    "std::bad_alloc",  # C++, where nobody caught it
    "cudnn_status_internal_error_host_allocation_failed",  # cuDNN from 9 on
    "failed to cuda host alloc",  # NCCL, pinned memory: its alloc.h
    "unable to allocate pinned memory",
)
# The file of bitsandbytes that allocates and moves the managed memory of its paged optimizers. The
# host backs that memory, and its size does not depend on the batch, so it tells nothing of it.
MANAGED_MEMORY = "pythoninterface.c"
# Not here, since these say nothing certain of memory: "unable to find an engine" (cuDNN, when each
# of its plans failed: for memory, or as the device has none for this dtype), "out of resource"
# (Triton: the shared memory of one multiprocessor, too small whatever the batch).

# Retrying in a fresh child changes none of these: the machine or the recipe is not what it must be.
FINAL_CLASSES = frozenset(
    {
        "DeviceError",
        "ExpertsError",
        "FamilyError",
        "ImportError",
        "KernelError",
        "ModuleNotFoundError",
        "RecipeError",
        "TargetError",
    }
)
# In lower case; each is part of a message that a device in order does not give, whatever the batch.
# One cell may bring it about by a mistake of its kernels: it takes several to blame the device.
SICK_WORDS = (
    "cuda error",
    "cuda driver error",
    "cuda failure",
    "cuda unknown error",
    "cudaerror",
    "cublas_status_",
    "cudnn_status_",
    "deviceerror",
    "device-side assert",
    "ecc error",
    "fallen off the bus",
    "gpu is lost",
    "no cuda-capable device",
    "nvmlerror",
    "nvrm: xid",
    "uncorrectable ecc",
)
OOM_COUNTERS = (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events"))


def classify(error: BaseException) -> tuple[Outcome, str]:
    """The outcome an exception stands for, and one line on it.

    A CUDA error that spoils the context (an illegal address, an assertion on the device, an ECC
    error) is FAILED like any other: the child is replaced after it, and with it the context.
    """
    link: BaseException | None = error
    while link is not None:
        outcome = _memory_outcome(link)
        if outcome is not None:
            return outcome, _line(link)
        link = link.__cause__
    return Outcome.FAILED, f"{type(error).__name__}: {_line(error)}"


def is_final(error: BaseException) -> bool:
    """Whether trying again cannot help."""
    return not FINAL_CLASSES.isdisjoint(_class_names(error))


def blames_device(outcome: Outcome, detail: str | None) -> bool:
    """Whether a probe came to nothing for its device's sake, by what it says."""
    words = (detail or "").lower()
    return outcome is Outcome.FAILED and any(part in words for part in SICK_WORDS)


def ending(code: int, printed: Sequence[str], *, killed_for_memory: bool) -> tuple[Outcome, str]:
    """The outcome that the end of a process stands for, and one line on it.

    Args:
        code: its exit code, or less a signal's number.
        printed: the lines it printed last.
        killed_for_memory: the kernel killed a process for lack of host memory meanwhile.
    """
    if code == -signal.SIGKILL and killed_for_memory:
        return Outcome.HOST_OUT_OF_MEMORY, "the host ran out of memory and killed the child"
    # bitsandbytes prints an error and exits, where others raise; C++ prints what nobody caught, and
    # aborts. Any other signal has its own reason, whatever was printed before.
    said = printed if code > 0 or code == -signal.SIGABRT else ()
    for line in reversed(said):
        outcome = _told_by(line)
        if outcome is not None:
            return outcome, line
    last = f": {said[-1]}" if said else ""
    if code < 0:
        return Outcome.FAILED, f"the child was killed by {_signal_name(-code)}{last}"
    return Outcome.FAILED, f"the child ended with exit code {code}{last}"


def host_oom_kills() -> int:
    """Processes killed for lack of host memory so far, by the kernel or a container's own limit."""
    kills = 0
    for counters in OOM_COUNTERS:
        with contextlib.suppress(OSError):
            for line in counters.read_text(encoding="ascii").splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    kills += int(count)
    return kills


def _memory_outcome(error: BaseException) -> Outcome | None:
    """What one exception, without those it came from, says of memory; None if nothing."""
    if not DEVICE_CLASSES.isdisjoint(_class_names(error)):
        return Outcome.OUT_OF_MEMORY
    if isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno == errno.ENOMEM
    ):
        return Outcome.HOST_OUT_OF_MEMORY
    text = str(error)
    if CUDA_OUT_OF_MEMORY in text.lower() and _was_pinning(error):
        return Outcome.HOST_OUT_OF_MEMORY
    return _told_by(text)


def _told_by(text: str) -> Outcome | None:
    """What a message says of memory; None if nothing."""
    words = text.lower()
    told_by_device = any(part in words for part in DEVICE_WORDS)
    if any(part in words for part in HOST_WORDS) or (told_by_device and MANAGED_MEMORY in words):
        return Outcome.HOST_OUT_OF_MEMORY
    return Outcome.OUT_OF_MEMORY if told_by_device else None


def _was_pinning(error: BaseException) -> bool:
    """Whether it was raised while host memory was being pinned.

    PyTorch's CachingHostAllocator.cpp checks cudaHostAlloc as it does any CUDA call, so the message
    is that of a device without memory.
    """
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    return any("pin_memory" in f"{frame.name} {frame.line}" for frame in frames)


def _class_names(error: BaseException) -> set[str]:
    return {cls.__name__ for cls in type(error).__mro__}


def _line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a realtime signal has no name
        return f"signal {number}"
