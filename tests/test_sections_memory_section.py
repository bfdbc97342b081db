"""The section of memory: limits, repeats at the boundary, and the error of two probes."""

import re

from builders.observations import MIB, measurement, observation, tiny_cell

from orchestrator.reporting.sections.memory_section import limits_section
from trials.records.observation import Basis, MemoryReading, Observation, Outcome

CELL = tiny_cell()


def fit(batch_size: int, peak_mib: float, **changed: object) -> Observation:
    """A probe that fits."""
    return observation(batch_size, measurement=measurement(round(peak_mib * MIB)), **changed)


def rows(observations: list[Observation]) -> list[list[str]]:
    """The cells of every table row of the section."""
    lines = [line for line in limits_section([CELL], observations).splitlines() if CELL.key in line]
    return [[part.strip() for part in line.split("|")[1:-1]] for line in lines]


SEARCH = [fit(1, 100), fit(2, 110), fit(10, 210), observation(11, Outcome.OUT_OF_MEMORY)]


def test_a_limit_has_its_peak_and_the_miss_above_it() -> None:
    """The last columns count probes and misses."""
    assert rows(SEARCH)[0] == [
        CELL.key,
        "10",
        "",
        "210.0 of 256.0 MiB",
        "11: out of memory",
        "4",
        "1",
    ]


def test_a_miss_by_retries_of_the_allocator_is_no_thrashing() -> None:
    """The word means swapping to most readers."""
    row = rows([*SEARCH[:-1], observation(11, Outcome.THRASHING)])[0]
    assert row[4] == "11: too tight (allocator retries)"


def test_the_line_through_the_two_smallest_probes_has_an_error() -> None:
    """100 MiB at one example and 10 more for each predict 190 at ten: 9.52 % too little."""
    assert rows(SEARCH)[1] == [CELL.key, "1 and 2", "10", "190.00 MiB", "210.00 MiB", "-9.52%"]


def test_two_probes_without_a_third_have_no_error() -> None:
    """A line through two points fits them."""
    assert len(rows([fit(1, 100), fit(2, 110), observation(3, Outcome.OUT_OF_MEMORY)])) == 1


def test_repeats_at_the_boundary_are_counted() -> None:
    """All fit, or some fail and a smaller size is safe."""
    again = [fit(10, 211, purpose="boundary", repeat=n) for n in range(3)]
    assert rows([*SEARCH, *again])[0][2] == "3, all fit"
    missed = observation(10, Outcome.THRASHING, purpose="boundary", repeat=0, measurement=None)
    largest, repeats = rows([*SEARCH, missed, *again[1:], fit(9, 200)])[0][1:3]
    assert largest == "9"
    assert re.findall(r"\d+", repeats) == ["9", "10", "1", "4"]


def test_reserved_memory_stands_beside_allocated_memory() -> None:
    """In GiB on a device with at least one."""
    memory = MemoryReading(peak_allocated_bytes=40 * 2**30, peak_reserved_bytes=42 * 2**30)
    probe = observation(
        3,
        measurement=measurement().model_copy(update={"memory": memory}),
        memory_limit_bytes=44 * 2**30,
    )
    (row,) = rows([probe, observation(4, Outcome.OUT_OF_MEMORY, memory_limit_bytes=44 * 2**30)])
    assert re.findall(r"[\d.]+ \w+", row[3]) == ["40.0 allocated", "42.0 reserved", "44.0 GiB"]


def test_a_capped_limit_names_the_larger_gpu() -> None:
    """The speed of the smaller GPU is unknown."""
    cell = CELL.model_copy(update={"gpu": "A40", "capped_on": "H200-SXM"})
    observations = [o.model_copy(update={"cell": cell, "basis": Basis.CAPPED}) for o in SEARCH]
    text = limits_section([cell], observations)
    assert "on H200-SXM under" in text
    assert "speed of A40 is unknown" in text


def test_an_open_search_has_no_limit_and_an_unprobed_cell_no_row() -> None:
    """Both are absent, not zero."""
    assert rows(SEARCH[:2])[0][1] == "unknown yet"
    assert limits_section([CELL], []) == ""
