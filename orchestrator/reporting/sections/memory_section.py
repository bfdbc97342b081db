"""What a run says of memory: largest batches, how sharp they are, how well two probes foretell."""

from collections.abc import Sequence

from orchestrator.markdown_table import table
from trials.records.cell import Cell
from trials.records.observation import (
    MEMORY_MISSES,
    Basis,
    Measurement,
    Observation,
    Outcome,
    boundary,
    by_cell,
    largest_batch,
)

GIB = 2**30
MIB = 2**20


def limits_section(cells: Sequence[Cell], observations: Sequence[Observation]) -> str:
    """The largest batch of each cell, what was in use there, and what happened one above."""
    of_cell = by_cell(observations)
    seen = [(cell, of_cell[cell]) for cell in cells]
    rows = [(cell.key, *_limit(of)) for cell, of in seen if of]
    if not rows:
        return ""
    headers = (
        "cell",
        "largest batch",
        "tried again",
        "peak at it",
        "the next one",
        "probes",
        "out of memory",
    )
    parts = ["## Largest batch that fits", table(headers, rows), *_capped(observations)]
    return "\n\n".join([*parts, *_foretold(seen)])


def _limit(seen: Sequence[Observation]) -> tuple[object, ...]:
    misses = sum(o.outcome in MEMORY_MISSES for o in seen)
    searched = sum(o.purpose == "search" for o in seen)
    known = largest_batch(seen)
    if known is None:
        return ("not known yet", _repeats(seen), "", "", searched, misses)
    largest, miss = known
    above = f"{miss.batch_size}: {miss.outcome}" if miss else f"search limit {largest} reached"
    return (largest, _repeats(seen), _peak(largest, seen), above, searched, misses)


def _repeats(seen: Sequence[Observation]) -> str:
    """How often the boundary was tried again, and what came of it."""
    tried = [o for o in seen if o.purpose == "boundary" and o.outcome.is_verdict]
    edge = boundary(seen)
    if not tried or edge is None:
        return ""
    if edge.misses == 0:
        return "once, fits" if len(tried) == 1 else f"{len(tried)} times, fits"
    return f"safe {edge.safe}; max {edge.largest} missed {edge.misses} of {edge.tries}"


def _peak(batch_size: int, seen: Sequence[Observation]) -> str:
    fits = [
        (o.measurement, o.memory_limit_bytes)
        for o in seen
        if o.measurement is not None and o.outcome is Outcome.FITS and o.batch_size == batch_size
    ]
    if not fits:
        return ""
    measurement, limit = max(fits, key=lambda fit: fit[0].memory.peak_allocated_bytes)
    unit, name = (GIB, "GiB") if limit >= GIB else (MIB, "MiB")
    memory = measurement.memory
    allocated = f"{memory.peak_allocated_bytes / unit:.1f}"
    if memory.peak_reserved_bytes is not None:
        allocated += f" allocated, {memory.peak_reserved_bytes / unit:.1f} reserved"
    return f"{allocated} of {limit / unit:.1f} {name}"


def _capped(observations: Sequence[Observation]) -> list[str]:
    pairs = sorted(
        {
            (o.cell.gpu, o.cell.capped_on)
            for o in observations
            if o.basis is Basis.CAPPED and o.cell.capped_on is not None
        }
    )
    return [
        f"Largest batches of {small} were found on {large} under a memory cap; of the speed of "
        f"{small} nothing is said."
        for small, large in pairs
    ]


def _foretold(seen: Sequence[tuple[Cell, Sequence[Observation]]]) -> list[str]:
    """How far the line through the two smallest probes is off at the largest batch."""
    rows = [
        (cell.key, *row)
        for cell, of in seen
        if not cell.simulated and (row := _foretold_row(of)) is not None
    ]
    if not rows:
        return []
    headers = ("cell", "probes", "largest batch", "peak foretold", "peak measured", "off by")
    return [
        "Peak memory at the largest batch, by the line through the two smallest probes:",
        table(headers, rows),
    ]


def _foretold_row(seen: Sequence[Observation]) -> tuple[object, ...] | None:
    peaks: dict[int, int] = {}
    for o in seen:
        if o.outcome is Outcome.FITS and isinstance(o.measurement, Measurement):
            peaks.setdefault(o.batch_size, o.measurement.memory.peak_allocated_bytes)
    if len(peaks) < 3:
        return None
    (first, second, *_), last = sorted(peaks), max(peaks)
    slope = (peaks[second] - peaks[first]) / (second - first)
    foretold = peaks[first] + slope * (last - first)
    unit, name = (GIB, "GiB") if peaks[last] >= GIB else (MIB, "MiB")
    return (
        f"{first} and {second}",
        last,
        f"{foretold / unit:.2f} {name}",
        f"{peaks[last] / unit:.2f} {name}",
        f"{foretold / peaks[last] - 1:+.2%}",
    )
