"""Robust fit of a step-time law to the rows of a family, or to several parts of them at once.

All groups of all parts are fitted together, by numpy alone. ``scipy.optimize.least_squares`` with
the same loss ends at the same laws (``tests/test_laws_forms.py``) and takes 2.8 times as long for
40 families of a long log, 14 times for families of 20 to 100 series: a call for each of thousands
of held-out fits, with a dense Jacobian of all groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fitting.laws.equations import eq2_terms
from fitting.laws.forms import (
    SHAPES,
    FittedForm,
    FittedValues,
    Form,
    Shape,
    Sparsity,
    WorkUnit,
    form_terms,
    group_of,
)
from fitting.laws.normal_equations import (
    BorderedNormal,
    GroupSums,
    log_weights,
    median,
    non_negative,
    varied,
)
from fitting.numerics.arrays import BoolArray, FloatArray
from fitting.points.step_time_rows import StepTimes

# Step times of one batch size differ by as much: smaller errors are no sign of a bad point.
LEAST_SPREAD = 0.01
NORMAL_MAD = 1.4826  # sigma over the median absolute deviation, for a normal distribution
ITERATIONS = 60
SPREADS = 12  # last iteration that estimates the spread; then it is fixed, so that the rest settles
SETTLED = 1e-10  # relative change of the fitted times between two iterations
SETTLED_HELD_OUT = 1e-7  # the same, for laws judged by errors of some per cent
EXPONENTS = (0.0, 2.0)  # of the sparsity
FIRST_EXPONENT, MOST_STEP = 0.6, 0.3  # Gauss-Newton starts here and moves by no more than this


def fit_form(form: Form, rows: StepTimes) -> FittedForm | None:
    """Fit a form robustly; None where no group has enough points.

    Minimises the sum over rows of ``2 c**2 (sqrt(1 + (r / c)**2) - 1)`` ("soft L1"), r the
    logarithm of fitted over measured seconds and c their spread (``LEAST_SPREAD`` or more): a
    square near the law, a line far from it, so that a bad point counts little. A floor or slope is
    never below zero. A group needs two batch sizes, of different work, at one sparsity, and a point
    more than it has parameters of its own.
    """
    fit = RobustFormFit(form, rows, [np.ones(len(rows), bool)])
    return fit.fitted_form() if fit.is_identified.any() else None


def fit_values(
    form: Form, rows: StepTimes, parts: Sequence[BoolArray]
) -> list[FittedValues | None]:
    """Fit a form to each of several parts of the rows, without errors and leverages.

    Args:
        form: of the law.
        rows: of a family.
        parts: (rows,) masks.
    """
    fit = RobustFormFit(form, rows, parts)
    return fit.fitted_values() if fit.is_identified.any() else [None] * len(parts)


@dataclass(frozen=True, slots=True)
class _Minimum:
    """Fitted parameters of all parts; groups that are not identified have any values.

    Attributes:
        values: (groups, terms).
        exponents: (parts,) 0 where the form shares none.
        residuals: (rows,) ``log(fitted / seconds)``.
        weights: (rows,) robust ones.
        spreads: (parts,).
        terms: (rows, terms) columns that multiply the values.
    """

    values: FloatArray
    exponents: FloatArray
    residuals: FloatArray
    weights: FloatArray
    spreads: FloatArray
    terms: FloatArray


class RobustFormFit:
    """One form on parts of the rows of one family, each part with groups of its own.

    Attributes:
        is_identified: (groups,) which have enough points for the form.
    """

    def __init__(self, form: Form, rows: StepTimes, parts: Sequence[BoolArray]) -> None:
        self._form = form
        self._names, name_index = np.unique(group_of(form, rows), return_inverse=True)
        at = np.concatenate([np.flatnonzero(part) for part in parts])
        self._sizes = [int(part.sum()) for part in parts]
        self._part = np.repeat(np.arange(len(parts)), self._sizes)
        self._groups = name_index[at] + self._part * len(self._names)
        self._sums = GroupSums(self._groups, len(parts) * len(self._names))
        self._rows = rows.where(at)
        self._log_sparsity = np.log(self._rows.sparsity)
        shape = self._shape = SHAPES.get(form)
        self._power = 1.0 if shape is None else shape.power
        self._powered = (
            self._rows.tokens if _is_by_tokens(shape) else self._rows.batch_size
        ) ** self._power
        self._free, self.is_identified, several = _identifiable(shape, self._rows, self._sums)
        self._has_prediction = self.is_identified[self._groups]  # (rows,)
        by_part = (len(parts), len(self._names))
        is_shared = shape is not None and shape.sparsity is Sparsity.SHARED
        varies = (several & self.is_identified & is_shared).reshape(by_part)
        self._has_exponent: BoolArray = np.asarray(varies.any(axis=1))
        free = (self._free.sum(axis=1) * self.is_identified).reshape(by_part).sum(axis=1)
        self._parameters = free + self._has_exponent

    def fitted_values(self) -> list[FittedValues | None]:
        """The fit of each part, None where no group of it is identified."""
        minimum = self._minimum(SETTLED_HELD_OUT)
        by_part = self._known(minimum.values).reshape(len(self._sizes), len(self._names), -1)
        exponents = zip(minimum.exponents, self._has_exponent, strict=True)
        return [
            FittedValues(self._form, self._names, values, float(exponent) if has_exponent else None)
            if np.isfinite(values).any()
            else None
            for values, (exponent, has_exponent) in zip(by_part, exponents, strict=True)
        ]

    def fitted_form(self) -> FittedForm:
        """The fit of the only part, with its errors and leverages."""
        minimum = self._minimum(SETTLED)
        exponent = float(minimum.exponents[0]) if self._has_exponent[0] else None
        spread, use = float(minimum.spreads[0]), minimum.weights * self._has_prediction
        columns, gradient = minimum.terms, np.zeros(len(self._rows))
        if self._shape is not None:
            powered = self._rows.seconds**self._power
            columns, gradient = self._gradients(minimum.terms, minimum.values, powered)
        # Every free column takes freedom from the points; one whose value is at zero has no error.
        free = columns * self._sums.by_row(self._free)
        normal = BorderedNormal.of(self._sums, free, gradient, use)
        active = columns * self._sums.by_row(minimum.values > 0)
        inner = BorderedNormal.of(self._sums, active, gradient, use)
        errors, exponent_error = inner.standard_errors(use)
        inside = exponent is not None and EXPONENTS[0] < exponent < EXPONENTS[1]
        # Columns of length 1: the condition is that of the design, which normal equations square.
        condition = np.linalg.cond(normal.matrix[self.is_identified]).max(initial=1.0)
        fitted = FittedForm(
            form=self._form,
            names=self._names,
            values=self._known(minimum.values),
            standard_errors=self._power * spread * errors,
            exponent=exponent,
            exponent_error=self._power * spread * exponent_error if inside else None,
            spread=spread,
            residuals=np.where(self._has_prediction, minimum.residuals, np.nan),
            leverages=np.where(self._has_prediction, normal.leverages(self._sums, use), np.nan),
            weights=minimum.weights,
            parameters=int(self._parameters[0]),
            condition=float(np.sqrt(condition)),
        )
        if self._shape is not None:
            return fitted
        errors = _errors_of_rates(minimum.terms, self._rows, self._sums, self.is_identified)
        return replace(fitted, standard_errors=self._known(spread * errors))

    def _known(self, values: FloatArray) -> FloatArray:
        return np.where(self.is_identified[:, None], values, np.nan)

    def _minimum(self, settled: float) -> _Minimum:
        return self._rates() if self._shape is None else self._times(self._shape, settled)

    def _times(self, shape: Shape, settled: float) -> _Minimum:
        """Iteratively reweighted least squares (Holland and Welsch, 1977).

        Given the exponent a powered step time is linear in the values, so each turn solves for them
        exactly and takes a step of the exponent. The weight of a squared residual r under soft L1
        is ``1 / sqrt(1 + (r / c)**2)``.
        """
        target = self._rows.seconds**shape.power
        exponents = np.where(self._has_exponent, FIRST_EXPONENT, 0.0)
        robust = np.ones(len(target))
        fitted, log_residual = target, np.zeros(len(target))
        spreads = np.full(len(self._sizes), np.inf)
        terms = self._terms(shape, exponents)
        for turn in range(ITERATIONS):
            weights = robust * log_weights(fitted, target, log_residual)
            values = self._non_negative(terms, target, weights)
            fitted = (terms * self._sums.by_row(values)).sum(axis=1)
            fitted = np.where(self._has_prediction, np.maximum(fitted, 1e-300), target)
            before, log_residual = log_residual, np.log(fitted / target)
            residuals = log_residual / shape.power
            if turn <= SPREADS:  # bad points widen the first spread: estimate it again
                spreads = self._spreads(residuals)
            robust = 1 / np.sqrt(1 + (residuals / spreads[self._part]) ** 2)
            steps = np.zeros(1)
            if self._has_exponent.any():
                steps = self._exponent_steps(terms, values, fitted, log_residual, robust)
                exponents = np.clip(exponents + steps, *EXPONENTS)
                terms = self._terms(shape, exponents)
            moved = max(np.abs(log_residual - before).max(), np.abs(steps).max())
            if turn > SPREADS + 1 and moved < settled:
                break
        return _Minimum(values, exponents, residuals, robust, spreads, terms)

    def _rates(self) -> _Minimum:
        """Least squares of examples per second, as the paper did: no weights, no bounds."""
        terms = eq2_terms(self._rows.batch_size, self._rows.sparsity)
        rate = self._rows.batch_size / self._rows.seconds
        inner = self._sums.sums(terms * rate[:, None])[:, :, None]
        outer = _normal_of_rates(terms, self._sums, self.is_identified)
        values: FloatArray = np.asarray(np.linalg.solve(outer, inner)[:, :, 0], np.float64)
        fitted = (terms * self._sums.by_row(values)).sum(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            residuals = np.where(fitted > 0, np.log(rate / fitted), np.nan)
        spreads = self._spreads(np.nan_to_num(residuals, nan=1.0))
        exponents, weights = np.zeros(len(self._sizes)), np.ones(len(rate))
        return _Minimum(values, exponents, residuals, weights, spreads, terms)

    def _terms(self, shape: Shape, exponents: FloatArray) -> FloatArray:
        """(rows, terms) columns that multiply the values."""
        return form_terms(shape, self._powered, self._log_sparsity, exponents[self._part])

    def _spreads(self, residuals: FloatArray) -> FloatArray:
        """(parts,) from the median absolute residual, widened for the parameters fitted."""
        spreads = np.full(len(self._sizes), LEAST_SPREAD)
        ends = np.cumsum(self._sizes)[:-1]
        by_part = zip(
            np.split(np.abs(residuals), ends), np.split(self._has_prediction, ends), strict=True
        )
        for part, (sizes, has_prediction) in enumerate(by_part):
            own = sizes[has_prediction]
            if len(own):
                widened = np.sqrt(len(own) / max(len(own) - self._parameters[part], 1))
                spreads[part] = max(LEAST_SPREAD, NORMAL_MAD * median(own) * widened)
        return spreads

    def _non_negative(
        self, terms: FloatArray, target: FloatArray, weights: FloatArray
    ) -> FloatArray:
        """(groups, terms) best values, none below zero; zeros where not identified."""
        outer = self._sums.products(terms, weights)
        inner = self._sums.sums(terms * (target * weights)[:, None])
        values, left = np.zeros(inner.shape), self.is_identified
        values[left] = non_negative(outer[left], inner[left], self._free[left])
        return values

    def _gradients(
        self, terms: FloatArray, values: FloatArray, powered: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """(rows, terms) and (rows,) slopes of the log of a powered time: values, exponent."""
        gradient = np.zeros(len(powered))
        if self._has_exponent.any():
            grown = terms[:, 1] * values[:, 1][self._groups]
            gradient = grown * self._power * self._log_sparsity / powered
        return terms / powered[:, None], gradient

    def _exponent_steps(
        self,
        terms: FloatArray,
        values: FloatArray,
        fitted: FloatArray,
        log_residual: FloatArray,
        robust: FloatArray,
    ) -> FloatArray:
        """(parts,) Gauss-Newton steps of the exponent, floors and slopes following it.

        Variable projection (Golub and Pereyra, 1973): only the part of the exponent's gradient that
        no floor or slope can follow counts.
        """
        use = robust * self._has_prediction
        columns, gradient = self._gradients(terms, values, fitted)
        active = columns * self._sums.by_row(values > 0)
        remainder = BorderedNormal.of(self._sums, active, gradient, use).remainder
        slope = np.bincount(self._part, remainder * log_residual * use, len(self._sizes))
        curvature = np.bincount(self._part, remainder**2 * use, len(self._sizes))
        is_curved = self._has_exponent & (curvature > 1e-12)
        steps = np.where(is_curved, -slope / np.where(is_curved, curvature, 1.0), 0.0)
        return np.asarray(np.clip(steps, -MOST_STEP, MOST_STEP))


def _normal_of_rates(terms: FloatArray, sums: GroupSums, is_identified: BoolArray) -> FloatArray:
    """(groups, 2, 2) unweighted normal matrices."""
    outer = sums.products(terms, np.ones(len(terms)))
    outer[~is_identified] = np.eye(2)
    return outer


def _errors_of_rates(
    terms: FloatArray, rows: StepTimes, sums: GroupSums, is_identified: BoolArray
) -> FloatArray:
    """(groups, 2) for a relative spread of 1: rates count alike, yet errors grow with them.

    The sandwich estimator (White, 1980), variances taken as the squared rates.
    """
    inverse = np.linalg.inv(_normal_of_rates(terms, sums, is_identified))
    rate = rows.batch_size / rows.seconds
    shifts = np.einsum("rij,rj->ri", inverse[sums.groups], terms) * rate[:, None]
    return np.sqrt(sums.sums(shifts**2))


def _identifiable(
    shape: Shape | None, rows: StepTimes, sums: GroupSums
) -> tuple[BoolArray, BoolArray, BoolArray]:
    """(groups, terms) free parameters; (groups,) identified ones; those of several sparsities.

    By counting, not by the rank of a matrix: padded tokens are means of float, and rounding would
    make different work of 8 sequences of 64 tokens and 4 of 128.
    """
    several, sizes = varied(sums.groups, rows.sparsity, rows.batch_size, sums.count)
    if _is_by_tokens(shape):
        tokens = np.log(rows.tokens).round(6)
        sizes = np.minimum(sizes, varied(sums.groups, rows.sparsity, tokens, sums.count)[1])
    own = shape is not None and shape.sparsity is Sparsity.OWN
    free = np.ones((sums.count, 3 if own else 2), bool)
    if own:
        free[:, 2] = several  # at one sparsity k0 and k1 are one parameter: k0
    points = np.bincount(sums.groups, minlength=sums.count)
    return free, (sizes >= 2) & (points > free.sum(axis=1)), several


def _is_by_tokens(shape: Shape | None) -> bool:
    return shape is not None and shape.work is WorkUnit.TOKENS
