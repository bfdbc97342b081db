"""Laws of the step time of one family: what shares a model, a recipe, software and a basis.

Every law here is ``t**p = t0**p + (work * k(sparsity))**p``: a floor (launches, reading the
weights, the optimizer) and a cost that grows with the work of a step; ``p`` is 1 where one follows
the other and larger where they overlap. Given ``p`` and the exponent of the sparsity it is linear,
so there are no starting values, and floors and slopes of any number of GPUs are found at once.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from fitting.laws import FloatArray, eq2_terms

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
NameArray = NDArray[np.str_]

# Errors of less than this are no sign of a bad point: step times of one batch size differ as much.
LEAST_SPREAD = 0.01
NORMAL_MAD = 1.4826  # the median absolute deviation of a normal distribution is sigma over this
ITERATIONS = 60
SQUARES = 4  # iterations of plain least squares, before points far off count less
SPREADS = 12  # iteration from which on the spread stays as it is, so that the rest settles
SETTLED = 1e-10  # of the fitted times, between two iterations
EXPONENTS = (0.0, 2.0)  # of the sparsity: no more than all experts' work for each of them
ALONE = 0.02  # what is left of a point's freedom where nothing else tells of what it tells
SUSPECT = 5.0  # spreads from the law, from where on a point is named


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Timed steps of one family, a row for each visit.

    Attributes:
        gpu: (rows,) which GPU, with the stack it ran on.
        series: (rows,) what is one curve but for the sparsity: a GPU at a length or a data set.
        batch_size: (rows,) queries per step.
        tokens: (rows,) padded tokens per step.
        sparsity: (rows,) active experts over experts; 1 without experts.
        seconds: (rows,) per step.
    """

    gpu: NameArray
    series: NameArray
    batch_size: FloatArray
    tokens: FloatArray
    sparsity: FloatArray
    seconds: FloatArray

    def __len__(self) -> int:
        return len(self.seconds)

    def where(self, rows: BoolArray | IntArray) -> "StepTimes":
        """Some of the rows."""
        return StepTimes(
            gpu=self.gpu[rows],
            series=self.series[rows],
            batch_size=self.batch_size[rows],
            tokens=self.tokens[rows],
            sparsity=self.sparsity[rows],
            seconds=self.seconds[rows],
        )


class Work(StrEnum):
    """What a step's work is counted in."""

    QUERIES = "queries"
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
    AFFINE_QUERIES = "affine_queries"
    SMOOTH_MAXIMUM = "smooth_maximum"
    LOGARITHM = "logarithm"


@dataclass(frozen=True, slots=True)
class Shape:
    """What makes a form."""

    equation: str
    work: Work
    per: Per
    power: float
    sparsity: Sparsity


# The powers are those that the paper's 96 points spoke for before this was written: they are not
# fitted, since no curve of ten points tells them.
SHAPES = {
    Form.POOLED: Shape(
        "t^1.1 = t0^1.1 + (N k s^g)^1.1, t0 and k by GPU",
        Work.TOKENS,
        Per.GPU,
        1.1,
        Sparsity.SHARED,
    ),
    Form.POOLED_BY_SERIES: Shape(
        "t^1.1 = t0^1.1 + (N k s^g)^1.1, t0 and k by series",
        Work.TOKENS,
        Per.SERIES,
        1.1,
        Sparsity.SHARED,
    ),
    Form.AFFINE_TOKENS: Shape(
        "t = t0 + N (k0 + k1 s) by GPU", Work.TOKENS, Per.GPU, 1.0, Sparsity.OWN
    ),
    Form.AFFINE_QUERIES: Shape(
        "t = t0 + b (k0 + k1 s) by series", Work.QUERIES, Per.SERIES, 1.0, Sparsity.OWN
    ),
    Form.SMOOTH_MAXIMUM: Shape(
        "t^1.5 = t0^1.5 + b^1.5 (k0 + k1 s) by series", Work.QUERIES, Per.SERIES, 1.5, Sparsity.OWN
    ),
}
EQUATIONS = {form: shape.equation for form, shape in SHAPES.items()} | {
    Form.LOGARITHM: "b / t = c4 + c2/c3 ln(b) / s by series (arXiv 2408.04693, Eq. 2)"
}


