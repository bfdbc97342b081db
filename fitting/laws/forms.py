"""Laws of the step time of one family: what shares a model, a recipe, software and a basis.

Every law but the logarithm is ``t**p = t0**p + (work * k(sparsity))**p``: a floor t0 (launches,
reading the weights, the optimizer) and a cost that grows with the work of a step. The power p is 1
where the two follow each other and larger where they overlap. Given p and the exponent of the
sparsity, ``t**p`` is linear in the parameters: a fit needs no starting values and solves for the
floors and slopes of all GPUs at once.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from fitting.laws.equations import eq2_terms
from fitting.numerics.arrays import BoolArray, FloatArray, NameArray
from fitting.points.step_time_rows import StepTimes

LEAST_FREEDOM = 0.02  # 1 - leverage below which no other point determines the fit at this one
SUSPECT_SPREADS = 5.0  # a point farther than this from the law, in spreads, is a suspect


class WorkUnit(StrEnum):
    """Unit of the work of a step."""

    EXAMPLES = "examples"
    TOKENS = "tokens"


class Grouping(StrEnum):
    """Groups of points that share one floor and one slope."""

    SERIES = "series"
    GPU = "gpu"


class Sparsity(StrEnum):
    """Dependence of the slope on the sparsity s."""

    OWN = "own"
    """``k**p = k0 + k1 * s``, with k0 and k1 of each group."""
    SHARED = "shared"
    """``k * s**g``, with one g for the family."""


class Form(StrEnum):
    """Candidate laws; those that share most between points come first."""

    POOLED = "pooled"
    POOLED_BY_SERIES = "pooled_by_series"
    AFFINE_TOKENS = "affine_tokens"
    AFFINE_EXAMPLES = "affine_examples"
    SMOOTH_MAXIMUM = "smooth_maximum"
    LOGARITHM = "logarithm"


@dataclass(frozen=True, slots=True)
class Shape:
    """Definition of a form that is linear in ``t**power``."""

    equation: str
    work: WorkUnit
    grouping: Grouping
    power: float
    sparsity: Sparsity


# The powers come from the paper's 96 points. They are not fitted to a family: a curve of ten points
# does not identify a power.
SHAPES = {
    Form.POOLED: Shape(
        "t^1.1 = t0^1.1 + (N k s^g)^1.1, t0 and k by GPU",
        WorkUnit.TOKENS,
        Grouping.GPU,
        1.1,
        Sparsity.SHARED,
    ),
    Form.POOLED_BY_SERIES: Shape(
        "t^1.1 = t0^1.1 + (N k s^g)^1.1, t0 and k by series",
        WorkUnit.TOKENS,
        Grouping.SERIES,
        1.1,
        Sparsity.SHARED,
    ),
    Form.AFFINE_TOKENS: Shape(
        "t = t0 + N (k0 + k1 s) by GPU", WorkUnit.TOKENS, Grouping.GPU, 1.0, Sparsity.OWN
    ),
    Form.AFFINE_EXAMPLES: Shape(
        "t = t0 + b (k0 + k1 s) by series", WorkUnit.EXAMPLES, Grouping.SERIES, 1.0, Sparsity.OWN
    ),
    Form.SMOOTH_MAXIMUM: Shape(
        "t^1.5 = t0^1.5 + b^1.5 (k0 + k1 s) by series",
        WorkUnit.EXAMPLES,
        Grouping.SERIES,
        1.5,
        Sparsity.OWN,
    ),
}
EQUATIONS = {form: shape.equation for form, shape in SHAPES.items()} | {
    Form.LOGARITHM: "b / t = c4 + c2/c3 ln(b) / s by series (arXiv 2408.04693, Eq. 2)"
}


@dataclass(frozen=True, slots=True)
class FittedValues:
    """Values of a form fitted to the rows of a family.

    Attributes:
        names: (groups,) sorted names of the groups, GPUs or series.
        values: (groups, terms) factors of the form's terms, none below zero; nan for a group with
            too few points.
        exponent: exponent of the sparsity; None where it is not shared or was never varied.
    """

    form: Form
    names: NameArray
    values: FloatArray
    exponent: float | None

    def seconds(self, rows: StepTimes) -> FloatArray:
        """(rows,) step times by the law; nan where it has no prediction."""
        groups = group_of(self.form, rows)
        at = np.minimum(np.searchsorted(self.names, groups), len(self.names) - 1)
        is_fitted = self.names[at] == groups
        values = np.where(is_fitted[:, None], self.values[at], np.nan)
        return form_seconds(self.form, values, self.exponent, rows)


@dataclass(frozen=True, slots=True)
class FittedForm(FittedValues):
    """Fitted values of a form with their errors and the diagnostics of each row.

    Attributes:
        standard_errors: (groups, terms) standard errors of the values; nan for a value held at 0.
        exponent_error: standard error of the exponent; None also where it is held at a bound.
        spread: robust standard deviation of the residuals, a relative error.
        residuals: (rows,) ``log(fitted / seconds)``; nan where the form has no prediction.
        leverages: (rows,) diagonal of the hat matrix, 0 to 1.
        weights: (rows,) robust weights: 1 at the law, less far from it.
        condition: largest condition number of a group's terms, each term scaled to length 1.
    """

    standard_errors: FloatArray
    exponent_error: float | None
    spread: float
    residuals: FloatArray
    leverages: FloatArray
    weights: FloatArray
    parameters: int
    condition: float

    @property
    def left_out_residuals(self) -> FloatArray:
        """(rows,) residual of each point by a fit without it: ``r / (1 - h)`` (Allen, 1974).

        Exact for linear least squares. First order here, because the robust weights of the other
        points are held fixed. It is nan where no other point determines the law at this one.
        """
        freedom = 1 - self.leverages
        is_determined = freedom > LEAST_FREEDOM
        return np.where(is_determined, self.residuals / np.maximum(freedom, LEAST_FREEDOM), np.nan)

    @property
    def suspects(self) -> BoolArray:
        """(rows,) mask of the points too far from the law fitted without them."""
        return np.asarray(np.abs(self.left_out_residuals) > SUSPECT_SPREADS * self.spread)


def form_seconds(
    form: Form, values: FloatArray, exponent: float | None, rows: StepTimes
) -> FloatArray:
    """(rows,) step times by a form.

    Args:
        form: form of the law.
        values: (rows, terms) factors of the form's terms; nan where there is no prediction.
        exponent: fitted exponent of the sparsity.
        rows: steps to predict; their seconds are not read.
    """
    if form is Form.LOGARITHM:
        rate = (eq2_terms(rows.batch_size, rows.sparsity) * values).sum(axis=1)
        return np.asarray(rows.batch_size / np.where(rate > 0, rate, np.nan))
    shape = SHAPES[form]
    work = rows.batch_size if shape.work is WorkUnit.EXAMPLES else rows.tokens
    columns = form_terms(shape, work**shape.power, np.log(rows.sparsity), exponent or 0.0)
    return np.asarray((columns * values).sum(axis=1) ** (1 / shape.power))


def group_of(form: Form, rows: StepTimes) -> NameArray:
    """(rows,) name of the group, GPU or series, whose floor and slope each row has."""
    if form is Form.LOGARITHM or SHAPES[form].grouping is Grouping.SERIES:
        return rows.series
    return rows.gpu


def form_terms(
    shape: Shape, powered: FloatArray, log_sparsity: FloatArray, exponent: FloatArray | float
) -> FloatArray:
    """(rows, terms) columns of the linear system, from (rows,) ``work**power``."""
    ones = np.ones(len(powered))
    if shape.sparsity is Sparsity.SHARED:
        columns = [ones, powered * np.exp(shape.power * exponent * log_sparsity)]
    else:
        columns = [ones, powered, powered * np.exp(log_sparsity)]
    return np.stack(columns).T  # columns stay contiguous: bincount reads one at a time
