"""Step time of a cell at a batch size: measured, simulated, or predicted by its family's law."""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from fitting.families.predict import StepInputs, length_scale, predict
from fitting.families.records import FamilyFit
from fitting.laws.forms import Form
from fitting.numerics.uncertainty import NORMAL_90, TimeUncertainty, simulated_uncertainty
from fitting.points.fit_points import series_name
from trials.records.cell import Cell, by_cell
from trials.records.observation import (
    CAPPED,
    FITS,
    MEASURED,
    Basis,
    Measurement,
    Observation,
    Shorter,
    trainable_batch,
    without_superseded,
)
from trials.records.timing_rule import median_interval

StepTimeOrigin = Literal["measured steps", "simulated steps", "law"]
"""Origin of a step time: visits of that very batch size, or the law of its family."""

Batch = int | Literal["fastest", "largest"]
"""Batch size to run a job at: a number of examples, or the fastest or largest timed one."""

StackAndBasis = tuple[str, Basis]
"""Software stack that a cell ran with, and whether its steps were measured or simulated."""

PaddedTokens = Callable[[int], float]
"""Mean tokens per example, padding included, by batch size."""

# Medians of two visits of one batch size, minutes apart, differ by more than the steps within one
# visit. Repeated visits of a run estimate by how much; these values stand in where there are few.
VISIT = 0.015  # standard deviation of the logarithm of their medians
VISIT_DEGREES = 2.0  # repeated visits that this counts as
# The part of the error of simulated step times that GPUs do not share: ratios between GPUs are off
# by 3 to 11 % on the paper's points, by 25 % where its H100 is taken for an SXM
# (tests/benchmarks/README.md).
SIMULATED_APART = 0.2
NORMAL_95 = 1.96  # half the 95 % interval of a normal distribution, in standard deviations


@dataclass(frozen=True, slots=True)
class CellStepTime:
    """Step time of a cell at one batch size.

    Attributes:
        batch_size: examples per micro-batch.
        seconds: seconds per micro-batch, with its share of the update.
        uncertainty: error of the logarithm of `seconds`.
        law: law that predicted the step time, or scaled it to another length.
        tokens: tokens per example, padding included; None where no law scales to the lengths of
            the job, so that `seconds` are those of the full length.
        length_error: relative error of that law at held-out lengths, where it is known.
        extrapolated: whether the law was evaluated outside the range it was fitted on.
        shorter: (tokens per example, seconds) of simulated steps of shorter examples, ascending.
    """

    batch_size: int
    seconds: float
    uncertainty: TimeUncertainty
    source: StepTimeOrigin
    law: Form | None = None
    extrapolated: bool = False
    tokens: float | None = None
    length_error: float | None = None
    shorter: Shorter = ()


class _VisitSpread(NamedTuple):
    """Standard deviation of the logarithm of medians of visits, and its degrees of freedom."""

    sigma: float
    degrees: float


