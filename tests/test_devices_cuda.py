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
    """A little more or less memory is another driver or ECC setting."""
    assert A40.usable_memory_bytes is not None
    for total in (A40.usable_memory_bytes, round(1.07 * A40.usable_memory_bytes)):
        check_identity(A40, "NVIDIA A40", total)


def test_another_gpu_is_refused_by_its_name() -> None:
    """With the resource its node should carry."""
    with pytest.raises(DeviceError) as error:
        check_identity(A40, "NVIDIA A100-SXM4-40GB", 42405855232)
    message = str(error.value)
    assert all(
        text in message
        for text in ("NVIDIA A100-SXM4-40GB", "39.5 GiB", "44.4 GiB", "A100-40GB-SXM")
    )
    assert message.endswith("not 'A40'")


def test_a_gpu_of_the_right_name_and_another_memory_is_refused() -> None:
    """V100s of 16 and 32 GB share a name; a slice of a GPU has its name and not its memory."""
    with pytest.raises(DeviceError) as error:
        check_identity(A40, "NVIDIA A40", 22 * GIB)
    assert "22.0 GiB" in str(error.value)
    assert "44.4 GiB" in str(error.value)


def test_a_gpu_nobody_knows_is_told_how_to_add() -> None:
    """The catalog is the user's to extend."""
    with pytest.raises(DeviceError, match="add it to the specification's catalog"):
        check_identity(A40, "NVIDIA Z9", 44 * GIB)


class FullGpu(CudaDevice):
    """A GPU on which others left no room for a CUDA context."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error
        self._neighbours = None
        self._enter(A40)

    def _make_context(self) -> None:
        raise self._error


@pytest.mark.parametrize(
    "message", ["CUDA error: out of memory", "CUDA out of memory. Tried to allocate 2.00 MiB."]
)
def test_a_gpu_that_others_filled_says_nothing_of_a_batch(message: str) -> None:
    """It would be taken for a batch that does not fit; and it may pass, so it is tried again."""
    with pytest.raises(GpuTakenError, match="A40: other processes") as error:
        FullGpu(torch.OutOfMemoryError(message))
    assert classify(error.value)[0] is Outcome.FAILED
    assert not is_final(error.value)


def test_another_failure_of_cuda_is_told_as_it_is() -> None:
    """It is no question of room."""
    with pytest.raises(RuntimeError, match="uncorrectable ECC error"):
        FullGpu(RuntimeError("CUDA error: uncorrectable ECC error encountered"))


def test_without_a_cap_the_limit_is_what_is_free() -> None:
    """The context, the libraries and other processes have the rest."""
    assert memory_limit(43 * GIB, 44 * GIB, 0, None) == 43 * GIB


@pytest.mark.parametrize("foreign", [0, 30 * GIB])
def test_under_a_cap_what_cuda_takes_here_is_taken_off_there(foreign: int) -> None:
    """The CUDA context would stand on the smaller GPU as well; what others hold here would not."""
    assert memory_limit(139 * GIB - foreign, 140 * GIB, foreign, 44 * GIB) == 43 * GIB


@pytest.mark.parametrize(("cap", "foreign"), [(141, 0), (0.5, 0), (44, 97)])
def test_a_gpu_too_small_or_too_full_cannot_stand_in(cap: float, foreign: int) -> None:
    """Told with the numbers."""
    told = rf"of 140\.0 GiB, {foreign}\.0 .* and 1\.0 by CUDA, cannot stand in for one of {cap}"
    with pytest.raises(DeviceError, match=told):
        memory_limit((139 - foreign) * GIB, 140 * GIB, foreign * GIB, int(cap * GIB))


@pytest.mark.parametrize(
    ("environ", "told"),
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
    environ: dict[str, str], told: str
) -> None:
    """Both where they differ: torch reads either, and which comes first has changed."""
    assert allocator_settings(environ) == told


FORK_SERVER_ON_A_GPU = """
import torch, torch._C as C
def touched(*_): raise SystemExit("CUDA was touched")
torch.cuda._is_compiled = lambda: True
torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = touched
C._cuda_getDeviceCount = C._cuda_init = touched
C._cuda_getCurrentRawStream = None  # imported by name where torch seems built for CUDA
import trials.training.worker, trials.devices.cuda
print("untouched")
try:
    import peft
except SystemExit as end:
    print(end)
"""


def test_a_parent_of_children_imports_nothing_that_touches_the_gpu() -> None:
    """CUDA cannot be used after a fork; peft and bitsandbytes would touch it, so they come later.

    Torch is made to believe that it is built for CUDA; a GPU is not needed to see who asks for one.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK_SERVER_ON_A_GPU],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == ["untouched", "CUDA was touched"], done.stderr


class Gauge:
    """A gauge that reads so many values in turn, the last one for ever, and a clock that moves."""

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
    """It comes back a moment after the process is gone, and is nobody's then."""
    gauge = Gauge(*values)
    assert settled(gauge.read, gauge.clock, gauge.sleep) == settled_at


def test_a_free_gpu_is_not_waited_for() -> None:
    """Every child would lose that time."""
    gauge = Gauge(4 * 2**20)
    assert settled(gauge.read, gauge.clock, gauge.sleep) == 4 * 2**20
    assert gauge.now == 0


def test_memory_that_goes_on_falling_is_not_waited_for_for_ever() -> None:
    """Five seconds at most."""
    gauge = Gauge(*(1000 * GIB - n * GIB for n in range(1000)))
    settled(gauge.read, gauge.clock, gauge.sleep)
    assert gauge.now < 6
