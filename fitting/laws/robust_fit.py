"""Robust fit of a step-time law to the rows of a family, or to several parts of them at once.

One vectorised solver fits all groups of all parts together. ``scipy.optimize.least_squares`` with
the same loss reaches the same laws (``tests/test_laws_forms.py``) but takes 2.8 times as long for
the 40 families of a long log and 14 times as long for families of 20 to 100 series: it needs a call
for each of thousands of held-out fits, with a dense Jacobian of all groups.
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

# Repeated measurements of one batch size differ by this much: a smaller error marks no bad point.
LEAST_SPREAD = 0.01
NORMAL_MAD = 1.4826  # sigma over the median absolute deviation, for a normal distribution
MOST_ITERATIONS = 60
# The spread is estimated up to this iteration and then held fixed: otherwise the weights and the
# spread can chase each other without converging.
LAST_SPREAD_ITERATION = 12
TOLERANCE = 1e-10  # relative change of the fitted times between two iterations
HELD_OUT_TOLERANCE = 1e-7  # the same, for laws that are judged by errors of some per cent
EXPONENT_BOUNDS = (0.0, 2.0)  # bounds of the exponent of the sparsity
FIRST_EXPONENT, LARGEST_STEP = 0.6, 0.3  # start of Gauss-Newton and bound of its step


def fit_form(form: Form, rows: StepTimes) -> FittedForm | None:
    """Fit a form robustly; None where no group has enough points.

    Minimises the sum over rows of ``2 c**2 (sqrt(1 + (r / c)**2) - 1)`` ("soft L1"), with r the
    logarithm of fitted over measured seconds and c their spread, at least ``LEAST_SPREAD``. The
    loss is quadratic near the law and linear far from it, so that a bad point counts little. Floors
    and slopes are not negative. A group is identified by two batch sizes of different work at one
    sparsity and by more points than it has parameters of its own.
    """
    fit = RobustFormFit(form, rows, [np.ones(len(rows), bool)])
    return fit.fitted_form() if fit.is_identified.any() else None


def fit_values(
    form: Form, rows: StepTimes, parts: Sequence[BoolArray]
) -> list[FittedValues | None]:
    """Fit a form to each of several parts of the rows, without errors and leverages.

    Args:
        form: form of the law.
        rows: points of a family.
        parts: (rows,) mask of each part.
    """
    fit = RobustFormFit(form, rows, parts)
    return fit.fitted_values() if fit.is_identified.any() else [None] * len(parts)


@dataclass(frozen=True, slots=True)
class _RobustMinimum:
    """Fitted parameters of all parts; those of groups that are not identified are arbitrary.

    Attributes:
        values: (groups, terms) factors of the terms.
        exponents: (parts,) exponents of the sparsity; 0 where the form shares none.
        residuals: (rows,) ``log(fitted / seconds)``.
        weights: (rows,) robust weights.
        spreads: (parts,) robust standard deviations of the residuals.
        terms: (rows, terms) columns of the linear system.
    """

    values: FloatArray
    exponents: FloatArray
    residuals: FloatArray
    weights: FloatArray
    spreads: FloatArray
    terms: FloatArray


class RobustFormFit:
    """Fit of one form to parts of the rows of one family, each part with groups of its own.

    Attributes:
        is_identified: (groups,) mask of the groups with enough points for the form.
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
        self._free, self.is_identified, is_sparsity_varied = _identifiable(
            shape, self._rows, self._sums
        )
        self._has_prediction = self.is_identified[self._groups]  # (rows,)
        by_part = (len(parts), len(self._names))
        is_shared = shape is not None and shape.sparsity is Sparsity.SHARED
        varied_groups = (is_sparsity_varied & self.is_identified & is_shared).reshape(by_part)
        self._has_exponent: BoolArray = np.asarray(varied_groups.any(axis=1))
        free = (self._free.sum(axis=1) * self.is_identified).reshape(by_part).sum(axis=1)
        self._parameters = free + self._has_exponent

    def fitted_values(self) -> list[FittedValues | None]:
        """Fit of each part; None where no group of it is identified."""
        minimum = self._minimum(HELD_OUT_TOLERANCE)
        by_part = self._identified(minimum.values).reshape(len(self._sizes), len(self._names), -1)
        exponents = zip(minimum.exponents, self._has_exponent, strict=True)
        return [
            FittedValues(self._form, self._names, values, float(exponent) if has_exponent else None)
            if np.isfinite(values).any()
            else None
            for values, (exponent, has_exponent) in zip(by_part, exponents, strict=True)
        ]

    def fitted_form(self) -> FittedForm:
        """Fit of the only part, with its errors and leverages."""
        minimum = self._minimum(TOLERANCE)
        exponent = float(minimum.exponents[0]) if self._has_exponent[0] else None
        spread, use = float(minimum.spreads[0]), minimum.weights * self._has_prediction
        columns, gradient = minimum.terms, np.zeros(len(self._rows))
        if self._shape is not None:
            powered = self._rows.seconds**self._power
            columns, gradient = self._gradients(minimum.terms, minimum.values, powered)
        # Leverages count every free column. Errors are conditional on the values held at zero, so
        # those columns leave the matrix that is inverted for them.
        free = columns * self._sums.by_row(self._free)
        normal = BorderedNormal.of(self._sums, free, gradient, use)
        active = columns * self._sums.by_row(minimum.values > 0)
        inner = BorderedNormal.of(self._sums, active, gradient, use)
        errors, exponent_error = inner.standard_errors(use)
        is_inside = exponent is not None and EXPONENT_BOUNDS[0] < exponent < EXPONENT_BOUNDS[1]
        # Normal equations square the condition number of the design: the root is the design's.
        condition = np.linalg.cond(normal.matrix[self.is_identified]).max(initial=1.0)
        fitted = FittedForm(
            form=self._form,
            names=self._names,
            values=self._identified(minimum.values),
            standard_errors=self._power * spread * errors,
            exponent=exponent,
            exponent_error=self._power * spread * exponent_error if is_inside else None,
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
        return replace(fitted, standard_errors=self._identified(spread * errors))

    def _identified(self, values: FloatArray) -> FloatArray:
        """(groups, terms) values, nan for groups that are not identified."""
        return np.where(self.is_identified[:, None], values, np.nan)

    def _minimum(self, tolerance: float) -> _RobustMinimum:
        if self._shape is None:
            return self._fitted_rates()
        return self._fitted_times(self._shape, tolerance)

    def _fitted_times(self, shape: Shape, tolerance: float) -> _RobustMinimum:
        """Iteratively reweighted least squares (Holland and Welsch, 1977).

        Given the exponent, a powered step time is linear in the values: each iteration solves for
        the values exactly and then takes one step of the exponent. The weight of a squared residual
        r under soft L1 is ``1 / sqrt(1 + (r / c)**2)``.
        """
        target = self._rows.seconds**shape.power
        exponents = np.where(self._has_exponent, FIRST_EXPONENT, 0.0)
        robust = np.ones(len(target))
        fitted, log_residual = target, np.zeros(len(target))
        spreads = np.full(len(self._sizes), np.inf)
        terms = self._terms(shape, exponents)
        for iteration in range(MOST_ITERATIONS):
            weights = robust * log_weights(fitted, target, log_residual)
            values = self._non_negative(terms, target, weights)
            fitted = (terms * self._sums.by_row(values)).sum(axis=1)
            fitted = np.where(self._has_prediction, np.maximum(fitted, 1e-300), target)
            last_residual, log_residual = log_residual, np.log(fitted / target)
            residuals = log_residual / shape.power
            if iteration <= LAST_SPREAD_ITERATION:  # bad points widen the first estimates
                spreads = self._spreads(residuals)
            robust = 1 / np.sqrt(1 + (residuals / spreads[self._part]) ** 2)
            steps = np.zeros(1)
            if self._has_exponent.any():
                steps = self._exponent_steps(terms, values, fitted, log_residual, robust)
                exponents = np.clip(exponents + steps, *EXPONENT_BOUNDS)
                terms = self._terms(shape, exponents)
            change = max(np.abs(log_residual - last_residual).max(), np.abs(steps).max())
            if iteration > LAST_SPREAD_ITERATION + 1 and change < tolerance:
                break
        return _RobustMinimum(values, exponents, residuals, robust, spreads, terms)

    def _fitted_rates(self) -> _RobustMinimum:
        """Least squares of examples per second without weights and bounds, as in the paper."""
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
        return _RobustMinimum(values, exponents, residuals, weights, spreads, terms)

    def _terms(self, shape: Shape, exponents: FloatArray) -> FloatArray:
        """(rows, terms) columns of the linear system."""
        return form_terms(shape, self._powered, self._log_sparsity, exponents[self._part])

    def _spreads(self, residuals: FloatArray) -> FloatArray:
        """(parts,) scaled median absolute residual, widened for the fitted parameters."""
        spreads = np.full(len(self._sizes), LEAST_SPREAD)
        ends = np.cumsum(self._sizes)[:-1]
        by_part = zip(
            np.split(np.abs(residuals), ends), np.split(self._has_prediction, ends), strict=True
        )
        for part, (magnitudes, has_prediction) in enumerate(by_part):
            own = magnitudes[has_prediction]
            if len(own):
                widening = np.sqrt(len(own) / max(len(own) - self._parameters[part], 1))
                spreads[part] = max(LEAST_SPREAD, NORMAL_MAD * median(own) * widening)
        return spreads

    def _non_negative(
        self, terms: FloatArray, target: FloatArray, weights: FloatArray
    ) -> FloatArray:
        """(groups, terms) least-squares values, none below zero; zeros where not identified."""
        outer = self._sums.products(terms, weights)
        inner = self._sums.sums(terms * (target * weights)[:, None])
        values, groups = np.zeros(inner.shape), self.is_identified
        values[groups] = non_negative(outer[groups], inner[groups], self._free[groups])
        return values

    def _gradients(
        self, terms: FloatArray, values: FloatArray, powered: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Slopes of the log of a powered time, (rows, terms) by value and (rows,) by exponent."""
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
        """(parts,) Gauss-Newton steps of the exponent, with floors and slopes projected out.

        Variable projection (Golub and Pereyra, 1973): the step uses the part of the exponent's
        gradient that is orthogonal to the gradients of the floors and slopes.
        """
        use = robust * self._has_prediction
        columns, gradient = self._gradients(terms, values, fitted)
        active = columns * self._sums.by_row(values > 0)
        remainder = BorderedNormal.of(self._sums, active, gradient, use).remainder
        slope = np.bincount(self._part, remainder * log_residual * use, len(self._sizes))
        curvature = np.bincount(self._part, remainder**2 * use, len(self._sizes))
        is_curved = self._has_exponent & (curvature > 1e-12)
        steps = np.where(is_curved, -slope / np.where(is_curved, curvature, 1.0), 0.0)
        return np.asarray(np.clip(steps, -LARGEST_STEP, LARGEST_STEP))


def _normal_of_rates(terms: FloatArray, sums: GroupSums, is_identified: BoolArray) -> FloatArray:
    """(groups, 2, 2) unweighted normal matrices; the identity where not identified."""
    outer = sums.products(terms, np.ones(len(terms)))
    outer[~is_identified] = np.eye(2)
    return outer


def _errors_of_rates(
    terms: FloatArray, rows: StepTimes, sums: GroupSums, is_identified: BoolArray
) -> FloatArray:
    """(groups, 2) standard errors for a relative spread of 1.

    The sandwich estimator (White, 1980): the fit weights all rates alike, yet their errors are
    proportional to the rates, so the squared rates stand for the variances.
    """
    inverse = np.linalg.inv(_normal_of_rates(terms, sums, is_identified))
    rate = rows.batch_size / rows.seconds
    shifts = np.einsum("rij,rj->ri", inverse[sums.groups], terms) * rate[:, None]
    return np.sqrt(sums.sums(shifts**2))


def _identifiable(
    shape: Shape | None, rows: StepTimes, sums: GroupSums
) -> tuple[BoolArray, BoolArray, BoolArray]:
    """(groups, terms) free parameters, (groups,) identified ones, (groups,) several sparsities.

    Counts values instead of taking the rank of a matrix: padded tokens are means of floats, and
    rounding would make 8 sequences of 64 tokens and 4 of 128 different work.
    """
    is_sparsity_varied, sizes = varied(sums.groups, rows.sparsity, rows.batch_size, sums.count)
    if _is_by_tokens(shape):
        tokens = np.log(rows.tokens).round(6)
        sizes = np.minimum(sizes, varied(sums.groups, rows.sparsity, tokens, sums.count)[1])
    own = shape is not None and shape.sparsity is Sparsity.OWN
    free = np.ones((sums.count, 3 if own else 2), bool)
    if own:
        free[:, 2] = is_sparsity_varied  # at one sparsity k0 and k1 are one parameter: k0
    points = np.bincount(sums.groups, minlength=sums.count)
    return free, (sizes >= 2) & (points > free.sum(axis=1)), is_sparsity_varied


def _is_by_tokens(shape: Shape | None) -> bool:
    return shape is not None and shape.work is WorkUnit.TOKENS
