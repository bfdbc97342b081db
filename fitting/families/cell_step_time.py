"""How long a step of a cell takes at a batch size: measured, simulated, or by its family's law."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fitting.families.predict import length_scale, predict
from fitting.families.records import FamilyFit
from fitting.laws.forms import Form
from fitting.numerics.uncertainty import NORMAL_90, TimeUncertainty, simulated
from fitting.points.fit_points import series_name
from trials.records.cell import Cell
from trials.records.observation import (
    Basis,
    Measurement,
    Observation,
    Outcome,
    Shorter,
    largest_batch,
    standing,
)
from trials.records.timing_rule import median_interval

Source = Literal["measured steps", "simulated steps", "law"]
"""Where a step time comes from: visits of that very batch size, or the law of its family."""

Batch = int | Literal["fastest", "largest"]
"""Which batch size a job is run at: so many examples, the fastest or the largest of those timed."""

# Two visits of one batch size, minutes apart, differ by more than the steps of one do. How much is
# told by the visits of a run that were repeated; where there are few, by this.
VISIT = 0.015  # standard deviation of the logarithm of their medians
VISIT_DEGREES = 2.0  # repeated visits that this counts as
# What is not shared of the error of simulated step times: ratios between GPUs are off by 3 to 11 %
# on the paper's points, by 25 % where its H100 is taken for an SXM (tests/benchmarks/README.md).
SIMULATED_APART = 0.2
NORMAL_95 = 1.96  # half the 95 % interval of a normal distribution, in standard deviations


@dataclass(frozen=True, slots=True)
class CellStepTime:
    """How long a step of a cell takes at one batch size.

    Attributes:
        batch_size: examples per step.
        seconds: of one step.
        doubt: of that.
        source: where it is known from.
        law: which, where it is known from one, or was scaled by one to another length.
        tokens: per example, padding included; absent where no law gives the steps of the job's
            lengths take, and they are taken to have the full one.
        length_error: how far off that law is at lengths that it has not seen, where that is known.
        extrapolated: the law was asked beyond what it was fitted on.
        shorter: of simulated steps, tokens per example and seconds of shorter ones, ascending.
    """

    batch_size: int
    seconds: float
    doubt: TimeUncertainty
    source: Source
    law: Form | None = None
    extrapolated: bool = False
    tokens: float | None = None
    length_error: float | None = None
    shorter: Shorter = ()


@dataclass(frozen=True, slots=True)
class Spread:
    """How far apart visits of one batch size lie.

    Attributes:
        sigma: standard deviation of the logarithm of their medians.
        degrees: of freedom that it is known by.
    """

    sigma: float
    degrees: float


def visit_spread(observations: Sequence[Observation]) -> Spread:
    """The spread of measured visits, by those of a run that were repeated."""
    visits: dict[tuple[Cell, str, int], list[float]] = defaultdict(list)
    for o in standing(observations):
        if o.basis is Basis.MEASURED and o.measurement is not None and o.environment is not None:
            steps = o.measurement.step_seconds
            if steps:
                of = (o.cell, o.environment.stack, o.batch_size)
                visits[of].append(math.log(statistics.median(steps)))
    squares, degrees = VISIT_DEGREES * VISIT**2, VISIT_DEGREES
    for each in visits.values():
        mean = statistics.fmean(each)
        squares += sum((one - mean) ** 2 for one in each)
        degrees += len(each) - 1
    return Spread(math.sqrt(squares / degrees), degrees)


def step_times(  # noqa: PLR0913, PLR0917 - all that a step time may be known from
    batch: Batch,
    cell: Cell,
    seen: Sequence[Observation],
    families: Sequence[FamilyFit],
    spread: Spread,
    rows: int,
    tokens: Callable[[int], float] | None = None,
) -> dict[tuple[str, Basis], CellStepTime]:
    """The step time to price a cell with, by the stack and basis that it was seen with.

    What was measured at the very batch size is better than any law through it; the law serves for a
    batch size nobody measured. The fastest is the one that an epoch takes least time at, which on
    any one offer is the cheapest.

    Args:
        batch: which batch size.
        cell: what runs.
        seen: its own observations.
        families: the laws that may speak of it.
        spread: of visits.
        rows: of an epoch; a batch is no larger.
        tokens: per example at a batch size, padding included; absent for the full length. Where no
            law tells how much shorter such steps are, they have the full length.
    """
    times = {}
    for (stack, basis), at_full in timed_steps(seen, spread).items():

        def padded(step: CellStepTime, of: tuple[str, Basis] = (stack, basis)) -> CellStepTime:
            if tokens is None:
                return step
            return at_length(step, cell, *of, tokens(step.batch_size), families) or step

        measured = {size: padded(step) for size, step in at_full.items()}
        if batch == "fastest":
            times[stack, basis] = min(
                measured.values(), key=lambda t: max(rows / t.batch_size, 1.0) * t.seconds
            )
        elif batch == "largest":
            no_larger = [size for size in measured if size <= rows]
            times[stack, basis] = measured[max(no_larger, default=min(measured))]
        elif batch in measured:
            times[stack, basis] = measured[batch]
        elif _fits_in_memory(batch, seen):
            told = by_law(batch, cell, stack, basis, seen, families)
            if told is not None:
                shorter = _shorter_between(told, at_full)
                times[stack, basis] = padded(replace(told, shorter=shorter))
    return times


def _shorter_between(step: CellStepTime, timed: Mapping[int, CellStepTime]) -> Shorter:
    """Seconds of shorter examples at a batch size that was not simulated, by those that were.

    What parts of a full step they take, between the two nearest by the logarithm of the batch size.
    """
    sizes = sorted(size for size in timed if timed[size].shorter)
    lengths = {tokens for size in sizes for tokens, _ in timed[size].shorter}
    told = []
    for tokens in sorted(lengths):
        parts = {
            size: seconds / timed[size].seconds
            for size in sizes
            for at, seconds in timed[size].shorter
            if at == tokens
        }
        part = np.interp(math.log(step.batch_size), np.log(list(parts)), list(parts.values()))
        told.append((tokens, step.seconds * float(part)))
    return tuple(told)


def by_law(  # noqa: PLR0913, PLR0917 - what a law of a step speaks of
    batch_size: int,
    cell: Cell,
    stack: str,
    basis: Basis,
    seen: Sequence[Observation],
    families: Sequence[FamilyFit],
) -> CellStepTime | None:
    """The step time by the law of the cell's family; None where it has none that speaks of it.

    A law fitted to simulated steps is off by what the simulation is off, and by what the law is.
    """
    for family in _families_of(cell, basis, families):
        told = predict(family, cell.gpu, stack, cell.seq_len, cell.sparsity, batch_size)
        if told is not None:
            mine = [o.measurement for o in seen if o.basis is basis and o.measurement is not None]
            law = math.log(told.high / told.low) / 2 / NORMAL_90
            of_simulation = _simulation_doubt(mine)
            doubt = replace(of_simulation, own=math.hypot(law, of_simulation.own))
            return CellStepTime(
                batch_size, told.value, doubt, "law", family.form, told.extrapolated
            )
    return None


def at_length(  # noqa: PLR0913, PLR0917 - what a step depends on
    step: CellStepTime,
    cell: Cell,
    stack: str,
    basis: Basis,
    tokens: float,
    families: Sequence[FamilyFit],
) -> CellStepTime | None:
    """The step time of examples padded to so many tokens on average, not to the full length.

    Simulated steps lie on a line between the two nearest lengths that were simulated. Others are as
    many times shorter as the family's law of lengths says, which extrapolates where that GPU was
    seen at no length as short; None where there is no such law.

    Args:
        step: at the full length.
        cell: what runs.
        stack: that it was seen with.
        basis: alike.
        tokens: per example, padding included.
        families: the laws that may speak of it.
    """
    if tokens == cell.seq_len:
        return replace(step, tokens=tokens)
    if step.shorter and tokens >= step.shorter[0][0]:
        lengths, seconds = np.array([*step.shorter, (cell.seq_len, step.seconds)]).T
        return replace(step, seconds=float(np.interp(tokens, lengths, seconds)), tokens=tokens)
    place = (cell.gpu, stack, cell.seq_len, cell.sparsity, step.batch_size)
    for family in _families_of(cell, basis, families):
        scale = length_scale(family, *place, tokens)
        if scale is None:
            continue
        doubt = replace(step.doubt, own=math.hypot(step.doubt.own, scale.sigma))
        gpu = series_name(cell.gpu, stack, 0).removesuffix("0")
        lengths = [int(s.name.removeprefix(gpu)) for s in family.series if s.name.startswith(gpu)]
        return replace(
            step,
            seconds=step.seconds * scale.factor,
            doubt=doubt,
            law=scale.form,
            tokens=tokens,
            length_error=scale.error,
            extrapolated=step.extrapolated or tokens < min(lengths, default=cell.seq_len),
        )
    return None


def _families_of(cell: Cell, basis: Basis, families: Sequence[FamilyFit]) -> Iterator[FamilyFit]:
    of = (cell.model, cell.weights, cell.recipe.key, basis)
    for family in families:
        name = family.name
        if (name.model, name.weights, name.recipe, name.basis) == of:
            yield family


def timed_steps(
    seen: Sequence[Observation], spread: Spread
) -> dict[tuple[str, Basis], dict[int, CellStepTime]]:
    """What timed probes say of a cell, by stack and basis, then by batch size."""
    return {
        of: {size: _measured(size, visits, spread) for size, visits in by_batch.items()}
        for of, by_batch in _timed_visits(seen).items()
    }


def _timed_visits(
    seen: Sequence[Observation],
) -> dict[tuple[str, Basis], dict[int, list[Observation]]]:
    """Timed probes by stack and basis, then by batch size, of sizes that never failed to fit.

    A capped GPU's speed is that of the larger one that stood in for it: it has none here.
    """
    misses = (o.batch_size for o in seen if o.outcome.is_verdict and o.outcome is not Outcome.FITS)
    lowest_miss = min(misses, default=math.inf)
    visits: dict[tuple[str, Basis], dict[int, list[Observation]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for o in standing(seen):
        trainable = o.outcome is Outcome.FITS and o.batch_size < lowest_miss
        timed = o.measurement is not None and o.measurement.step_seconds
        if trainable and timed and o.basis is not Basis.CAPPED and o.environment is not None:
            visits[o.environment.stack, o.basis][o.batch_size].append(o)
    return visits


def _measured(batch_size: int, visits: Sequence[Observation], spread: Spread) -> CellStepTime:
    """The median step over all visits; a simulated one is the same in all."""
    measurements = [v.measurement for v in visits if v.measurement is not None]
    steps = [m.step_seconds for m in measurements]
    if all(m.relative_error is not None for m in measurements):
        doubt = _simulation_doubt(measurements)
        shorter = measurements[0].shorter_step_seconds
        return CellStepTime(batch_size, steps[0][0], doubt, "simulated steps", shorter=shorter)
    within = [(median_interval(s) or (min(s), max(s)), s) for s in steps]
    squares = [(math.log(high / low) / 2 / NORMAL_95) ** 2 for (low, high), _ in within]
    # What the steps of one visit differ by is in the spread of visits; where it is more, it counts.
    own = math.sqrt(max(spread.sigma**2, statistics.fmean(squares)) / len(visits))
    return CellStepTime(
        batch_size,
        statistics.median([second for visit in steps for second in visit]),
        TimeUncertainty(own, spread.degrees),
        "measured steps",
    )


def _simulation_doubt(measurements: Sequence[Measurement]) -> TimeUncertainty:
    """Of simulated steps; none of measured ones."""
    below, above = _simulation_error(measurements)
    return simulated(below, above, SIMULATED_APART)


def _simulation_error(measurements: Sequence[Measurement]) -> tuple[float, float]:
    """How much shorter and longer than told steps may be for being simulated: 0 for measured ones.

    Visits told with other constants may differ in it: the most counts.
    """
    below = [m.relative_error or 0.0 for m in measurements]
    above = [
        error if m.relative_error_above is None else m.relative_error_above
        for m, error in zip(measurements, below, strict=True)
    ]
    return max(below, default=0.0), max(above, default=0.0)


def _fits_in_memory(batch_size: int, seen: Sequence[Observation]) -> bool:
    known = largest_batch(seen)
    return known is not None and batch_size <= known[0]
