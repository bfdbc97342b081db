"""Tables of the laws of a run: curves with intervals, and cross-validation errors. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from fitting.largest_batch_prediction import held_out_largest_batches
from fitting.laws.fit_result import Fit, Law
from fitting.memory_prediction import predict_peak
from orchestrator.reporting.page.run_tables import PageTable
from orchestrator.reporting.sections.law_section import LAW_NAMES
from orchestrator.reporting.sections.memory_section import outcome_text
from orchestrator.run_folder.run_results import RunResults
from trials.records.cell import Cell
from trials.records.observation import Basis, Observation, largest_batch

PREDICTION = ("value", "low", "high", "extrapolated")
CURVE_POINTS = 17  # of one curve, both ends included


def speed_table(results: RunResults) -> PageTable:
    """Throughput by the law of the step time, from one example to the largest batch size tried."""
    columns = (
        *("cell", "stack", "basis", "batch", "examples_per_second"),
        *("examples_per_second_low", "examples_per_second_high", "extrapolated", "law"),
    )
    return PageTable(columns, [row for cell in results.cells for row in _speeds(results, cell)])


def _speeds(results: RunResults, cell: Cell) -> Iterator[tuple[Any, ...]]:
    timed = [o for o in results.observations_of(cell) if _is_timed(o)]
    series = dict.fromkeys(
        (o.environment.stack, o.basis) for o in timed if o.environment is not None
    )
    sizes = _sizes(max((o.batch_size for o in timed), default=1))
    predictions = [results.step_times.by_law(cell, size) for size in sizes]
    for stack, basis in series:
        for size, steps in zip(sizes, predictions, strict=True):
            step = steps.get((stack, basis))
            if step is None:
                break
            fastest, slowest = step.uncertainty.factors
            speed = cell.examples_per_second(size, step.seconds)
            law = None if step.law is None else LAW_NAMES[step.law]
            values = (speed, speed / slowest, speed / fastest, step.extrapolated, law)
            yield (results.place(cell), stack, basis.value, size, *values)


def _is_timed(o: Observation) -> bool:
    return (
        o.basis is not Basis.CAPPED
        and o.measurement is not None
        and bool(o.measurement.step_seconds)
    )


def _sizes(most: int) -> list[int]:
    """Batch sizes to draw a curve through, in a geometric series from 1."""
    return sorted({round(size) for size in np.geomspace(1, max(most, 1), CURVE_POINTS)})


def memory_table(results: RunResults) -> PageTable:
    """Peak memory by the affine law, up to one example above the largest batch size tried."""
    laws = {
        (fit.group, fit.basis, fit.stack): fit
        for fit in results.fits.fits
        if fit.law is Law.MEMORY_AFFINE and fit.status.is_usable
    }
    rows = []
    for cell in results.cells:
        observations = results.observations_of(cell)
        sizes = [o.batch_size for o in observations if o.measurement is not None and not o.is_drawn]
        for fit in _memory_laws(cell, observations, laws.values()):
            for size in _sizes(max(sizes, default=0) + 1):
                peak = predict_peak(fit, size * cell.seq_len)
                values = (peak.value, peak.low, peak.high, peak.extrapolated)
                rows.append((results.place(cell), fit.stack, fit.basis.value, size, *values))
    columns = ("cell", "software", "basis", "batch", "gib", "gib_low", "gib_high", "extrapolated")
    return PageTable(columns, rows)


def _memory_laws(cell: Cell, observations: Sequence[Observation], laws: Iterable[Fit]) -> list[Fit]:
    """Laws of the cell's model, recipe and routing, on the stacks that ran the cell."""
    stacks = {
        (o.basis, o.environment.software)
        for o in observations
        if o.environment is not None and o.measurement is not None
    }
    key = (cell.model, cell.weights, cell.recipe, cell.active_experts, cell.parallel)
    return [
        fit
        for fit in laws
        if (fit.basis, fit.stack) in stacks
        and (
            *(fit.group.model, fit.group.weights, fit.group.recipe),
            *(fit.group.active_experts, fit.group.parallel),
        )
        == key
    ]


def largest_table(results: RunResults) -> PageTable:
    """The largest batch of each cell, and its prediction from the probes of the other cells."""
    predictions = held_out_largest_batches(results.observed)
    rows: list[tuple[Any, ...]] = []
    for cell in results.cells:
        observations = results.observations_of(cell)
        limit, prediction = largest_batch(observations), predictions.get(cell)
        if limit is None and prediction is None:
            continue
        largest, miss = limit or (None, None)
        rows.append(
            (
                results.place(cell),
                observations[0].basis.value,
                largest,
                None if miss is None else f"{miss.batch_size}: {outcome_text(miss.outcome)}",
                *(getattr(prediction, name, None) for name in PREDICTION),
            )
        )
    columns = ("cell", "basis", "largest", "next", "predicted", *PREDICTION[1:])
    return PageTable(columns, rows)


def errors_table(results: RunResults) -> PageTable:
    """Cross-validation errors of every candidate law."""
    rows = [
        (
            f.name.model if f.name.weights != "pretrained" else f"{f.name.model}, pretrained",
            *(f.name.recipe, f.name.basis.value, f.name.software),
            *(LAW_NAMES[c.form], c.form is f.form, c.error, c.standard_error),
            *(c.growing_error, c.length_error, c.parameters, f.points),
        )
        for f in results.fits.families
        for c in f.candidates
    ]
    columns = (
        *("model", "recipe", "basis", "software", "law", "chosen", "error", "standard_error"),
        *("growing_error", "length_error", "parameters", "points"),
    )
    return PageTable(columns, rows)
