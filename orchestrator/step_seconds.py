"""How long a step of a cell takes at a batch size: measured, simulated, or by its family's law."""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fitting.families import FamilyFit, predict
from fitting.result import Prediction
from fitting.step_times import Form
from trials.observation import Basis, Measurement, Observation, Outcome, largest_batch
from trials.timing import median_interval
from trials.workload import Cell

Source = Literal["measured steps", "simulated steps", "law"]
"""Where a step time comes from, and with it what its interval says.

Of measured steps it holds the median of each visit with at least 95 % confidence; a simulated step
lies in it nine times in ten. By a law of the family it is as sure as the record of that law says
(nine in ten, for batch sizes among those seen), and holds the simulation's own interval, too, where
the law was fitted to simulated steps.
"""


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long a step of a cell takes at one batch size.

    Attributes:
        batch_size: queries per step.
        seconds: of one step.
        source: where that is known from.
        law: which, where it is known from one.
        visits: timed probes of that batch size.
    """

    batch_size: int
    seconds: Prediction
    source: Source
    law: Form | None = None
    visits: int = 1


def step_times(
    wish: int | None, cell: Cell, seen: Sequence[Observation], families: Sequence[FamilyFit]
) -> dict[tuple[str, Basis], StepTime]:
    """The step time to price a cell with, by the stack and basis that it was seen with.

    What was measured at the very batch size is better than any law through it; the law serves for a
    batch size nobody measured. Without a wish, the fastest measured batch size is taken, which on
    any one offer is the cheapest.

    Args:
        wish: queries per step; absent for the fastest.
        cell: what runs.
        seen: its own observations.
        families: the laws that may speak of it.
    """
    times = {}
    for (stack, basis), measured in timed_steps(seen).items():
        if wish is None:
            times[stack, basis] = max(
                measured.values(), key=lambda t: t.batch_size / t.seconds.value
            )
        elif wish in measured:
            times[stack, basis] = measured[wish]
        elif _fits_in_memory(wish, seen):
            told = by_law(wish, cell, stack, basis, seen, families)
            if told is not None:
                times[stack, basis] = told
    return times


def by_law(  # noqa: PLR0913, PLR0917 - what a law of a step speaks of
    batch_size: int,
    cell: Cell,
    stack: str,
    basis: Basis,
    seen: Sequence[Observation],
    families: Sequence[FamilyFit],
) -> StepTime | None:
    """The step time by the law of the cell's family; None where it has none that speaks of it.

    A law fitted to simulated steps is off by what the simulation is off, and by what the law is.
    """
    of = (cell.model, cell.weights, cell.recipe.key, basis)
    for family in families:
        name = family.name
        if (name.model, name.weights, name.recipe, name.basis) != of:
            continue
        told = predict(family, cell.gpu, stack, cell.seq_len, cell.sparsity, batch_size)
        if told is not None:
            mine = [o.measurement for o in seen if o.basis is basis and o.measurement is not None]
            below, above = _simulation_error(mine)
            wider = {"low": told.low / (1 + below), "high": told.high * (1 + above)}
            return StepTime(batch_size, told.model_copy(update=wider), "law", family.form)
    return None


def timed_steps(
    seen: Sequence[Observation],
) -> dict[tuple[str, Basis], dict[int, StepTime]]:
    """What timed probes say of a cell, by stack and basis, then by batch size."""
    return {
        of: {batch_size: _measured(batch_size, visits) for batch_size, visits in by_batch.items()}
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
    for o in seen:
        trainable = o.outcome is Outcome.FITS and o.batch_size < lowest_miss
        timed = o.measurement is not None and o.measurement.step_seconds
        if trainable and timed and o.basis is not Basis.CAPPED and o.environment is not None:
            visits[o.environment.stack, o.basis][o.batch_size].append(o)
    return visits


def _measured(batch_size: int, visits: Sequence[Observation]) -> StepTime:
    """The median step over all visits; the interval spans those of each visit on its own.

    Two visits minutes apart differ by more than the steps of one do: the span shows it. A simulated
    one has the interval of the simulation.
    """
    measurements = [v.measurement for v in visits if v.measurement is not None]
    if all(m.relative_error is not None for m in measurements):
        return _simulated(batch_size, measurements)
    steps = [m.step_seconds for m in measurements]
    intervals = [median_interval(s) or (min(s), max(s)) for s in steps]
    prediction = Prediction(
        value=statistics.median([second for visit in steps for second in visit]),
        low=min(low for low, _ in intervals),
        high=max(high for _, high in intervals),
        extrapolated=False,
    )
    return StepTime(batch_size, prediction, "measured steps", visits=len(visits))


def _simulated(batch_size: int, measurements: Sequence[Measurement]) -> StepTime:
    """A simulated step, with the interval of the simulation."""
    seconds = measurements[0].step_seconds[0]
    below, above = _simulation_error(measurements)
    interval = Prediction(
        value=seconds, low=seconds / (1 + below), high=seconds * (1 + above), extrapolated=False
    )
    return StepTime(batch_size, interval, "simulated steps")


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
