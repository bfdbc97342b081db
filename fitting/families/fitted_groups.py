"""The record of a family's law from its fit: groups, parameters, suspects, series, intervals."""

import numpy as np

from fitting.families.records import BatchSizeRange, GroupLaw, Intervals, ObservedSeries, Suspect
from fitting.laws.fit_result import Parameter
from fitting.laws.forms import (
    SHAPES,
    SUSPECT_SPREADS,
    FittedForm,
    Form,
    Sparsity,
    WorkUnit,
    group_of,
)
from fitting.laws.model_selection import log_residuals
from fitting.laws.robust_fit import fit_values
from fitting.numerics.arrays import FloatArray, IntArray
from fitting.numerics.intervals import LEVEL, Scales, coverage
from fitting.points.step_time_rows import StepTimes

FEWEST_JUDGED = 5  # least number of points to estimate a coverage from
MOST_REFITTED = 100  # points of a law that is fitted again without each suspect: each bends it


def exponent_parameter(fitted: FittedForm) -> Parameter | None:
    """Shared exponent of the sparsity; None where the form has none."""
    if fitted.exponent is None:
        return None
    return Parameter(
        name="g", value=fitted.exponent, unit="1", standard_error=fitted.exponent_error
    )


def group_laws(fitted: FittedForm, points: StepTimes) -> tuple[GroupLaw, ...]:
    """Parameters of every group, with a remedy for those that have too few points."""
    _, at = np.unique(group_of(fitted.form, points), return_inverse=True)
    order = np.argsort(at, kind="stable")
    members = np.split(order, np.cumsum(np.bincount(at))[:-1])
    return tuple(_group(fitted, place, points.sparsity[rows]) for place, rows in enumerate(members))


def _group(fitted: FittedForm, place: int, sparsities: FloatArray) -> GroupLaw:
    form, several = fitted.form, len(np.unique(sparsities)) > 1
    terms = _terms(form, several=several)
    is_free = form is Form.LOGARITHM or several or fitted.exponent is not None
    values, errors = fitted.values[place], fitted.standard_errors[place]
    is_identified = bool(np.isfinite(values).all())
    parameters = tuple(
        _parameter(form, *term, value, error)
        for term, value, error in zip(terms, values, errors, strict=False)
    )
    return GroupLaw(
        name=str(fitted.names[place]),
        points=len(sparsities),
        parameters=parameters if is_identified else (),
        held_at_zero=tuple(p.name for p in parameters if is_identified and p.value == 0),
        sparsity=None if is_free else float(sparsities[0]),
        remedy=None
        if is_identified
        else f"measure at least {len(terms) + 1} points of it, among them two batch sizes at one "
        "sparsity",
    )


def _terms(form: Form, *, several: bool) -> tuple[tuple[str, str], ...]:
    """Names and units of the parameters of a form, of one or ``several`` sparsities."""
    if form is Form.LOGARITHM:
        return (("c2_over_c3", "examples/s"), ("c4", "examples/s"))
    shape = SHAPES[form]
    unit = "s/token" if shape.work is WorkUnit.TOKENS else "s/example"
    if shape.sparsity is Sparsity.SHARED or not several:
        return (("t0", "s"), ("k", unit))
    powered = unit if shape.power == 1 else f"({unit})^{shape.power:g}"
    return (("t0", "s"), ("k0", powered), ("k1", powered))


def power_of(form: Form, name: str) -> float:
    """Power of a parameter in the factor of its term."""
    return SHAPES[form].power if name in ("t0", "k") else 1.0


def _parameter(form: Form, name: str, unit: str, value: float, error: float) -> Parameter:
    power = power_of(form, name)
    rooted = float(value ** (1 / power))
    if power != 1:  # a root has no derivative at 0
        error = error * (rooted / value / power) if value != 0 else np.nan
    standard_error = float(error) if np.isfinite(error) else None
    return Parameter(name=name, value=rooted, unit=unit, standard_error=standard_error)


def suspect_points(fitted: FittedForm, points: StepTimes) -> tuple[Suspect, ...]:
    """Points farther than ``SUSPECT_SPREADS`` spreads from the law fitted without them."""
    rows = np.flatnonzero(fitted.suspects)
    without = _left_out(fitted, points, rows)
    return tuple(
        Suspect(
            gpu=str(points.gpu[row]),
            series=str(points.series[row]),
            seq_len=float(points.tokens[row] / points.batch_size[row]),
            sparsity=float(points.sparsity[row]),
            batch_size=float(points.batch_size[row]),
            seconds=float(points.seconds[row]),
            expected_seconds=float(points.seconds[row] * np.exp(residual)),
            spreads=float(abs(residual) / fitted.spread),
        )
        for row, residual in zip(rows, without, strict=True)
        if abs(residual) > SUSPECT_SPREADS * fitted.spread
    )


def _left_out(fitted: FittedForm, points: StepTimes, rows: IntArray) -> FloatArray:
    """Residuals of these rows by the law without each; of many points, to first order."""
    if not len(rows) or len(points) > MOST_REFITTED:
        return fitted.left_out_residuals[rows]
    without = [np.arange(len(points)) != row for row in rows]
    laws = zip(fit_values(fitted.form, points, without), without, strict=True)
    return np.concatenate([log_residuals(law, points.where(~others)) for law, others in laws])


def observed_series(points: StepTimes, scale: Scales | None) -> tuple[ObservedSeries, ...]:
    """Observed curves of every series, of points in the order of ``merged``."""
    names, counts = np.unique(points.series, return_counts=True)
    ends = np.cumsum(counts)
    return tuple(
        ObservedSeries(
            name=str(name),
            curves=_curves(points.where(np.arange(start, end))),
            sigma=None if scale is None else scale.sigma(str(name)),
            half_width=None if scale is None else scale.half_width(str(name), LEVEL),
        )
        for name, start, end in zip(names, ends - counts, ends, strict=True)
    )


def _curves(series: StepTimes) -> tuple[BatchSizeRange, ...]:
    return tuple(
        BatchSizeRange(
            sparsity=float(sparsity), smallest=float(sizes.min()), largest=float(sizes.max())
        )
        for sparsity in np.unique(series.sparsity)
        for sizes in [series.batch_size[series.sparsity == sparsity]]
    )


def family_intervals(
    points: StepTimes, left_out: FloatArray, scale: Scales, *, nested: bool
) -> Intervals:
    """Interval widths of the family, with the share of left-out points inside them."""
    is_judged = np.isfinite(left_out).sum() >= FEWEST_JUDGED
    return Intervals(
        level=LEVEL,
        residuals="nested" if nested else "first order",
        sigma=scale.family,
        half_width=scale.half_width(None, LEVEL),
        coverage=coverage(points.series, left_out, LEVEL)[0] if is_judged else None,
    )