class StepTimeSource:
    """Step times of the cells of a run: timed ones, and predictions of the laws fitted to them.

    Args:
        observations: those of the run.
        families: laws, iterated when one is first looked up: many a ranking needs none.
    """

    def __init__(self, observations: Sequence[Observation], families: Iterable[FamilyFit]) -> None:
        self._all = observations
        self._by_cell = by_cell(observations)
        self._unread = families

    def observations(self, cell: Cell) -> Sequence[Observation]:
        """Observations of one cell, in their order."""
        return self._by_cell.get(cell, ())

    def timed(
        self, cell: Cell, tokens: PaddedTokens | None = None
    ) -> dict[StackAndBasis, dict[int, CellStepTime]]:
        """Step times of the batch sizes that were timed.

        Where no law scales to the length of ``tokens``, steps keep the time of the full length.
        """
        spread = self._spread
        return {
            series: {
                size: self._scaled(_timed_step(size, visits, spread), cell, series, tokens)
                for size, visits in by_batch.items()
            }
            for series, by_batch in _timed_visits(self.observations(cell)).items()
        }

    def at(
        self, cell: Cell, batch: Batch, rows: int, tokens: PaddedTokens | None = None
    ) -> dict[StackAndBasis, CellStepTime]:
        """Step times to price a cell with.

        A timed batch size is more reliable than a law through it, so the law serves only batch
        sizes that nobody timed. The fastest batch size takes the least time for an epoch, which
        makes it the cheapest on any one offer.

        Args:
            cell: cell to price.
            batch: batch size.
            rows: rows of an epoch; a batch is no larger.
            tokens: padded tokens per example; None for the full length.
        """
        if batch == "fastest" and tokens is None:
            visits = _timed_visits(self.observations(cell))
            return {series: self._fastest(sizes, rows) for series, sizes in visits.items()}
        timed = self.timed(cell, tokens)
        if batch == "fastest":
            return {
                series: min(steps.values(), key=lambda s: max(rows / s.batch_size, 1.0) * s.seconds)
                for series, steps in timed.items()
            }
        if batch == "largest":
            return {
                series: steps[max((b for b in steps if b <= rows), default=min(steps))]
                for series, steps in timed.items()
            }
        predictions = {}
        if any(batch not in steps for steps in timed.values()):
            largest = trainable_batch(self.observations(cell))
            if largest is not None and batch <= largest[0]:
                predictions = self.by_law(cell, batch, tokens)
        at_batch = {
            series: steps.get(batch) or predictions.get(series) for series, steps in timed.items()
        }
        return {series: step for series, step in at_batch.items() if step is not None}

    def _fastest(self, visits: Mapping[int, Sequence[Observation]], rows: int) -> CellStepTime:
        """Fastest of the batch sizes at the full length: the others need no interval."""

        def epoch_seconds(size: int) -> float:
            return max(rows / size, 1.0) * _seconds(visits[size])

        size = min(visits, key=epoch_seconds)
        return _timed_step(size, visits[size], self._spread)

    def by_law(
        self, cell: Cell, batch: int, tokens: PaddedTokens | None = None
    ) -> dict[StackAndBasis, CellStepTime]:
        """Step times predicted by the law of the cell's family; empty where it has none.

        A law fitted to simulated steps has the error of the simulation beside its own. ``tokens``
        is as in ``at``.
        """
        environments = ((o.environment, o.basis) for o in self.observations(cell))
        steps = {}
        for series in dict.fromkeys((e.stack, basis) for e, basis in environments if e is not None):
            step = self._predicted(cell, series, batch)
            if step is None:
                continue
            if tokens is not None:
                shorter = _shorter_between(step, self.timed(cell).get(series, {}))
                step = replace(step, shorter=shorter)
            steps[series] = self._scaled(step, cell, series, tokens)
        return steps

    def _predicted(self, cell: Cell, series: StackAndBasis, batch: int) -> CellStepTime | None:
        stack, basis = series
        inputs = StepInputs(cell.gpu, stack, cell.seq_len, cell.sparsity, batch)
        for family in self._families_of(cell, basis):
            fit = predict(family, inputs)
            if fit is None:
                continue
            measured = (o.measurement for o in self.observations(cell) if o.basis is basis)
            of_simulation = _simulation_uncertainty([m for m in measured if m is not None])
            of_law = math.log(fit.high / fit.low) / 2 / NORMAL_90
            uncertainty = replace(of_simulation, own=math.hypot(of_law, of_simulation.own))
            return CellStepTime(batch, fit.value, uncertainty, "law", family.form, fit.extrapolated)
        return None

    def _scaled(
        self, step: CellStepTime, cell: Cell, series: StackAndBasis, tokens: PaddedTokens | None
    ) -> CellStepTime:
        """Scale a step from the full length to the padded length; unchanged without such a law.

        Simulated steps are interpolated linearly between the two nearest simulated lengths. Others
        are scaled by the family's law of lengths, which extrapolates below the shortest length
        that was timed on the GPU.
        """
        if tokens is None:
            return step
        padded = tokens(step.batch_size)
        if padded == cell.seq_len:
            return replace(step, tokens=padded)
        if step.shorter and padded >= step.shorter[0][0]:
            lengths, seconds = np.array([*step.shorter, (cell.seq_len, step.seconds)]).T
            return replace(step, seconds=float(np.interp(padded, lengths, seconds)), tokens=padded)
        stack, basis = series
        inputs = StepInputs(cell.gpu, stack, cell.seq_len, cell.sparsity, step.batch_size)
        for family in self._families_of(cell, basis):
            scale = length_scale(family, inputs, padded)
            if scale is None:
                continue
            own = math.hypot(step.uncertainty.own, scale.sigma)
            shortest = _shortest_length(family, cell.gpu, stack) or cell.seq_len
            return replace(
                step,
                seconds=step.seconds * scale.factor,
                uncertainty=replace(step.uncertainty, own=own),
                law=scale.form,
                tokens=padded,
                length_error=scale.error,
                extrapolated=step.extrapolated or padded < shortest,
            )
        return step

    def _families_of(self, cell: Cell, basis: Basis) -> Sequence[FamilyFit]:
        layout = None if cell.parallel is None else cell.parallel.key
        key = (cell.model, cell.weights, cell.recipe.key, layout, basis)
        return self._families.get(key, ())

    @cached_property
    def _families(self) -> dict[tuple[object, ...], list[FamilyFit]]:
        families: dict[tuple[object, ...], list[FamilyFit]] = defaultdict(list)
        for family in self._unread:
            name = family.name
            key = (name.model, name.weights, name.recipe, name.layout, name.basis)
            families[key].append(family)
        return families

    @cached_property
    def _spread(self) -> _VisitSpread:
        return _visit_spread(self._all)


