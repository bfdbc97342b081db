"""Predictions of step times from the record of a family's law."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fitting.families.fitted_groups import power_of
from fitting.families.records import BatchSizeRange, FamilyFit, GroupLaw, Intervals, ObservedSeries
from fitting.laws.fit_result import Parameter, Prediction
from fitting.laws.forms import SHAPES, Form, Sparsity, form_seconds, group_of
from fitting.numerics.arrays import FloatArray
from fitting.numerics.uncertainty import NORMAL_90
from fitting.points.fit_points import gpu_name, series_name
from fitting.points.step_time_rows import StepTimes


@dataclass(frozen=True, slots=True)
class LengthScale:
    """Change of a step time from one length of its examples to another.

    Attributes:
        form: form of the law of lengths.
        factor: ratio of the step times.
        sigma: standard deviation of the logarithm of the factor.
        error: relative error of the law on lengths left out of its fit.
    """

    form: Form
    factor: float
    sigma: float
    error: float


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of the law of a step time; ``stack`` includes device and driver."""

    gpu: str
    stack: str
    seq_len: int
    sparsity: float
    batch_size: float


def predict(fit: FamilyFit, step: StepInputs) -> Prediction | None:
    """Predict the seconds of a step; None where the law has no prediction."""
    return predictions(fit, _rows(step, [step.seq_len]))[0]


def length_scale(fit: FamilyFit, step: StepInputs, tokens_per_example: float) -> LengthScale | None:
    """Scale of a step's time for examples of another padded length, by the law of lengths.

    None where the law has no prediction, or the family has no law of lengths: one length alone
    gives no prediction of another, whatever unit of work its law has.
    """
    law = fit.by_length
    if law is None:
        return None
    rows = _rows(step, [tokens_per_example, step.seq_len])
    short, full = _law_seconds(law.form, law.groups, law.exponent, rows)
    if np.isnan(short):
        return None
    return LengthScale(law.form, float(short / full), law.half_width / NORMAL_90, law.error)


def _rows(step: StepInputs, tokens_per_example: Sequence[float]) -> StepTimes:
    """Steps to predict, a row for each number of tokens, with nan for their seconds."""
    count = len(tokens_per_example)
    return StepTimes(
        gpu=np.full(count, gpu_name(step.gpu, step.stack)),
        series=np.full(count, series_name(step.gpu, step.stack, step.seq_len)),
        batch_size=np.full(count, float(step.batch_size)),
        tokens=step.batch_size * np.array(tokens_per_example, np.float64),
        sparsity=np.full(count, float(step.sparsity)),
        seconds=np.full(count, np.nan),
    )


def predictions(fit: FamilyFit, rows: StepTimes) -> list[Prediction | None]:
    """(rows,) predicted seconds with intervals at the level of the fit; ``seconds`` are not read.

    A prediction is extrapolated for a series that was not observed, a sparsity outside those
    observed, or a batch size outside the range observed there. It is None for a GPU or series
    without parameters, for another sparsity where it was never varied, and for a family without
    intervals.
    """
    if fit.form is None or fit.intervals is None:
        return [None] * len(rows)
    seconds = _law_seconds(fit.form, fit.groups, fit.exponent, rows)
    observed = {series.name: series for series in fit.series}
    columns = zip(rows.series, seconds, rows.sparsity, rows.batch_size, strict=True)
    return [
        None if np.isnan(value) else _predicted(fit.intervals, observed.get(str(name)), value, *at)
        for name, value, *at in columns
    ]


def _law_seconds(
    form: Form, groups: Sequence[GroupLaw], exponent: Parameter | None, rows: StepTimes
) -> FloatArray:
    """(rows,) step times by the laws of groups; nan where there is no prediction."""
    laws = {law.name: law for law in groups}
    values = [
        _values(form, laws.get(str(group)), float(sparsity))
        for group, sparsity in zip(group_of(form, rows), rows.sparsity, strict=True)
    ]
    shared = None if exponent is None else exponent.value
    return form_seconds(form, np.array(values), shared, rows)


def _values(form: Form, law: GroupLaw | None, sparsity: float) -> list[float]:
    """Factors of the terms of a form; nan where the law has no prediction."""
    shape = SHAPES.get(form)
    count = 3 if shape is not None and shape.sparsity is Sparsity.OWN else 2
    if law is None or not law.parameters or law.sparsity not in (None, sparsity):
        return [np.nan] * count
    values = [p.value ** power_of(form, p.name) for p in law.parameters]
    return values + [0.0] * (count - len(values))


def _predicted(
    intervals: Intervals,
    series: ObservedSeries | None,
    value: float,
    sparsity: float,
    batch_size: float,
) -> Prediction:
    half = intervals.half_width
    if series is not None and series.half_width is not None:
        half = series.half_width
    return Prediction(
        value=value,
        low=value * np.exp(-half),
        high=value * np.exp(half),
        extrapolated=series is None or not _is_inside(series.curves, sparsity, batch_size),
    )


def _is_inside(curves: Sequence[BatchSizeRange], sparsity: float, batch_size: float) -> bool:
    """Whether the curves at the sparsity, or on both sides of it, include the batch size."""
    below = [curve for curve in curves if curve.sparsity <= sparsity][-1:]
    above = [curve for curve in curves if curve.sparsity >= sparsity][:1]
    return len(below) == len(above) == 1 and all(
        curve.smallest <= batch_size <= curve.largest for curve in (*below, *above)
    )
