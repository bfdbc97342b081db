"""The CUDA device without a GPU: its identity, its memory limit, other processes."""

import subprocess
import sys

import pytest
import torch

from gpu_catalog.catalog import load_catalog
from trials.devices.cuda import (
    CudaDevice,
    GpuTakenError,
    allocator_settings,
    check_identity,
    memory_limit,
    settled,
)
from trials.devices.device import DeviceError
from trials.records.failure_classification import classify, is_final
from trials.records.observation import Outcome

GIB = 2**30
A40 = load_catalog().gpu("A40")


def test_a_gpu_with_the_catalogs_name_and_memory_is_the_catalogs_gpu() -> None:
    """Drivers and ECC settings change the usable memory a little; that is no mismatch."""
    assert A40.usable_memory_bytes is not None
    for total in (A40.usable_memory_bytes, round(1.07 * A40.usable_memory_bytes)):
        check_identity(A40, "NVIDIA A40", total)


def test_another_gpu_is_refused_by_its_name() -> None:
    """The error names both memories and the node resource of the actual GPU."""
    with pytest.raises(DeviceError) as error:
        check_identity(A40, "NVIDIA A100-SXM4-40GB", 42405855232)
    message = str(error.value)
    assert all(
        text in message
        for text in ("NVIDIA A100-SXM4-40GB", "39.5 GiB", "44.4 GiB", "A100-40GB-SXM")
    )
    assert message.endswith("not 'A40'")


def test_a_gpu_of_the_right_name_and_another_memory_is_refused() -> None:
    """V100s of 16 and 32 GB share a name, as do a GPU and a slice of it."""
    with pytest.raises(DeviceError) as error:
        check_identity(A40, "NVIDIA A40", 22 * GIB)
    assert "22.0 GiB" in str(error.value)
    assert "44.4 GiB" in str(error.value)


def test_an_unknown_gpu_is_refused_with_a_way_to_add_it() -> None:
    """A GPU without a catalog row is an error that names the specification's catalog."""
    with pytest.raises(DeviceError, match="add it to the specification's catalog"):
        check_identity(A40, "NVIDIA Z9", 44 * GIB)


class FullGpu(CudaDevice):
    """A GPU on which other processes left no room for a CUDA context."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error
        self._neighbours = None
        self._enter(A40)

    def _make_context(self) -> None:
        raise self._error


@pytest.mark.parametrize(
    "message", ["CUDA error: out of memory", "CUDA out of memory. Tried to allocate 2.00 MiB."]
)
def test_a_gpu_filled_by_others_is_a_failure_that_may_be_retried(message: str) -> None:
    """It is no out-of-memory outcome of a batch, and it may pass."""
    with pytest.raises(GpuTakenError, match="A40: other processes") as error:
        FullGpu(torch.OutOfMemoryError(message))
    assert classify(error.value)[0] is Outcome.FAILED
    assert not is_final(error.value)


def test_another_cuda_error_is_raised_unchanged() -> None:
    """An error that is not about memory passes through unchanged."""
    with pytest.raises(RuntimeError, match="uncorrectable ECC error"):
        FullGpu(RuntimeError("CUDA error: uncorrectable ECC error encountered"))


def test_without_a_cap_the_limit_is_the_free_memory() -> None:
    """The CUDA context, libraries and other processes take the rest."""
    assert memory_limit(43 * GIB, 44 * GIB, 0, None) == 43 * GIB


@pytest.mark.parametrize("foreign", [0, 30 * GIB])
def test_a_capped_limit_excludes_cudas_own_memory_but_not_other_processes(foreign: int) -> None:
    """The smaller GPU would have a CUDA context too, but not this machine's other processes."""
    assert memory_limit(139 * GIB - foreign, 140 * GIB, foreign, 44 * GIB) == 43 * GIB


@pytest.mark.parametrize(("cap", "foreign"), [(141, 0), (0.5, 0), (44, 97)])
def test_a_gpu_too_small_or_too_full_cannot_stand_in(cap: float, foreign: int) -> None:
    """The error gives the memory of the GPU, of other processes and of CUDA."""
    message = rf"of 140\.0 GiB, {foreign}\.0 .* and 1\.0 by CUDA, cannot stand in for one of {cap}"
    with pytest.raises(DeviceError, match=message):
        memory_limit((139 - foreign) * GIB, 140 * GIB, foreign * GIB, int(cap * GIB))


@pytest.mark.parametrize(
    ("environ", "recorded"),
    [
        ({}, ""),
        ({"PYTORCH_CUDA_ALLOC_CONF": "", "HOME": "/"}, ""),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "a:1"}, "a:1"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "b:2"}, "a:1; b:2"),
    ],
)
def test_settings_of_the_allocator_are_recorded_under_either_name(
    environ: dict[str, str], recorded: str
) -> None:
    """Where they differ both are recorded: torch changed which of them takes precedence."""
    assert allocator_settings(environ) == recorded


FORK_SERVER_ON_A_GPU = """
import torch, torch._C as C
def touched(*_): raise SystemExit("CUDA was touched")
torch.cuda._is_compiled = lambda: True
torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = touched
C._cuda_getDeviceCount = C._cuda_init = touched
C._cuda_getCurrentRawStream = None  # imported by name where torch seems built for CUDA
from trials.child_process.bootstrap import HIDDEN, hide
hide(*HIDDEN)
import trials.training.worker, trials.devices.cuda
print("untouched")
try:
    import peft
except SystemExit as end:
    print(end)
"""


@pytest.mark.long
def test_a_fork_server_imports_nothing_that_touches_the_gpu() -> None:
    """CUDA cannot be used after a fork: children import peft and bitsandbytes.

    Torch is made to believe that it is built for CUDA: the test needs no GPU.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK_SERVER_ON_A_GPU],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == ["untouched", "CUDA was touched"], done.stderr


class Gauge:
    """A gauge that reads given values in turn and repeats the last, and a clock that advances."""

    def __init__(self, *values: int | None) -> None:
        self._values = list(values)
        self.now = 0.0

    def read(self) -> int | None:
        return self._values.pop(0) if len(self._values) > 1 else self._values[0]

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("values", "settled_at"),
    [
        ((5 * GIB,), 5 * GIB),
        ((80 * GIB, 40 * GIB, 3 * GIB, 3 * GIB), 3 * GIB),
        ((80 * GIB, 80 * GIB, 80 * GIB, 3 * GIB), 3 * GIB),
        ((0,), 0),
        ((None,), None),
        ((7 * GIB, None), 7 * GIB),
    ],
)
def test_memory_of_a_killed_process_is_waited_for(
    values: tuple[int | None, ...], settled_at: int | None
) -> None:
    """A killed process frees its memory a moment after it has ended."""
    gauge = Gauge(*values)
    assert settled(gauge.read, gauge.clock, gauge.sleep) == settled_at


def test_a_free_gpu_is_not_waited_for() -> None:
    """An empty GPU costs a new child no waiting time."""
    gauge = Gauge(4 * 2**20)
    assert settled(gauge.read, gauge.clock, gauge.sleep) == 4 * 2**20
    assert gauge.now == 0


def test_waiting_for_memory_ends_after_a_few_seconds() -> None:
    """Memory that keeps falling is waited for at most about five seconds."""
    gauge = Gauge(*(1000 * GIB - n * GIB for n in range(1000)))
    settled(gauge.read, gauge.clock, gauge.sleep)
    assert gauge.now < 6
