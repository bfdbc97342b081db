"""Fits laws to observations, and predicts with what was fitted."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fitting.laws import FloatArray, affine_terms, eq2_terms, max_batch_eq1
from fitting.points import FitGroup, Limits, Source, Timings, limits, timings
from fitting.refusal import Refusal, refusal_of_limits, refusal_of_times
from fitting.result import Fit, Fits, InputRange, Law, Parameter, Prediction
from fitting.solve import Solution, Status, solve_linear, solve_nonlinear, t_quantile
from trials.observation import Observation

__all__ = [
    "Fit",
    "FitGroup",
    "Fits",
    "InputRange",
    "Law",
    "Parameter",
    "Prediction",
    "Status",
    "fit_observations",
    "predict_step_seconds",
]


Names = tuple[tuple[str, str], ...]  # of parameters, each with its unit


def predict_step_seconds(fit: Fit, batch_size: float, sparsity: float) -> Prediction:
    """Seconds of one step by an affine fit, with a 95 % interval for a step yet to be measured.

    ``t +- q * sqrt(x^T C x + (s * t)**2)``: x the terms of the law, C the covariance, s the
    residual standard deviation as a fraction of t, q the 97.5 % quantile of Student's t. The
    interval takes the law to be true, which nobody knows outside the input range: there
    ``extrapolated`` is set. The range is that of each input alone, not of their combinations.

    Raises:
        ValueError: the fit is a refusal, or of another law.
    """
    if fit.law is not Law.STEP_SECONDS_AFFINE:
        raise ValueError(f"{fit.key} does not predict step times: give a {Law.STEP_SECONDS_AFFINE}")
    if fit.rmse is None:
        raise ValueError(f"{fit.key} predicts nothing ({fit.status}: {fit.note}): {fit.remedy}")
    terms = affine_terms(batch_size, sparsity)[: len(fit.parameters)]
    value = float(terms @ np.array([p.value for p in fit.parameters]))
    residual_variance = fit.rmse**2 * fit.points / fit.degrees_of_freedom
    variance = float(terms @ np.array(fit.covariance) @ terms) + residual_variance * value**2
    half = t_quantile(0.975, fit.degrees_of_freedom) * float(np.sqrt(variance))
    asked = {"batch_size": batch_size, "sparsity": sparsity}
    return Prediction(
        value=value,
        low=max(value - half, 0.0),
        high=value + half,
        extrapolated=any(not r.low <= asked[r.name] <= r.high for r in fit.input_range),
    )


def fit_observations(observations: Sequence[Observation]) -> list[Fit]:
    """Every law for every group that may be fitted together, refusals included.

    Stacks, bases and recipes are never mixed.

    Raises:
        ValueError: an observation holds a number that cannot be.
    """
    return [
        *(_fit_eq1(points) for points in limits(observations)),
        *(
            fit
            for points in timings(observations)
            for fit in (_fit_eq2(points), _fit_affine(points))
        ),
    ]


@dataclass(frozen=True, slots=True)
class _Form:
    """A law in the form that is tried: its parameters and what its residuals are in."""

    law: Law
    names: Names
    rmse_unit: str


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A form tried on points: what they span and what came of it."""

    form: _Form
    source: Source
    inputs: tuple[tuple[str, FloatArray], ...]
    solution: Solution


def _fit_affine(points: Timings) -> Fit:
    """On rows divided by t, because a step's error grows with its length."""
    names: Names = (("t0", "s"), ("k0", "s/query"), ("k1", "s/query"))
    note = None
    if len(np.unique(points.sparsity)) < 2:
        names = (("t0", "s"), ("k", "s/query"))
        note = (
            "one sparsity, so t = t0 + b * k: nothing is known of other sparsities"
            if points.source.has_experts
            else "a model without experts, so t = t0 + b * k"
        )
    solution = solve_linear(
        affine_terms(points.batch_size, points.sparsity)[:, : len(names)],
        points.step_seconds,
        weights=1 / points.step_seconds,
        lower=np.zeros(len(names)),
    )
    unit = "fraction of the step time"
    return _fit_of_times(points, note, _Form(Law.STEP_SECONDS_AFFINE, names, unit), solution)


def _fit_eq2(points: Timings) -> Fit:
    """On queries per second as they are, as the paper did."""
    solution = solve_linear(
        eq2_terms(points.batch_size, points.sparsity), points.batch_size / points.step_seconds
    )
    unit = "queries/s"
    form = _Form(Law.THROUGHPUT_EQ2, (("c2_over_c3", unit), ("c4", unit)), unit)
    note = "C2 and C3 are one parameter, C2/C3: no data tell them apart"
    return _fit_of_times(points, note, form, solution)


