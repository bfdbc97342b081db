"""Fits of links to times that others measured on GPUs, judged by times that no fit saw."""

import csv
from pathlib import Path

import numpy as np
import pytest

from fitting.timed_collective import TimedCollective
from gpu_catalog.gpu import Interconnect
from gpu_catalog.links.within_nodes import LinkSpeed, link_speed

# A small part of microsoft/vidur's all-reduce tables; benchmarks/link_speeds.py fits all of them.
EXTRACT = Path(__file__).parent / "data" / "collectives.csv"
INTERCONNECTS: dict[str, Interconnect] = {
    "a100_dgx": "nvlink-switch-3",
    "h100_dgx": "nvlink-switch-4",
    "a100_pairwise_nvlink": "nvlink-pair-3",
    "h100_pairwise_nvlink": "nvlink-pair-4",
}
JUDGED_BYTES = 4e6
MOST_ERROR = 0.05
MIB = 2**20


def timed_in(machine: str, gpus: int) -> TimedCollective:
    """Times of a machine on some of its GPUs."""
    with EXTRACT.open(encoding="utf-8", newline="") as file:
        rows = [
            (float(row["buffer_bytes"]), 1e-6 * float(row["microseconds"]))
            for row in csv.DictReader(file)
            if (row["machine"], int(row["gpus"])) == (machine, gpus)
        ]
    sizes, seconds = np.array(rows).T
    return TimedCollective(machine, gpus, "all-reduce", sizes, seconds)


MEASURED = [
    *((machine, gpus) for machine in ("a100_dgx", "h100_dgx") for gpus in (2, 4, 8)),
    *(
        (machine, gpus)
        for machine in ("a100_pairwise_nvlink", "h100_pairwise_nvlink")
        for gpus in (2, 4)
    ),
]
each_machine = pytest.mark.parametrize(("machine", "gpus"), MEASURED)


@each_machine
def test_each_half_of_the_times_is_predicted_by_the_other(machine: str, gpus: int) -> None:
    """Within 5 % in the median, at buffers from 4 MB, where training spends its time."""
    timed = timed_in(machine, gpus)
    errors = timed.held_out_errors(TimedCollective.link, most_parts=2)
    assert len(errors) > 40
    assert np.median(errors[timed.sizes >= JUDGED_BYTES]) <= MOST_ERROR


@each_machine
def test_the_shipped_speed_is_that_of_its_source(machine: str, gpus: int) -> None:
    """Within 5 % in the median, and no other link stands in."""
    timed = timed_in(machine, gpus)
    speed = link_speed(INTERCONNECTS[machine], gpus, "all-reduce")
    predicted = [speed.seconds("all-reduce", gpus, size) for size in timed.sizes.tolist()]
    errors = np.abs(np.array(predicted) / timed.seconds - 1)
    assert speed.stands_in is None
    assert np.median(errors[timed.sizes >= JUDGED_BYTES]) <= MOST_ERROR


def test_one_bandwidth_does_not_predict_eight_a100() -> None:
    """So that the break is worth its two numbers: NCCL's bandwidth there nearly doubles."""
    timed = timed_in("a100_dgx", 8)
    errors = timed.held_out_errors(TimedCollective.with_one_bandwidth, most_parts=2)
    assert np.median(errors[timed.sizes >= JUDGED_BYTES]) > MOST_ERROR
    link = timed.link()
    assert link is not None
    assert link.small_gb_per_second is not None
    assert link.bus_gb_per_second > 1.5 * link.small_gb_per_second


BROKEN = LinkSpeed(
    alpha_seconds=40e-6, small_bytes=28e6, small_bytes_per_second=130e9, bytes_per_second=240e9
)


def test_a_break_is_found_again_in_the_times_of_a_trial() -> None:
    """Eleven buffers from 1 MiB to 1 GiB; 28 MB moved by eight are a buffer of 16 MB."""
    sizes = MIB * 2.0 ** np.arange(11)
    seconds = np.array([BROKEN.seconds("all-reduce", 8, size) for size in sizes.tolist()])
    link = TimedCollective("A100-80GB-SXM", 8, "all-reduce", sizes, seconds).link()
    assert link is not None
    assert link.alpha_us == pytest.approx(40)
    assert link.small_mb == pytest.approx(28)
    assert link.small_gb_per_second == pytest.approx(130)
    assert link.bus_gb_per_second == pytest.approx(240)
    speed = link.speed(link.alpha_us)
    assert speed.seconds("all-reduce", 8, 1e9) == pytest.approx(
        BROKEN.seconds("all-reduce", 8, 1e9)
    )


@pytest.mark.parametrize("flat_from_mib", [1, 8, 32])
def test_large_buffers_that_take_no_longer_have_no_bandwidth(flat_from_mib: int) -> None:
    """In place of thousands of GB/s, by which all larger buffers would be timed."""
    sizes = MIB * 2.0 ** np.arange(11)
    grown = np.minimum(sizes, flat_from_mib * MIB).tolist()
    seconds = np.array([BROKEN.seconds("all-reduce", 8, size) for size in grown])
    timed = TimedCollective("A100-80GB-SXM", 8, "all-reduce", sizes, seconds)
    assert timed.link() is None


def test_first_bytes_that_take_no_longer_keep_their_break() -> None:
    """The bandwidth of large buffers is found beside them, as of two bridged A100."""
    sizes = MIB * 2.0 ** np.arange(11)
    seconds = 60e-6 + np.maximum(sizes - 4e6, 0) / 190e9
    link = TimedCollective("A100-80GB-PCIe", 2, "all-reduce", sizes, seconds).link()
    assert link is not None
    assert link.small_gb_per_second == pytest.approx(10_000)
    assert link.bus_gb_per_second == pytest.approx(190, rel=1e-3)


def test_few_sizes_have_one_bandwidth() -> None:
    """Two on either side of a break are the least; three leave none to judge it by."""
    sizes = np.array([1.0, 16.0, 64.0]) * MIB
    seconds = np.array([BROKEN.seconds("all-reduce", 8, size) for size in sizes.tolist()])
    link = TimedCollective("A100-80GB-SXM", 8, "all-reduce", sizes, seconds).link()
    assert link is not None
    assert link.small_mb is None