@dataclass(frozen=True, slots=True)
class FittedForm:
    """A form fitted to the rows of a family.

    Attributes:
        form: which.
        names: (groups,) what has a floor and slope of its own; in the order of ``values``.
        values: (groups, terms): what multiplies the terms of the form, none below zero; nan for a
            group that has too few points for it.
        standard_errors: (groups, terms) of the values; nan where one is held at zero.
        exponent: of the sparsity; absent where it is not shared, or was never varied.
        exponent_error: its standard error; absent where it is held at a bound, too.
        spread: of the residuals, by their median: a relative error.
        residuals: (rows,) ``log(fitted / seconds)``; nan where the form does not speak.
        leverages: (rows,) how far each point pulls the law to itself, 0 to 1.
        weights: (rows,) 1 for a point like the others, less for one that is far off.
        parameters: how many were free.
        condition: of the worst group's terms, each scaled to length 1.
    """

    form: Form
    names: NameArray
    values: FloatArray
    standard_errors: FloatArray
    exponent: float | None
    exponent_error: float | None
    spread: float
    residuals: FloatArray
    leverages: FloatArray
    weights: FloatArray
    parameters: int
    condition: float

    def seconds(self, rows: StepTimes) -> FloatArray:
        """(rows,) step times by the law; nan for what it does not speak of."""
        groups = group_of(self.form, rows)
        at = np.searchsorted(self.names, groups)
        at = np.minimum(at, len(self.names) - 1)
        known = self.names[at] == groups
        values = np.where(known[:, None], self.values[at], np.nan)
        return form_seconds(self.form, values, self.exponent, rows)

    @property
    def left_out_residuals(self) -> FloatArray:
        """(rows,) what each residual would be without its point: ``r / (1 - h)``, to first order.

        The weights of the others are taken to stay as they are. nan where no other point tells what
        this one does; a group that is left as many points as parameters is asked all the same.
        """
        free = 1 - self.leverages
        return np.where(free > ALONE, self.residuals / np.maximum(free, ALONE), np.nan)

    @property
    def suspects(self) -> BoolArray:
        """(rows,) which points the law does not believe."""
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
    powered = (_terms(shape, rows, exponent) * values).sum(axis=1)
    return np.asarray(powered ** (1 / shape.power))


def group_of(form: Form, rows: StepTimes) -> NameArray:
    """(rows,) the name of the group whose floor and slope each row has."""
    if form is Form.LOGARITHM or SHAPES[form].per is Per.SERIES:
        return rows.series
    return rows.gpu


def fit_form(form: Form, rows: StepTimes) -> FittedForm | None:
    """A form fitted to what can carry it, robustly; None where no group can.

    Minimises the sum over rows of ``2 c**2 (sqrt(1 + (r / c)**2) - 1)``, r the logarithm of fitted
    over measured seconds and c their spread (``LEAST_SPREAD`` or more): a square near the law, a
    line far from it, so that a bad point counts little. A floor or slope is never below zero. A
    group needs two batch sizes, of different work, at one sparsity, and a point more than it has
    parameters of its own.
    """
    names, groups = np.unique(group_of(form, rows), return_inverse=True)
    problem = _Problem(form, rows, names, np.asarray(groups, np.int64))
    if not problem.carried.any():
        return None
    return problem.solved()


def _terms(shape: Shape, rows: StepTimes, exponent: float | None) -> FloatArray:
    """(rows, terms): what multiplies the values."""
    work = rows.batch_size if shape.work is Work.QUERIES else rows.tokens
    ones = np.ones(len(rows))
    if shape.sparsity is Sparsity.SHARED:
        slope = (work * rows.sparsity ** (exponent or 0.0)) ** shape.power
        return np.stack([ones, slope], axis=1)
    powered = work**shape.power
    return np.stack([ones, powered, powered * rows.sparsity], axis=1)