def _fit_of_times(points: Timings, note: str | None, form: _Form, solution: Solution) -> Fit:
    if len(np.unique(points.batch_size)) == 1:
        solution = replace(solution, status=Status.TOO_FEW_POINTS)
    inputs = (("batch_size", points.batch_size), ("sparsity", points.sparsity))
    attempt = _Attempt(form, points.source, inputs, solution)
    if solution.status.is_usable:
        return _accepted(attempt, note)
    return _refused(attempt, refusal_of_times(points, solution))


def _fit_eq1(points: Limits) -> Fit:
    """To the middle of the step that floor() makes; c1 only where sparsity can vary."""
    names: Names = (("c0", "query*token/GB"), ("c1", "1"))[: 2 if points.source.has_experts else 1]
    middle = points.largest_batch + 0.5
    slope = _unrounded(points, np.array([1.0, 0.5])[: len(names)])
    # The best c0 for c1 = 0.5: a start of the right magnitude, strictly inside the bounds.
    best = float(slope @ middle) / float(slope @ slope) if len(middle) > 0 else 1.0
    start = np.array([best, 0.5])
    solution = solve_nonlinear(
        lambda values: _unrounded(points, values) - middle,
        start[: len(names)],
        lower=np.zeros(len(names)),
        upper=np.array([np.inf, 1.0])[: len(names)],
    )
    inputs = (
        ("memory_gb", points.memory_gb),
        ("model_memory_gb", points.model_memory_gb),
        ("seq_len", points.seq_len),
        ("sparsity", points.sparsity),
    )
    form = _Form(Law.MAX_BATCH_EQ1, names, "queries")
    attempt = _Attempt(form, points.source, inputs, solution)
    if solution.status.is_usable:
        return _accepted(attempt, _note_of_limits(points, solution))
    return _refused(attempt, refusal_of_limits(points, solution))


def _unrounded(points: Limits, values: FloatArray) -> FloatArray:
    """Eq. 1 at c0 and, for a model with experts, c1."""
    c1 = float(values[1]) if len(values) > 1 else 0.0
    return max_batch_eq1(
        points.memory_gb,
        points.model_memory_gb,
        points.seq_len,
        points.sparsity,
        float(values[0]),
        c1,
    )


def _note_of_limits(points: Limits, solution: Solution) -> str:
    count = len(points.largest_batch)
    exact = int(np.sum(np.floor(_unrounded(points, solution.values)) == points.largest_batch))
    parts = [
        "fitted to b + 0.5, the middle of [b, b + 1) where the limit lies before rounding down",
        f"floor() of the law gives {exact} of {count} cells exactly",
        f"GPUs: {', '.join(points.gpus)}",
    ]
    if points.cells_seen > count:
        parts.append(
            f"{points.cells_seen - count} of {points.cells_seen} cells left out: "
            "no largest batch, of at least 1, that device memory set"
        )
    return "; ".join(parts)


def _accepted(attempt: _Attempt, note: str | None) -> Fit:
    solution = attempt.solution
    columns = zip(attempt.form.names, solution.values, solution.standard_errors, strict=True)
    parameters = tuple(
        Parameter(name=name, value=float(value), unit=unit, standard_error=error)
        for (name, unit), value, error in columns
    )
    held = [
        f"{p.name} held at its bound {p.value:g}" for p in parameters if p.standard_error is None
    ]
    covariance = () if solution.covariance is None else solution.covariance.tolist()
    return _told(
        attempt,
        parameters=parameters,
        covariance=tuple(tuple(row) for row in covariance),
        note="; ".join([*([note] if note else []), *held]) or None,
    )


def _refused(attempt: _Attempt, refusal: Refusal) -> Fit:
    return _told(attempt, note=refusal.reason, remedy=refusal.remedy)


def _told(
    attempt: _Attempt,
    *,
    note: str | None,
    remedy: str | None = None,
    parameters: tuple[Parameter, ...] = (),
    covariance: tuple[tuple[float, ...], ...] = (),
) -> Fit:
    source, solution = attempt.source, attempt.solution
    return Fit(
        law=attempt.form.law,
        group=source.group,
        basis=source.basis,
        stack=source.stack,
        status=solution.status,
        remedy=remedy,
        parameters=parameters,
        covariance=covariance,
        rank=solution.rank,
        parameter_count=solution.parameter_count,
        points=solution.points,
        rmse=solution.rmse if parameters else None,
        rmse_unit=attempt.form.rmse_unit,
        input_range=_ranges(attempt.inputs),
        note=note,
    )


def _ranges(inputs: tuple[tuple[str, FloatArray], ...]) -> tuple[InputRange, ...]:
    return tuple(
        InputRange(name=name, low=float(values.min()), high=float(values.max()))
        for name, values in inputs
        if len(values) > 0
    )
