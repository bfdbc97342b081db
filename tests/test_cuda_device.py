"""What can be told of the CUDA device without a GPU: its identity, its limit, who else is there."""

import pytest

from gpu_catalog.catalog import load_catalog
from trials.devices.cuda import _limit, check_identity, settled
from trials.devices.device import DeviceError

GIB = 2**30
A40 = load_catalog().gpu("A40")


def test_a_gpu_with_the_catalogs_name_and_memory_is_the_catalogs_gpu() -> None:
    """A little more or less memory is another driver or ECC setting."""
    assert A40.usable_memory_bytes is not None
    for total in (A40.usable_memory_bytes, round(1.07 * A40.usable_memory_bytes)):
        check_identity(A40, "NVIDIA A40", total)


def test_another_gpu_is_told_for_what_it_is() -> None:
    """With the resource its node should carry."""
    with pytest.raises(DeviceError) as error:
        check_identity(A40, "NVIDIA A100-SXM4-40GB", 42405855232)
    assert str(error.value) == (
        "the device is NVIDIA A100-SXM4-40GB with 39.5 GiB, but A40 is NVIDIA A40 with 44.4 GiB: "
        "this is A100-40GB-SXM: give its node the Ray resource 'A100-40GB-SXM', not 'A40'"
    )


def test_a_gpu_of_the_right_name_and_another_memory_is_refused() -> None:
    """V100s of 16 and 32 GB share a name; a slice of a GPU has its name and not its memory."""
    with pytest.raises(DeviceError, match=r"NVIDIA A40 with 22\.0 GiB, but A40 is NVIDIA A40 with"):
        check_identity(A40, "NVIDIA A40", 22 * GIB)


def test_a_gpu_nobody_knows_is_told_how_to_add() -> None:
    """The catalog is the user's to extend."""
    with pytest.raises(DeviceError, match="add it to the specification's catalog"):
        check_identity(A40, "NVIDIA Z9", 44 * GIB)


def test_without_a_cap_the_limit_is_what_is_free() -> None:
    """The context, the libraries and other processes have the rest."""
    assert _limit(43 * GIB, 44 * GIB, None) == 43 * GIB


def test_under_a_cap_what_is_taken_here_is_taken_off_there() -> None:
    """The CUDA context would stand on the smaller GPU as well."""
    assert _limit(139 * GIB, 140 * GIB, 44 * GIB) == 43 * GIB


@pytest.mark.parametrize("cap", [141 * GIB, GIB // 2])
def test_a_gpu_too_small_or_too_full_cannot_stand_in(cap: int) -> None:
    """Told with the numbers."""
    with pytest.raises(DeviceError, match="cannot stand in for one of"):
        _limit(139 * GIB, 140 * GIB, cap)


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


def test_memory_that_goes_on_falling_is_not_waited_for_for_ever() -> None:
    """Five seconds at most."""
    gauge = Gauge(*(1000 * GIB - n * GIB for n in range(1000)))
    settled(gauge.read, gauge.clock, gauge.sleep)
    assert gauge.now < 6