class _Problem:
    """One form on the rows of one family."""

    def __init__(self, form: Form, rows: StepTimes, names: NameArray, groups: IntArray) -> None:
        self._form = form
        self._rows = rows
        self._names = names
        self._groups = groups
        self._count = len(names)
        self._shape = SHAPES.get(form)
        several, sizes = _varied(groups, rows.sparsity, rows.batch_size, self._count)
        if self._shape is not None and self._shape.work is Work.TOKENS:  # 8 of 64 are 4 of 128
            _, works = _varied(groups, rows.sparsity, np.log(rows.tokens).round(6), self._count)
            sizes = np.minimum(sizes, works)
        own = self._shape is not None and self._shape.sparsity is Sparsity.OWN
        # At one sparsity k0 and k1 are one parameter: k0.
        self._free = np.ones((self._count, 3 if own else 2), bool)
        if own:
            self._free[:, 2] = several
        points = np.bincount(groups, minlength=self._count)
        self.carried: BoolArray = (sizes >= 2) & (points > self._free.sum(axis=1))
        is_shared = self._shape is not None and self._shape.sparsity is Sparsity.SHARED
        self._has_exponent = is_shared and bool((several & self.carried).any())
        self._parameters = int(self._free[self.carried].sum()) + self._has_exponent

    def solved(self) -> FittedForm:
        """The fit."""
        if self._shape is None:
            return self._logarithm()
        power = self._shape.power
        target = self._rows.seconds**power
        exponent = 0.6 if self._has_exponent else None
        robust = np.ones(len(self._rows))
        fitted = target
        spread = np.inf
        values = np.zeros(self._free.shape)
        for turn in range(ITERATIONS):
            terms = _terms(self._shape, self._rows, exponent)
            curvature = robust * _log_weights(fitted, target)
            values = self._non_negative(terms, target, curvature)
            before, fitted = fitted, np.maximum((terms * values[self._groups]).sum(axis=1), 1e-300)
            residuals = np.log(fitted / target) / power
            if SQUARES <= turn <= SPREADS:  # bad points widen the first spread: it is told anew
                spread = self._spread(residuals)
            if turn >= SQUARES:
                robust = 1 / np.sqrt(1 + (residuals / spread) ** 2)
            step = 0.0
            if exponent is not None:
                step = self._exponent_step(terms, values, fitted, residuals, robust)
                exponent = float(np.clip(exponent + step, *EXPONENTS))
            moved = np.abs(np.log(fitted / before)[self._is_carried]).max(initial=0.0)
            if turn > SPREADS + 1 and moved < SETTLED and abs(step) < SETTLED:
                break
        return self._told(values, exponent, residuals, robust, spread)

    @property
    def _is_carried(self) -> BoolArray:
        return np.asarray(self.carried[self._groups])

    def _spread(self, residuals: FloatArray) -> float:
        """By the median, as if of points that no parameter had followed."""
        own = np.abs(residuals[self._is_carried])
        followed = np.sqrt(len(own) / max(len(own) - self._parameters, 1))
        return max(LEAST_SPREAD, NORMAL_MAD * float(np.median(own) * followed))

    def _summed(self, columns: FloatArray) -> FloatArray:
        """(groups, …) sums over the rows of each group."""
        summed = np.zeros((self._count, *columns.shape[1:]))
        np.add.at(summed, self._groups, columns)
        return summed

    def _non_negative(
        self, terms: FloatArray, target: FloatArray, weight: FloatArray
    ) -> FloatArray:
        """(groups, terms) the best values of none below zero, by trying each set of free ones."""
        outer = self._summed(terms[:, :, None] * terms[:, None, :] * weight[:, None, None])
        inner = self._summed(terms * (target * weight)[:, None])
        count = terms.shape[1]
        best = np.zeros((self._count, count))
        least = np.full(self._count, np.inf)
        settled = np.zeros(self._count, bool)
        for subset in range(2**count - 1, 0, -1):
            free = np.array([bool(subset >> place & 1) for place in range(count)])
            allowed = ~(free & ~self._free).any(axis=1)
            matrix = np.where(free[:, None] & free[None, :], outer, np.eye(count))
            scale = np.sqrt(np.einsum("gii->gi", matrix))
            scaled = matrix / scale[:, :, None] / scale[:, None, :]
            scaled += 1e-13 * np.eye(
                count
            )  # a group of one batch size is not carried, and no error
            values = np.linalg.solve(scaled, (np.where(free, inner, 0.0) / scale)[:, :, None])
            values = values[:, :, 0] / scale
            cost = -np.einsum("gi,gi->g", values, np.where(free, inner, 0.0))
            better = allowed & (values >= 0).all(axis=1) & (cost < least)
            best[better], least[better] = values[better], cost[better]
            settled |= better & (self._free == free).all(axis=1)
            if settled.all():  # all free ones together are above zero: nothing is better
                break
        return best

    def _exponent_step(
        self,
        terms: FloatArray,
        values: FloatArray,
        fitted: FloatArray,
        residuals: FloatArray,
        robust: FloatArray,
    ) -> float:
        """Gauss-Newton's step of the exponent, floors and slopes following it."""
        assert self._shape is not None
        active = values > 0
        local = np.where(active[self._groups], terms / fitted[:, None], 0.0) / self._shape.power
        slope = terms[:, 1] * values[self._groups, 1]
        shared = slope * np.log(self._rows.sparsity) / fitted  # of log(fitted) / power
        use = robust * self._is_carried
        matrix = self._summed(local[:, :, None] * local[:, None, :] * use[:, None, None])
        matrix += np.where(active, 0.0, 1.0)[:, :, None] * np.eye(2)
        border = self._summed(local * (shared * use)[:, None])
        gradient = self._summed(local * (residuals * use)[:, None])
        followed = np.linalg.solve(
            matrix + 1e-300 * np.eye(2), np.stack([border, gradient], axis=2)
        )
        curvature = float((shared**2 * use).sum() - (border * followed[:, :, 0]).sum())
        pull = float((shared * residuals * use).sum() - (border * followed[:, :, 1]).sum())
        return float(np.clip(-pull / curvature, -0.3, 0.3)) if curvature > 1e-12 else 0.0

    def _logarithm(self) -> FittedForm:
        """On queries per second as they are, as the paper did: no weights, no bounds."""
        terms = eq2_terms(self._rows.batch_size, self._rows.sparsity)
        rate = self._rows.batch_size / self._rows.seconds
        outer = self._summed(terms[:, :, None] * terms[:, None, :])
        inner = self._summed(terms * rate[:, None])
        singular = ~self.carried
        outer[singular] = np.eye(2)
        values: FloatArray = np.array(
            np.linalg.solve(outer, inner[:, :, None])[:, :, 0], np.float64
        )
        fitted = (terms * values[self._groups]).sum(axis=1)
        ratio = np.where(fitted > 0, rate / np.where(fitted > 0, fitted, 1.0), np.nan)
        residuals: FloatArray = np.array(np.log(ratio), np.float64)
        spread = self._spread(np.nan_to_num(residuals, nan=1.0))
        told = self._told(values, None, residuals, np.ones(len(self._rows)), spread, terms)
        # Errors grow with the rate, and yet all count alike: what follows from both is this.
        inverse = np.linalg.inv(outer)
        pulls = np.einsum("rij,rj->ri", inverse[self._groups], terms) * rate[:, None]
        errors = spread * np.sqrt(self._summed(pulls**2))
        return replace(told, standard_errors=np.where(self.carried[:, None], errors, np.nan))

    def _told(  # noqa: PLR0913, PLR0917 - what a fit is made from
        self,
        values: FloatArray,
        exponent: float | None,
        residuals: FloatArray,
        weights: FloatArray,
        spread: float,
        columns: FloatArray | None = None,
    ) -> FittedForm:
        if columns is None:
            assert self._shape is not None
            columns = _terms(self._shape, self._rows, exponent)
            columns = columns / self._rows.seconds[:, None] ** self._shape.power
        pull = self._pull(values, exponent)
        free = np.where(self._free[self._groups], columns, 0.0)
        leverages, condition = self._leverages(free, pull, weights)
        above = np.where((values > 0)[self._groups], columns, 0.0)
        errors, exponent_error = self._standard_errors(above, pull, weights)
        power = 1.0 if self._shape is None else self._shape.power
        inside = exponent is not None and EXPONENTS[0] < exponent < EXPONENTS[1]
        silent = ~self._is_carried
        return FittedForm(
            form=self._form,
            names=self._names,
            values=np.where(self.carried[:, None], values, np.nan),
            standard_errors=power * spread * errors,
            exponent=exponent,
            exponent_error=power * spread * exponent_error if inside else None,
            spread=spread,
            residuals=np.where(silent, np.nan, residuals),
            leverages=np.where(silent, np.nan, leverages),
            weights=weights,
            parameters=self._parameters,
            condition=condition,
        )

    def _pull(self, values: FloatArray, exponent: float | None) -> FloatArray:
        """(rows,) how the logarithm of a powered step time follows the exponent."""
        if self._shape is None or exponent is None:
            return np.zeros(len(self._rows))
        slope = _terms(self._shape, self._rows, exponent)[:, 1] * values[self._groups, 1]
        powered = self._rows.seconds**self._shape.power
        return np.asarray(slope * self._shape.power * np.log(self._rows.sparsity) / powered)

    def _leverages(
        self, local: FloatArray, pull: FloatArray, weights: FloatArray
    ) -> tuple[FloatArray, float]:
        """(rows,) the diagonal of the hat matrix; the condition of the worst group's own terms."""
        use = weights * self._is_carried
        scaled, _, matrix = self._normal(local, use)
        inverse: FloatArray = np.asarray(np.linalg.pinv(matrix), np.float64)
        hat = np.einsum("ri,rij,rj->r", scaled, inverse[self._groups], scaled)
        alone, _ = self._alone(scaled, inverse, pull, use)
        left = float((alone**2 * use).sum())
        hat = use * (hat + (alone**2 / left if left > 0 else 0.0))
        condition = float(np.sqrt(np.linalg.cond(matrix[self.carried]).max(initial=1.0)))
        return np.clip(hat, 0.0, 1.0), condition

    def _standard_errors(
        self, local: FloatArray, pull: FloatArray, weights: FloatArray
    ) -> tuple[FloatArray, float]:
        """(groups, terms) and of the exponent, for residuals with a spread of 1.

        Roots of the diagonal of the inverse of the robust normal matrix, ``[[A, b], [b', c]]`` with
        A of each group's own values, c of the exponent and b between them; nan for a value without
        a column.
        """
        use = weights * self._is_carried
        scaled, lengths, matrix = self._normal(local, use)
        inverse: FloatArray = np.asarray(np.linalg.pinv(matrix), np.float64)
        alone, followed = self._alone(scaled, inverse, pull, use)
        left = float((alone**2 * use).sum())
        own = np.einsum("gii->gi", inverse) + (followed**2 / left if left > 0 else 0.0)
        errors = np.where(lengths > 0, np.sqrt(own) / np.where(lengths > 0, lengths, 1.0), np.nan)
        return errors, float(1 / np.sqrt(left)) if left > 0 else np.nan

    def _normal(
        self, local: FloatArray, use: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Columns scaled to length 1 in each group, their lengths, and their normal matrices."""
        lengths = np.sqrt(self._summed(local**2 * use[:, None]))
        scaled = local / np.where(lengths > 0, lengths, 1.0)[self._groups]
        matrix = self._summed(scaled[:, :, None] * scaled[:, None, :] * use[:, None, None])
        matrix += np.where(lengths > 0, 0.0, 1.0)[:, :, None] * np.eye(local.shape[1])
        return scaled, lengths, matrix

    def _alone(
        self, scaled: FloatArray, inverse: FloatArray, pull: FloatArray, use: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """(rows,) what of the exponent's pull is not its group's; (groups, terms) what is."""
        border = self._summed(scaled * (pull * use)[:, None])
        followed = np.einsum("gij,gj->gi", inverse, border)
        return pull - np.einsum("ri,ri->r", scaled, followed[self._groups]), followed


def _varied(
    groups: IntArray, sparsity: FloatArray, size: FloatArray, count: int
) -> tuple[BoolArray, IntArray]:
    """(groups,) whether each has several sparsities; the most sizes it has at one."""
    points = np.unique(np.stack([groups, sparsity, size], axis=1), axis=0)
    curves, sizes = np.unique(points[:, :2], axis=0, return_counts=True)
    of = curves[:, 0].astype(np.int64)
    most = np.zeros(count, np.int64)
    np.maximum.at(most, of, sizes)
    return np.bincount(of, minlength=count) > 1, most


def _log_weights(fitted: FloatArray, target: FloatArray) -> FloatArray:
    """What makes the squares of ``fitted - target`` pull as those of their logarithms' difference.

    ``log(f / y) / (f (f - y))``, which is ``1 / f**2`` where they meet.
    """
    apart = fitted / target - 1
    near = np.abs(apart) < 1e-6
    ratio = np.where(near, 1 - apart / 2, np.log(fitted / target) / np.where(near, 1.0, apart))
    return np.asarray(ratio / (fitted * target))
