"""All laws of a run: Eq. 1, Eq. 2 and memory by group, step times by family."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import numpy as np

from fitting.families.fit_family import Map, fit_columns
from fitting.families.records import FamilyFit
from fitting.laws.equations import eq2_terms, max_batch_eq1
from fitting.laws.fit_failure import (
    FitFailure,
    ladder_fit_failure,
    largest_batch_fit_failure,
    peak_fit_failure,
)
from fitting.laws.fit_result import Fit, InputRange, Law, Parameter
from fitting.memory_prediction import largest
from fitting.numerics.arrays import FloatArray
from fitting.numerics.least_squares import Solution, Status, solve_linear, solve_nonlinear
from fitting.points.fit_points import (
    GIB,
    LadderTimings,
    Limits,
    Peaks,
    limits,
    peaks,
    timings,
)
from fitting.points.observation_columns import Columns, columns_of
from gpu_catalog.record import Record
from trials.records.observation import Observation

Names = tuple[tuple[str, str], ...]  # name and unit of each parameter


class Fits(Record):
    """All fits of a run, as written to disk.

    Attributes:
        fits: Eq. 1, Eq. 2 and peak memory, by group.
        families: laws of the step time.
    """

    schema_version: Literal[2] = 2
    fits: tuple[Fit, ...]
    families: tuple[FamilyFit, ...]


def fit_observations(observations: Iterable[Observation]) -> Fits:
    """Fit every law to every group and family, failures included.

    Stacks, bases and recipes are never mixed. Observations are iterated once and not kept.

    Raises:
        ValueError: an observation is impossible, such as a model larger than its memory limit.
    """
    return fit_laws(columns_of(observations))


def fit_laws(columns: Columns, run_map: Map = map) -> Fits:
    """Fit every law, as ``fit_observations``, in several processes by ``run_map``."""
    fits = chain(
        run_map(_fit_eq1, limits(columns)),
        run_map(fit_peaks, peaks(columns)),
        run_map(_fit_eq2, timings(columns)),
    )
    families = fit_columns(columns, run_map)
    return Fits(fits=tuple(fits), families=families)


@dataclass(frozen=True, slots=True)
class _Form:
    """A law with its parameters and the unit of its residuals."""

    law: Law
    names: Names
    rmse_unit: str


EQ2 = _Form(Law.THROUGHPUT_EQ2, (("c2_over_c3", "examples/s"), ("c4", "examples/s")), "examples/s")
PEAK = _Form(Law.MEMORY_AFFINE, (("m0", "GiB"), ("m", "GiB/token")), "fraction of the peak")


def _fit_eq2(points: LadderTimings) -> Fit:
    """Fit Eq. 2 to unweighted examples per second, as the paper did."""
    layout = points.source.group.parallel
    ranks = 1 if layout is None else layout.data_parallel_ranks
    rate = ranks * points.batch_size / points.step_seconds
    solution = solve_linear(eq2_terms(points.batch_size, points.sparsity), rate)
    if len(np.unique(points.batch_size)) == 1:
        solution = replace(solution, status=Status.TOO_FEW_POINTS)
    inputs = {"batch_size": points.batch_size, "sparsity": points.sparsity}
    if not solution.status.is_usable:
        return _record(EQ2, points, inputs, solution, ladder_fit_failure(points, solution))
    note = "C2 and C3 are one parameter, C2/C3: no data separate them"
    return _record(EQ2, points, inputs, solution, note)


def fit_peaks(points: Peaks) -> Fit:
    """Fit ``peak = M0 + m * tokens`` by relative errors."""
    solution = solve_linear(
        np.stack([np.ones_like(points.tokens), points.tokens], axis=1),
        points.peak_gib,
        weights=1 / points.peak_gib,
        lower=np.zeros(2),
    )
    inputs = {"seq_len": points.seq_len, "tokens": points.tokens}
    if not solution.status.is_usable:
        return _record(PEAK, points, inputs, solution, peak_fit_failure(points, solution))
    return _record(PEAK, points, inputs, solution, _note_of_peaks(points.limits, solution))


def _note_of_peaks(cells: Limits, solution: Solution) -> str | None:
    """Number of largest batches that follow; None without any, or if memory does not grow."""
    model_gib, per_token = solution.values
    if len(cells.largest_batch) == 0 or per_token == 0:
        return None
    usable_gib = cells.memory_gb * 1e9 / GIB
    exact = largest(usable_gib, cells.seq_len, model_gib, per_token) == cells.largest_batch
    return (
        "the law predicts allocated memory without the allocator's overhead; it gives "
        f"{int(exact.sum())} of {len(exact)} largest batches exactly"
    )


def _fit_eq1(points: Limits) -> Fit:
    """Fit Eq. 1 to the middle of the steps of floor(); c1 only where the sparsity can vary."""
    names: Names = (("c0", "example*token/GB"), ("c1", "1"))
    form = _Form(Law.MAX_BATCH_EQ1, names if points.source.has_experts else names[:1], "examples")
    count = len(form.names)
    middle = points.largest_batch + 0.5
    slope = _unrounded(points, np.array([1.0, 0.5])[:count])
    # The best c0 for c1 = 0.5: a start of the right magnitude, strictly inside the bounds.
    best = float(slope @ middle) / float(slope @ slope) if len(middle) > 0 else 1.0
    solution = solve_nonlinear(
        lambda values: _unrounded(points, values) - middle,
        np.array([best, 0.5])[:count],
        lower=np.zeros(count),
        upper=np.array([np.inf, 1.0])[:count],
    )
    inputs = {
        "memory_gb": points.memory_gb,
        "model_memory_gb": points.model_memory_gb,
        "seq_len": points.seq_len,
        "sparsity": points.sparsity,
    }
    if not solution.status.is_usable:
        return _record(form, points, inputs, solution, largest_batch_fit_failure(points, solution))
    return _record(form, points, inputs, solution, _note_of_limits(points, solution))


def _unrounded(points: Limits, values: FloatArray) -> FloatArray:
    """Eq. 1 at c0 and, for a model with experts, c1."""
    c0, c1 = float(values[0]), float(values[1]) if len(values) > 1 else 0.0
    memory, model, seq_len = points.memory_gb, points.model_memory_gb, points.seq_len
    return max_batch_eq1(memory, model, seq_len, points.sparsity, c0, c1)


def _note_of_limits(points: Limits, solution: Solution) -> str:
    count = len(points.largest_batch)
    exact = int(np.sum(np.floor(_unrounded(points, solution.values)) == points.largest_batch))
    parts = [
        "fitted to b + 0.5, the middle of [b, b + 1), which contains the limit before rounding",
        f"floor() of the law gives {exact} of {count} cells exactly",
        f"GPUs: {', '.join(points.gpus)}",
    ]
    if points.cell_count > count:
        parts.append(
            f"{points.cell_count - count} of {points.cell_count} cells left out: "
            "device memory does not limit their largest batch, or it is 0"
        )
    return "; ".join(parts)


def _record(
    form: _Form,
    points: LadderTimings | Limits | Peaks,
    inputs: Mapping[str, FloatArray],
    solution: Solution,
    outcome: str | FitFailure | None,
) -> Fit:
    """Record of a fit with a note on it, or of a failure."""
    parameters: tuple[Parameter, ...] = ()
    covariance: list[list[float]] = []
    note: str | None
    if isinstance(outcome, FitFailure):
        note, remedy = outcome.reason, outcome.remedy
    else:
        columns = zip(form.names, solution.values, solution.standard_errors, strict=True)
        parameters = tuple(
            Parameter(name=name, value=float(value), unit=unit, standard_error=error)
            for (name, unit), value, error in columns
        )
        held = (p for p in parameters if p.standard_error is None)
        notes = [outcome, *(f"{p.name} held at its bound {p.value:g}" for p in held)]
        note, remedy = "; ".join(filter(None, notes)) or None, None
        covariance = [] if solution.covariance is None else solution.covariance.tolist()
    return Fit(
        law=form.law,
        group=points.source.group,
        basis=points.source.basis,
        stack=points.source.stack,
        status=solution.status,
        remedy=remedy,
        parameters=parameters,
        covariance=tuple(map(tuple, covariance)),
        rank=solution.rank,
        parameter_count=solution.parameter_count,
        points=solution.points,
        rmse=solution.rmse if parameters else None,
        rmse_unit=form.rmse_unit,
        input_range=tuple(
            InputRange(name=name, low=float(values.min()), high=float(values.max()))
            for name, values in inputs.items()
            if len(values) > 0
        ),
        note=note,
    )