def _visit_spread(observations: Sequence[Observation]) -> _VisitSpread:
    """Estimate the spread of measured visits from the repeated visits of a run."""
    visits: dict[tuple[Cell, str, int], list[float]] = defaultdict(list)
    for o in without_superseded(observations):
        steps = o.micro_batch_seconds
        if o.basis is MEASURED and steps and o.environment is not None:
            key = (o.cell, o.environment.stack, o.batch_size)
            visits[key].append(math.log(statistics.median(steps)))
    squares, degrees = VISIT_DEGREES * VISIT**2, VISIT_DEGREES
    for medians in visits.values():
        mean = statistics.fmean(medians)
        squares += sum((median - mean) ** 2 for median in medians)
        degrees += len(medians) - 1
    return _VisitSpread(math.sqrt(squares / degrees), degrees)


def _shorter_between(step: CellStepTime, timed: Mapping[int, CellStepTime]) -> Shorter:
    """Interpolate the steps of shorter examples at a batch size that was not simulated.

    Their ratio to the full step is linear in the logarithm of the batch size between the two
    nearest simulated batch sizes.
    """
    sizes = sorted(size for size in timed if timed[size].shorter)
    lengths = {tokens for size in sizes for tokens, _ in timed[size].shorter}
    shorter = []
    for tokens in sorted(lengths):
        ratios = {
            size: seconds / timed[size].seconds
            for size in sizes
            for simulated_tokens, seconds in timed[size].shorter
            if simulated_tokens == tokens
        }
        ratio = np.interp(math.log(step.batch_size), np.log(list(ratios)), list(ratios.values()))
        shorter.append((tokens, step.seconds * float(ratio)))
    return tuple(shorter)


def _shortest_length(family: FamilyFit, gpu: str, stack: str) -> int | None:
    """Shortest length of a family's series on one GPU and stack."""
    prefix = series_name(gpu, stack, 0).removesuffix("0")
    names = (series.name for series in family.series)
    lengths = (int(name.removeprefix(prefix)) for name in names if name.startswith(prefix))
    return min(lengths, default=None)


def _timed_visits(
    observations: Sequence[Observation],
) -> dict[StackAndBasis, dict[int, list[Observation]]]:
    """Timed probes of one cell by batch size, without sizes that ever failed to fit.

    A capped GPU has none: its probes ran at the speed of the larger GPU that stood in for it.
    """
    misses = (o.batch_size for o in observations if o.outcome.is_verdict and o.outcome is not FITS)
    lowest_miss = min(misses, default=math.inf)
    visits: dict[StackAndBasis, dict[int, list[Observation]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for o in without_superseded(observations):
        trainable = o.outcome is FITS and o.batch_size < lowest_miss
        timed = o.measurement is not None and o.measurement.step_seconds
        if trainable and timed and o.basis is not CAPPED and o.environment is not None:
            visits[o.environment.stack, o.basis][o.batch_size].append(o)
    return visits


def _timed_step(
    batch_size: int, visits: Sequence[Observation], spread: _VisitSpread
) -> CellStepTime:
    """Step of a batch size with its uncertainty."""
    measurements = [v.measurement for v in visits if v.measurement is not None]
    if _are_simulated(visits):
        uncertainty = _simulation_uncertainty(measurements)
        shorter = tuple(
            (tokens, seconds / visits[0].micro_batches)
            for tokens, seconds in measurements[0].shorter_step_seconds
        )
        return CellStepTime(
            batch_size, _seconds(visits), uncertainty, "simulated steps", shorter=shorter
        )
    within = [
        median_interval(s) or (min(s), max(s)) for s in (v.micro_batch_seconds for v in visits)
    ]
    squares = [(math.log(high / low) / 2 / NORMAL_95) ** 2 for low, high in within]
    # The spread of visits includes the variation within one visit, so the larger of both counts.
    own = math.sqrt(max(spread.sigma**2, statistics.fmean(squares)) / len(visits))
    uncertainty = TimeUncertainty(own, spread.degrees)
    return CellStepTime(batch_size, _seconds(visits), uncertainty, "measured steps")


def _seconds(visits: Sequence[Observation]) -> float:
    """Median step over all visits; a simulated step is the same in all of them."""
    if _are_simulated(visits):
        return visits[0].micro_batch_seconds[0]
    return statistics.median(itertools.chain.from_iterable(v.micro_batch_seconds for v in visits))


def _are_simulated(visits: Iterable[Observation]) -> bool:
    measurements = (v.measurement for v in visits)
    return all(m is not None and m.relative_error is not None for m in measurements)


def _simulation_uncertainty(measurements: Sequence[Measurement]) -> TimeUncertainty:
    """Uncertainty of simulated steps; zero for measured ones.

    Visits simulated with different constants may differ in their error: the largest counts.
    """
    below = [m.relative_error or 0.0 for m in measurements]
    above = [
        error if m.relative_error_above is None else m.relative_error_above
        for m, error in zip(measurements, below, strict=True)
    ]
    return simulated_uncertainty(max(below, default=0.0), max(above, default=0.0), SIMULATED_APART)
