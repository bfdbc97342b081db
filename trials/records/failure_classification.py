"""Classification of failures in a child: out of memory, on device or host, or other. No torch.

An exception is classified by its class first, then by phrases in its message. A process that ended
without an exception is classified by its exit code, the lines it printed, and the kernel's count of
processes killed for lack of memory.
"""

import contextlib
import errno
import re
import signal
import traceback
from collections.abc import Sequence
from pathlib import Path

from trials.records.cell import Cell
from trials.records.observation import Outcome

# By name, so that this module imports no torch: torch.OutOfMemoryError (torch.cuda.OutOfMemoryError
# before 2.5) and this project's own error on devices that only count.
DEVICE_CLASSES = frozenset({"OutOfMemoryError", "DeviceOutOfMemoryError"})
CUDA_OUT_OF_MEMORY = "cuda error: out of memory"  # cudaErrorMemoryAllocation, from any CUDA call
# In lower case; each is part of a message of a device without free memory.
DEVICE_WORDS = (
    CUDA_OUT_OF_MEMORY,
    "cuda out of memory",  # PyTorch's allocator, where it is wrapped by another exception
    "cuda driver error: out of memory",  # the driver, under expandable segments
    "cudaerrormemoryallocation",  # the same error by the runtime's name for it
    "cuda_error_out_of_memory",  # and by the driver's
    "cublas_status_alloc_failed",  # cuBLAS: no memory for its handle or workspace
    # cublasCreate reports this when it gets no memory for its workspace
    # (discuss.pytorch.org/t/125450). It also does so after a failed assertion on the device, but
    # that assertion raises its own error earlier.
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
    "failed to cuda calloc",  # NCCL's alloc.h, the last line of the error above
)
# Checked before the device's phrases: a message with both names the device that made the request.
HOST_WORDS = (
    "can't allocate memory",  # DefaultCPUAllocator, with the errno's text
    "cannot allocate memory",  # the same errno from other libraries (ENOMEM)
    "not enough memory: you tried to allocate",  # DefaultCPUAllocator on some platforms
    "std::bad_alloc",  # uncaught in C++
    "cudnn_status_internal_error_host_allocation_failed",  # cuDNN from 9 on
    "failed to cuda host alloc",  # NCCL, pinned memory: its alloc.h
    "unable to allocate pinned memory",
)
# The file of bitsandbytes that allocates and moves the managed memory of its paged optimizers. The
# host backs that memory and its size does not depend on the batch, so its errors give no verdict.
MANAGED_MEMORY = "pythoninterface.c"
# Two phrases are left out because they do not prove a lack of memory: "unable to find an engine"
# (cuDNN, when each of its plans failed, for memory or because none supports the dtype) and "out of
# resource" (Triton: the shared memory of one multiprocessor, too small at any batch size).

# Retrying in a fresh child cannot remove these errors: machine or recipe are wrong.
FINAL_CLASSES = frozenset(
    {
        "DeviceError",
        "ExpertsError",
        "FamilyError",
        "ImportError",
        "KernelError",
        "ModuleNotFoundError",
        "LayersError",
        "QuantisationError",
        "RecipeError",
        "TargetError",
    }
)
# In lower case; each is part of a message that a healthy device gives at no batch size. A bug in
# one cell's kernels can cause it too, so it takes several cells to blame the device.
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
    """Outcome of a probe that raised an exception, and one line on it.

    A CUDA error that corrupts the context (an illegal address, an assertion on the device, an ECC
    error) is FAILED like any other: the child is replaced after it, and the context with it.
    """
    link: BaseException | None = error
    while link is not None:
        outcome = _memory_outcome(link)
        if outcome is not None:
            return outcome, _line(link)
        link = link.__cause__
    return Outcome.FAILED, f"{type(error).__name__}: {_line(error)}"


def is_final(error: BaseException) -> bool:
    """Whether another attempt after this exception is pointless."""
    return not FINAL_CLASSES.isdisjoint(_class_names(error))


def blames_device(outcome: Outcome, detail: str | None) -> bool:
    """Whether the message of a failed probe points to a faulty device."""
    words = (detail or "").lower()
    return outcome is Outcome.FAILED and any(part in words for part in SICK_WORDS)


def blamed_node(cell: Cell, detail: str) -> int | None:
    """Number of the node that the message of a failed probe is about; None where it names none.

    Args:
        cell: of the probe; of one on several nodes, messages begin with their rank or node.
        detail: the message.
    """
    if cell.nodes == 1:
        return 0
    named = re.match(r"(rank|node) (\d+): ", detail)
    if named is None:
        return None
    return cell.node_of(int(named[2])) if named[1] == "rank" else int(named[2])


def ending(code: int, printed: Sequence[str], *, killed_for_memory: bool) -> tuple[Outcome, str]:
    """Outcome of a probe whose process ended, and one line on it.

    Args:
        code: exit code, or minus a signal's number.
        printed: last lines that the process printed.
        killed_for_memory: whether the kernel killed a process for lack of host memory meanwhile.
    """
    if code == -signal.SIGKILL and killed_for_memory:
        return Outcome.HOST_OUT_OF_MEMORY, "the host ran out of memory and killed the child"
    # bitsandbytes prints an error and exits instead of raising; C++ prints an uncaught exception
    # and aborts. Any other signal is its own cause, whatever was printed before.
    relevant = printed if code > 0 or code == -signal.SIGABRT else ()
    for line in reversed(relevant):
        outcome = _text_outcome(line)
        if outcome is not None:
            return outcome, line
    last = f": {relevant[-1]}" if relevant else ""
    if code < 0:
        return Outcome.FAILED, f"the child was killed by {_signal_name(-code)}{last}"
    return Outcome.FAILED, f"the child ended with exit code {code}{last}"


def host_oom_kills() -> int:
    """Processes killed so far for lack of host memory, by the kernel or a container's limit."""
    kills = 0
    for counters in OOM_COUNTERS:
        with contextlib.suppress(OSError):
            for line in counters.read_text(encoding="ascii").splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    kills += int(count)
    return kills


def _memory_outcome(error: BaseException) -> Outcome | None:
    """Outcome of one exception, without its causes; None when it gives no verdict on memory."""
    if not DEVICE_CLASSES.isdisjoint(_class_names(error)):
        return Outcome.OUT_OF_MEMORY
    if isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno == errno.ENOMEM
    ):
        return Outcome.HOST_OUT_OF_MEMORY
    text = str(error)
    if CUDA_OUT_OF_MEMORY in text.lower() and _was_pinning(error):
        return Outcome.HOST_OUT_OF_MEMORY
    return _text_outcome(text)


def _text_outcome(text: str) -> Outcome | None:
    """Outcome by the phrases in a message; None when it gives no verdict on memory."""
    words = text.lower()
    is_device = any(part in words for part in DEVICE_WORDS)
    if any(part in words for part in HOST_WORDS) or (is_device and MANAGED_MEMORY in words):
        return Outcome.HOST_OUT_OF_MEMORY
    return Outcome.OUT_OF_MEMORY if is_device else None


def _was_pinning(error: BaseException) -> bool:
    """Whether an exception was raised while host memory was being pinned.

    PyTorch's CachingHostAllocator.cpp checks cudaHostAlloc like any other CUDA call, so its error
    reads like that of a device without memory.
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
