"""Section of memory: largest batch sizes, repeats at the boundary, and the error of two probes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestrator.console import TOO_TIGHT
from orchestrator.markdown_table import records_table
from trials.records.cell import Cell, by_cell
from trials.records.observation import (
    MEMORY_MISSES,
    Basis,
    Observation,
    Outcome,
    largest_batch,
    surviving_batch,
)

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Boundary:
    """Largest batch sizes of one cell, and the rate of misses there.

    Attributes:
        safe: largest batch size below every one that ever missed; None while unknown.
        largest: largest batch size that ever fitted.
        tries: number of probes at ``largest``.
        misses: number of them that did not fit.
    """

    safe: int | None
    largest: int
    tries: int
    misses: int


def boundary(observations: Sequence[Observation]) -> Boundary | None:
    """Boundary of one cell by its probes and their repeats; None when nothing fitted."""
    verdicts = [o for o in observations if o.outcome.is_verdict and not o.is_drawn]
    fits = [o.batch_size for o in verdicts if o.outcome is Outcome.FITS]
    if not fits:
        return None
    repeats = [o for o in verdicts if o.batch_size == max(fits)]
    closed = largest_batch(observations)
    return Boundary(
        safe=None if closed is None else closed[0],
        largest=max(fits),
        tries=len(repeats),
        misses=sum(o.outcome is not Outcome.FITS for o in repeats),
    )


def limits_section(cells: Sequence[Cell], observations: Sequence[Observation]) -> str:
    """The largest batch of each cell, its peak memory, and the outcome one batch size above."""
    of_cell = by_cell(observations)
    probed = [(cell, of_cell[cell]) for cell in cells if of_cell[cell]]
    if not probed:
        return ""
    has_drawn = any(o.is_drawn for _, probes in probed for o in probes)
    limits = records_table(
        {"cell": cell.key, **_limit(probes), **(_drawn(probes) if has_drawn else {})}
        for cell, probes in probed
    )
    parts = ["## Largest batch that fits", limits, *_capped_notes(observations)]
    predictions = [
        {"cell": cell.key, **row}
        for cell, probes in probed
        if not cell.simulated and (row := _prediction(probes))
    ]
    if predictions:
        parts.append("Peak memory at the largest batch, predicted from the two smallest probes:")
        parts.append(records_table(predictions))
    return "\n\n".join(parts)


def outcome_text(outcome: Outcome) -> str:
    """Outcome of a probe in words."""
    return TOO_TIGHT if outcome is Outcome.THRASHING else outcome.lower().replace("_", " ")


def memory_text(size_bytes: int) -> str:
    """Bytes in GiB, or in MiB below one."""
    unit, name = memory_unit(size_bytes)
    return f"{size_bytes / unit:.2f} {name}"


def memory_unit(size_bytes: int) -> tuple[int, str]:
    """Bytes and name of the unit to write a size in: GiB, or MiB below one."""
    return (GIB, "GiB") if size_bytes >= GIB else (MIB, "MiB")


def _limit(probes: Sequence[Observation]) -> dict[str, object]:
    largest, miss = largest_batch(probes) or (None, None)
    at_length = [o for o in probes if not o.is_drawn]
    above = "" if largest is None else f"{probes[0].cell.limit_name(largest)} reached"
    return {
        "largest batch": "unknown yet" if largest is None else largest,
        "repeats": _repeats(probes),
        "peak memory": _peak([o for o in at_length if o.batch_size == largest]),
        "next batch size": f"{miss.batch_size}: {outcome_text(miss.outcome)}" if miss else above,
        "probes": sum(o.purpose == "search" for o in probes),
        "out of memory": sum(o.outcome in MEMORY_MISSES for o in at_length),
    }


def _drawn(probes: Sequence[Observation]) -> dict[str, object]:
    """Largest batch that survives drawn lengths, with its memory."""
    surviving = surviving_batch(probes)
    runs = [o for o in probes if o.is_drawn and o.batch_size == surviving and o.measurement]
    retries = sum(o.memory.allocator_retries or 0 for o in runs if o.memory)
    memory = _peak([o for o in runs if o.outcome is Outcome.FITS])
    return {
        "survives drawn lengths": "" if surviving is None else surviving,
        "peak of drawn lengths": f"{memory}, {retries} retries" if retries else memory,
    }


def _repeats(probes: Sequence[Observation]) -> str:
    """Number of repeats at the boundary, and their outcome."""
    tries = [o for o in probes if o.purpose == "boundary" and o.outcome.is_verdict]
    edge = boundary(probes)
    if not tries or edge is None:
        return ""
    if edge.misses == 0:
        return "1, fits" if len(tries) == 1 else f"{len(tries)}, all fit"
    return f"safe {edge.safe}; {edge.largest} failed {edge.misses} of {edge.tries} times"


def _peak(probes: Sequence[Observation]) -> str:
    """Most memory of probes of one batch size, of those that fitted; empty where none did."""
    fits = [
        (o.memory, o.memory_limit_bytes)
        for o in probes
        if o.memory is not None and o.outcome is Outcome.FITS
    ]
    if not fits:
        return ""
    memory, limit = max(fits, key=lambda fit: fit[0].peak_allocated_bytes)
    unit, name = memory_unit(limit)
    peak = f"{memory.peak_allocated_bytes / unit:.1f}"
    if memory.peak_reserved_bytes is not None:
        peak += f" allocated, {memory.peak_reserved_bytes / unit:.1f} reserved"
    return f"{peak} of {limit / unit:.1f} {name}"


def _capped_notes(observations: Sequence[Observation]) -> Iterator[str]:
    pairs = {
        (o.cell.gpus, o.cell.capped_on)
        for o in observations
        if o.basis is Basis.CAPPED and o.cell.capped_on is not None
    }
    for small, large in sorted(pairs):
        yield (
            f"The largest batches of {small} were measured on {large} under a memory cap. The "
            f"speed of {small} is unknown."
        )


def _prediction(probes: Sequence[Observation]) -> dict[str, object]:
    """Error at the largest batch of the line through the two smallest; empty for two or fewer."""
    peaks: dict[int, int] = {}
    for o in probes:
        peak = 0 if o.memory is None else o.memory.peak_allocated_bytes
        if o.outcome is Outcome.FITS and peak > 0 and not o.is_drawn:
            peaks.setdefault(o.batch_size, peak)
    if len(peaks) < 3:
        return {}
    (first, second, *_), last = sorted(peaks), max(peaks)
    slope = (peaks[second] - peaks[first]) / (second - first)
    predicted = peaks[first] + slope * (last - first)
    return {
        "probes": f"{first} and {second}",
        "largest batch": last,
        "predicted peak": memory_text(round(predicted)),
        "measured peak": memory_text(peaks[last]),
        "error": f"{predicted / peaks[last] - 1:+.2%}",
    }
