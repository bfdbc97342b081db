"""Laws of the step time of one family: what shares a model, a recipe, software and a basis.

Every law here is ``t**p = t0**p + (work * k(sparsity))**p``: a floor (launches, reading the
weights, the optimizer) and a cost that grows with the work of a step; ``p`` is 1 where one follows
the other and larger where they overlap. Given ``p`` and the exponent of the sparsity it is linear,
so there are no starting values, and floors and slopes of any number of GPUs are found at once.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from fitting.laws.equations import eq2_terms
from fitting.numerics.arrays import BoolArray, FloatArray, NameArray
from fitting.points.step_time_rows import StepTimes

ALONE = 0.02  # 1 - leverage below which no other point determines the fit at this one
SUSPECT = 5.0  # a point further than so many spreads from the law is a suspect


class WorkUnit(StrEnum):
    """What a step's work is counted in."""

    EXAMPLES = "examples"
    TOKENS = "tokens"


class Per(StrEnum):
    """What has a floor and a slope of its own."""

    SERIES = "series"
    GPU = "gpu"


class Sparsity(StrEnum):
    """How the slope depends on the sparsity s."""

    OWN = "own"
    """``k**p = k0 + k1 * s``, for each floor its own."""
    SHARED = "shared"
    """``k * s**g``, one g for the family."""


class Form(StrEnum):
    """The laws that are tried, simplest use of the points first."""

    POOLED = "pooled"
    POOLED_BY_SERIES = "pooled_by_series"
    AFFINE_TOKENS = "affine_tokens"
    AFFINE_EXAMPLES = "affine_examples"
    SMOOTH_MAXIMUM = "smooth_maximum"
    LOGARITHM = "logarithm"


@dataclass(frozen=True, slots=True)
class Shape:
    """What makes a form."""

    equation: str
    work: WorkUnit
    per: Per
    power: float
    sparsity: Sparsity


# The powers were chosen on the paper's 96 points before this was written. They are not fitted: a
# curve of ten points does not identify one.
SHAPES = {
    Form.POOLED: Shape(
        "t^1.1 = t0^1.1 + (N k s^g)^1.1, t0 and k by GPU",
        WorkUnit.TOKENS,
        Per.GPU,
        1.1,
        Sparsity.SHARED,
    ),
    Form.POOLED_BY_SERIES: Shape(
        "t^1.1 = t0^1.1 + (N k s^g)^1.1, t0 and k by series",
        WorkUnit.TOKENS,
        Per.SERIES,
        1.1,
        Sparsity.SHARED,
    ),
    Form.AFFINE_TOKENS: Shape(
        "t = t0 + N (k0 + k1 s) by GPU", WorkUnit.TOKENS, Per.GPU, 1.0, Sparsity.OWN
    ),
    Form.AFFINE_EXAMPLES: Shape(
        "t = t0 + b (k0 + k1 s) by series", WorkUnit.EXAMPLES, Per.SERIES, 1.0, Sparsity.OWN
    ),
    Form.SMOOTH_MAXIMUM: Shape(
        "t^1.5 = t0^1.5 + b^1.5 (k0 + k1 s) by series",
        WorkUnit.EXAMPLES,
        Per.SERIES,
        1.5,
        Sparsity.OWN,
    ),
}
EQUATIONS = {form: shape.equation for form, shape in SHAPES.items()} | {
    Form.LOGARITHM: "b / t = c4 + c2/c3 ln(b) / s by series (arXiv 2408.04693, Eq. 2)"
}


@dataclass(frozen=True, slots=True)
class FittedValues:
    """The values of a form, fitted to the rows of a family.

    Attributes:
        form: which.
        names: (groups,) what has a floor and slope of its own; in the order of ``values``.
        values: (groups, terms): what multiplies the terms of the form, none below zero; nan for a
            group that has too few points for it.
        exponent: of the sparsity; absent where it is not shared, or was never varied.
    """

    form: Form
    names: NameArray
    values: FloatArray
    exponent: float | None

    def seconds(self, rows: StepTimes) -> FloatArray:
        """(rows,) step times by the law; nan for what it does not speak of."""
        groups = group_of(self.form, rows)
        at = np.searchsorted(self.names, groups)
        at = np.minimum(at, len(self.names) - 1)
        known = self.names[at] == groups
        values = np.where(known[:, None], self.values[at], np.nan)
        return form_seconds(self.form, values, self.exponent, rows)


@dataclass(frozen=True, slots=True)
class FittedForm(FittedValues):
    """A form fitted to the rows of a family, and how far it can be trusted.

    Attributes:
        standard_errors: (groups, terms) of the values; nan where one is held at zero.
        exponent_error: its standard error; absent where it is held at a bound, too.
        spread: of the residuals, by their median: a relative error.
        residuals: (rows,) ``log(fitted / seconds)``; nan where the form does not speak.
        leverages: (rows,) how far each point pulls the law to itself, 0 to 1.
        weights: (rows,) 1 for a point like the others, less for one that is far off.
        parameters: how many were free.
        condition: of the worst group's terms, each scaled to length 1.
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

        Exact for linear least squares, of first order here: the robust weights of the others are
        taken to stay as they are. nan where no other point determines what this one does; a group
        left with as many points as parameters still counts.
        """
        free = 1 - self.leverages
        return np.where(free > ALONE, self.residuals / np.maximum(free, ALONE), np.nan)

    @property
    def suspects(self) -> BoolArray:
        """(rows,) which points are too far from the law fitted without them."""
        return np.asarray(np.abs(self.left_out_residuals) > SUSPECT * self.spread)


def form_seconds(
    form: Form, values: FloatArray, exponent: float | None, rows: StepTimes
) -> FloatArray:
    """(rows,) step times by a form.

    Args:
        form: which.
        values: (rows, terms) what multiplies its terms; nan where it does not speak.
        exponent: of the sparsity, as fitted.
        rows: what is asked; their seconds are not looked at.
    """
    if form is Form.LOGARITHM:
        rate = (eq2_terms(rows.batch_size, rows.sparsity) * values).sum(axis=1)
        return np.asarray(rows.batch_size / np.where(rate > 0, rate, np.nan))
    shape = SHAPES[form]
    work = rows.batch_size if shape.work is WorkUnit.EXAMPLES else rows.tokens
    columns = form_terms(shape, work**shape.power, np.log(rows.sparsity), exponent or 0.0)
    return np.asarray((columns * values).sum(axis=1) ** (1 / shape.power))


def group_of(form: Form, rows: StepTimes) -> NameArray:
    """(rows,) the name of the group whose floor and slope each row has."""
    if form is Form.LOGARITHM or SHAPES[form].per is Per.SERIES:
        return rows.series
    return rows.gpu


def form_terms(
    shape: Shape, powered: FloatArray, log_sparsity: FloatArray, exponent: FloatArray | float
) -> FloatArray:
    """(rows, terms): what multiplies the values, of the powered work of a step."""
    ones = np.ones(len(powered))
    if shape.sparsity is Sparsity.SHARED:
        columns = [ones, powered * np.exp(shape.power * exponent * log_sparsity)]
    else:
        columns = [ones, powered, powered * np.exp(log_sparsity)]
    return np.stack(columns).T  # each column in one piece
