"""What the law of a family says of steps that nobody timed, from its record alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fitting.families.fitted_groups import power_of
from fitting.families.records import BatchSizeRange, FamilyFit, GroupLaw, Intervals, SeriesSeen
from fitting.laws.fit_result import Parameter, Prediction
from fitting.laws.forms import SHAPES, Form, Sparsity, form_seconds, group_of
from fitting.numerics.arrays import FloatArray
from fitting.numerics.uncertainty import NORMAL_90
from fitting.points.fit_points import gpu_name, series_name
from fitting.points.step_time_rows import StepTimes


@dataclass(frozen=True, slots=True)
class LengthScale:
    """How a step's time changes from one length of its examples to another.

    Attributes:
        form: the law that says so.
        factor: what the step time is multiplied by.
        sigma: standard deviation of its logarithm.
        error: how far off the law is on lengths that it has not seen.
    """

    form: Form
    factor: float
    sigma: float
    error: float


def predict(  # noqa: PLR0913, PLR0917 - what a step depends on
    fit: FamilyFit, gpu: str, stack: str, seq_len: int, sparsity: float, batch_size: float
) -> Prediction | None:
    """Seconds of one step of examples of one length; None where the law does not speak of it.

    Args:
        fit: of the family.
        gpu: its key.
        stack: fingerprint of what it runs, device and driver included.
        seq_len: tokens per example.
        sparsity: active experts over experts.
        batch_size: examples per step.
    """
    return predictions(fit, _rows(gpu, stack, seq_len, sparsity, batch_size, [seq_len]))[0]


def length_scale(  # noqa: PLR0913, PLR0917 - what a step depends on
    fit: FamilyFit,
    gpu: str,
    stack: str,
    seq_len: int,
    sparsity: float,
    batch_size: float,
    tokens_per_example: float,
) -> LengthScale | None:
    """What a step's time is multiplied by for examples of another length, by the law of lengths.

    None where it does not speak of it, or there is none: of one length nothing tells what another
    takes, whatever its law counts the work in.

    Args:
        fit: of the family.
        gpu: its key.
        stack: fingerprint of what it runs, device and driver included.
        seq_len: tokens per example of the steps that are known.
        sparsity: active experts over experts.
        batch_size: examples per step.
        tokens_per_example: of those that are asked about, padding included.
    """
    law = fit.by_length
    if law is None:
        return None
    rows = _rows(gpu, stack, seq_len, sparsity, batch_size, [tokens_per_example, seq_len])
    short, full = _law_seconds(law.form, law.groups, law.exponent, rows)
    if np.isnan(short):
        return None
    return LengthScale(law.form, float(short / full), law.half_width / NORMAL_90, law.error)


def _rows(  # noqa: PLR0913, PLR0917 - what a step depends on
    gpu: str,
    stack: str,
    seq_len: int,
    sparsity: float,
    batch_size: float,
    tokens_per_example: Sequence[float],
) -> StepTimes:
    """Steps that are asked about: a row for each number of tokens, its seconds not known."""
    count = len(tokens_per_example)
    return StepTimes(
        gpu=np.full(count, gpu_name(gpu, stack)),
        series=np.full(count, series_name(gpu, stack, seq_len)),
        batch_size=np.full(count, float(batch_size)),
        tokens=batch_size * np.array(tokens_per_example, np.float64),
        sparsity=np.full(count, float(sparsity)),
        seconds=np.full(count, np.nan),
    )


def predictions(fit: FamilyFit, rows: StepTimes) -> list[Prediction | None]:
    """(rows,) seconds of steps, with intervals at the level of the fit; their seconds are not read.

    It is extrapolated where the series was not seen, or neither this sparsity nor one on each side
    of it, or not as small or large a batch there. None where the law says nothing: of a GPU or
    series without parameters, of another sparsity where it was never varied, or where nothing tells
    how sure it is.
    """
    if fit.form is None or fit.intervals is None:
        return [None] * len(rows)
    seconds = _law_seconds(fit.form, fit.groups, fit.exponent, rows)
    seen = {each.name: each for each in fit.series}
    return [
        None if np.isnan(value) else _predicted(fit.intervals, seen.get(str(name)), value, *at)
        for name, value, *at in zip(
            rows.series, seconds, rows.sparsity, rows.batch_size, strict=True
        )
    ]


def _law_seconds(
    form: Form, groups: Sequence[GroupLaw], exponent: Parameter | None, rows: StepTimes
) -> FloatArray:
    """(rows,) step times by a form with its values; nan where it says nothing."""
    laws = {law.name: law for law in groups}
    values = [
        _values(form, laws.get(str(group)), float(sparsity))
        for group, sparsity in zip(group_of(form, rows), rows.sparsity, strict=True)
    ]
    shared = None if exponent is None else exponent.value
    return form_seconds(form, np.array(values), shared, rows)


def _values(form: Form, law: GroupLaw | None, sparsity: float) -> list[float]:
    """What multiplies the terms of a form; nan where the law does not speak."""
    shape = SHAPES.get(form)
    count = 3 if shape is not None and shape.sparsity is Sparsity.OWN else 2
    if law is None or not law.parameters or law.sparsity not in (None, sparsity):
        return [np.nan] * count
    values = [p.value ** power_of(form, p.name) for p in law.parameters]
    return values + [0.0] * (count - len(values))


def _predicted(
    intervals: Intervals, seen: SeriesSeen | None, value: float, sparsity: float, batch_size: float
) -> Prediction:
    half = intervals.half_width
    if seen is not None and seen.half_width is not None:
        half = seen.half_width
    return Prediction(
        value=value,
        low=value * np.exp(-half),
        high=value * np.exp(half),
        extrapolated=seen is None or not _is_inside(seen.curves, sparsity, batch_size),
    )


def _is_inside(curves: Sequence[BatchSizeRange], sparsity: float, batch_size: float) -> bool:
    """Whether curves on both sides of the sparsity, or of the very same, have such a batch size."""
    below = [curve for curve in curves if curve.sparsity <= sparsity][-1:]
    above = [curve for curve in curves if curve.sparsity >= sparsity][:1]
    return len(below) == len(above) == 1 and all(
        curve.smallest <= batch_size <= curve.largest for curve in (*below, *above)
    )
