"""What the report says of memory: limits, how sharp they are, and how well they were foretold."""

from builders.observations import MIB, measurement, observation, tiny_cell

from orchestrator.reporting.sections.memory_section import limits_section
from trials.records.observation import Basis, MemoryReading, Observation, Outcome

CELL = tiny_cell()


def fit(batch_size: int, peak_mib: float, **changed: object) -> Observation:
    """A probe that fits."""
    return observation(batch_size, measurement=measurement(round(peak_mib * MIB)), **changed)


def rows(seen: list[Observation]) -> list[list[str]]:
    """The cells of every table row of the section."""
    lines = [line for line in limits_section([CELL], seen).splitlines() if CELL.key in line]
    return [[part.strip() for part in line.split("|")[1:-1]] for line in lines]


SEARCH = [fit(1, 100), fit(2, 110), fit(10, 210), observation(11, Outcome.OUT_OF_MEMORY)]


def test_a_limit_is_told_with_its_peak_and_the_miss_above_it() -> None:
    """And how many probes it took."""
    assert rows(SEARCH)[0] == [
        CELL.key,
        "10",
        "",
        "210.0 of 256.0 MiB",
        "11: OUT_OF_MEMORY",
        "4",
        "1",
    ]


def test_the_line_through_the_two_smallest_probes_is_held_against_what_was_measured() -> None:
    """100 MiB and 10 an example foretell 190 at ten: 9.52 % too little."""
    assert rows(SEARCH)[1] == [CELL.key, "1 and 2", "10", "190.00 MiB", "210.00 MiB", "-9.52%"]


def test_two_probes_foretell_nothing_when_there_is_no_third() -> None:
    """A line through two points fits them."""
    assert len(rows([fit(1, 100), fit(2, 110), observation(3, Outcome.OUT_OF_MEMORY)])) == 1


def test_repeats_of_the_boundary_say_how_sharp_it_is() -> None:
    """Confirmed, or the share of misses with the size that is safe."""
    again = [fit(10, 211, purpose="boundary", repeat=n) for n in range(3)]
    assert rows([*SEARCH, *again])[0][2] == "3 times, fits"
    missed = observation(10, Outcome.THRASHING, purpose="boundary", repeat=0, measurement=None)
    assert rows([*SEARCH, missed, *again[1:], fit(9, 200)])[0][1:3] == [
        "9",
        "safe 9; max 10 missed 1 of 4",
    ]


def test_what_the_allocator_held_is_told_where_it_is_known() -> None:
    """In GiB on a device that has them."""
    memory = MemoryReading(peak_allocated_bytes=40 * 2**30, peak_reserved_bytes=42 * 2**30)
    seen = observation(
        3,
        measurement=measurement().model_copy(update={"memory": memory}),
        memory_limit_bytes=44 * 2**30,
    )
    (row,) = rows([seen, observation(4, Outcome.OUT_OF_MEMORY, memory_limit_bytes=44 * 2**30)])
    assert row[3] == "40.0 allocated, 42.0 reserved of 44.0 GiB"


def test_a_capped_limit_is_told_for_what_it_is() -> None:
    """Found on a larger GPU; of its own speed nothing is said."""
    cell = CELL.model_copy(update={"gpu": "A40", "capped_on": "H200-SXM"})
    seen = [o.model_copy(update={"cell": cell, "basis": Basis.CAPPED}) for o in SEARCH]
    text = limits_section([cell], seen)
    assert "Largest batches of A40 were found on H200-SXM under a memory cap" in text
    assert "of the speed of A40 nothing is said" in text


def test_a_search_that_has_not_closed_says_so() -> None:
    """And nothing that was not measured has a row."""
    assert rows(SEARCH[:2])[0][1] == "not known yet"
    assert limits_section([CELL], []) == ""
