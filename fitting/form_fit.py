"""Fits a law of the step time to the rows of a family, or to several parts of them at once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fitting.laws import FloatArray, eq2_terms
from fitting.step_times import (
    SHAPES,
    BoolArray,
    FittedForm,
    FittedValues,
    Form,
    IntArray,
    Shape,
    Sparsity,
    StepTimes,
    Work,
    form_terms,
    group_of,
)

# Errors of less than this are no sign of a bad point: step times of one batch size differ as much.
LEAST_SPREAD = 0.01
NORMAL_MAD = 1.4826  # the median absolute deviation of a normal distribution is sigma over this
ITERATIONS = 60
SPREADS = 12  # iteration from which on the spread stays as it is, so that the rest settles
SETTLED = 1e-10  # of the fitted times, between two iterations
SETTLED_UNSEEN = 1e-7  # for laws that are asked of points that they are off by some per cent
EXPONENTS = (0.0, 2.0)  # of the sparsity: no more than all experts' work for each of them


def fit_form(form: Form, rows: StepTimes) -> FittedForm | None:
    """A form fitted to what can carry it, robustly; None where no group can.

    Minimises the sum over rows of ``2 c**2 (sqrt(1 + (r / c)**2) - 1)``, r the logarithm of fitted
    over measured seconds and c their spread (``LEAST_SPREAD`` or more): a square near the law, a
    line far from it, so that a bad point counts little. A floor or slope is never below zero. A
    group needs two batch sizes, of different work, at one sparsity, and a point more than it has
    parameters of its own.
    """
    problem = _Problem(form, rows, [np.ones(len(rows), bool)])
    return problem.told() if problem.carried.any() else None


def fit_values(
    form: Form, rows: StepTimes, parts: Sequence[BoolArray]
) -> list[FittedValues | None]:
    """The values that ``fit_form`` finds in each of several parts of the rows.

    All at once, and without what tells how far they can be trusted: a tenth of the work, for laws
    that are asked of points that they have not seen.

    Args:
        form: which.
        rows: of a family.
        parts: (rows,) of each, which of the rows it has.
    """
    problem = _Problem(form, rows, parts)
    return problem.values() if problem.carried.any() else [None] * len(parts)


@dataclass(frozen=True, slots=True)
class _Found:
    """What came of parts of a family's rows: silent groups and rows included.

    Attributes:
        values: (groups, terms).
        exponents: (parts,) 0 where there is none.
        residuals: (rows,) ``log(fitted / seconds)``.
        weights: (rows,).
        spreads: (parts,).
    """

    values: FloatArray
    exponents: FloatArray
    residuals: FloatArray
    weights: FloatArray
    spreads: FloatArray


class _Problem:
    """One form on parts of the rows of one family, each part with groups of its own."""

    def __init__(self, form: Form, rows: StepTimes, parts: Sequence[BoolArray]) -> None:
        self._form = form
        self._names, named = np.unique(group_of(form, rows), return_inverse=True)
        places = [np.flatnonzero(part) for part in parts]
        ends = np.cumsum([len(of) for of in places])
        self._slices = [slice(end - len(of), end) for of, end in zip(places, ends, strict=True)]
        at = np.concatenate(places)
        self._part = np.repeat(np.arange(len(parts)), [len(of) for of in places])
        self._groups: IntArray = named[at] + self._part * len(self._names)
        self._count = len(parts) * len(self._names)
        self._batch_size, self._sparsity = rows.batch_size[at], rows.sparsity[at]
        self._tokens, self._seconds = rows.tokens[at], rows.seconds[at]
        self._log_sparsity = np.log(self._sparsity)
        self._shape = SHAPES.get(form)
        if self._shape is not None:
            work = self._batch_size if self._shape.work is Work.QUERIES else self._tokens
            self._powered = work**self._shape.power
        several, sizes = _varied(self._groups, self._sparsity, self._batch_size, self._count)
        if self._shape is not None and self._shape.work is Work.TOKENS:  # 8 of 64 are 4 of 128
            tokens = np.log(self._tokens).round(6)
            sizes = np.minimum(sizes, _varied(self._groups, self._sparsity, tokens, self._count)[1])
        own = self._shape is not None and self._shape.sparsity is Sparsity.OWN
        # At one sparsity k0 and k1 are one parameter: k0.
        self._free = np.ones((self._count, 3 if own else 2), bool)
        if own:
            self._free[:, 2] = several
        points = np.bincount(self._groups, minlength=self._count)
        self.carried: BoolArray = (sizes >= 2) & (points > self._free.sum(axis=1))
        self._spoken = self.carried[self._groups]  # (rows,)
        is_shared = self._shape is not None and self._shape.sparsity is Sparsity.SHARED
        by_part = (len(parts), len(self._names))
        self._has_exponent = (several & self.carried).reshape(by_part).any(axis=1) & is_shared
        free = (self._free.sum(axis=1) * self.carried).reshape(by_part).sum(axis=1)
        self._parameters = free + self._has_exponent

    def values(self) -> list[FittedValues | None]:
        """The fit of each part, None where it has no group that can carry the form."""
        shape = self._shape
        found = self._squares()[0] if shape is None else self._settled(shape, SETTLED_UNSEEN)
        values = np.where(self.carried[:, None], found.values, np.nan)
        by_part = values.reshape(len(self._slices), len(self._names), -1)
        return [
            FittedValues(
                form=self._form,
                names=self._names,
                values=own,
                exponent=float(exponent) if has_exponent else None,
            )
            if np.isfinite(own).any()
            else None
            for own, exponent, has_exponent in zip(
                by_part, found.exponents, self._has_exponent, strict=True
            )
        ]

    def told(self) -> FittedForm:
        """The fit of the one part that there is, and how far it can be trusted."""
        shape = self._shape
        return self._logarithm() if shape is None else self._told(self._settled(shape, SETTLED))

    def _settled(self, shape: Shape, settled: float) -> _Found:
        """Least squares again and again, rows far off counting less."""
        target = self._seconds**shape.power
        exponents = np.where(self._has_exponent, 0.6, 0.0)
        robust = np.ones(len(target))
        fitted, apart = target, np.zeros(len(target))
        spreads = np.full(len(self._slices), np.inf)
        terms = self._terms(shape, exponents)
        for turn in range(ITERATIONS):
            values = self._non_negative(terms, target, robust * _log_weights(fitted, target, apart))
            fitted = (terms * self._of_rows(values)).sum(axis=1)
            fitted = np.where(self._spoken, np.maximum(fitted, 1e-300), target)
            before, apart = apart, np.log(fitted / target)
            residuals = apart / shape.power
            if turn <= SPREADS:  # bad points widen the first spread: estimate it again
                spreads = self._spreads(residuals)
            robust = 1 / np.sqrt(1 + (residuals / spreads[self._part]) ** 2)
            steps = np.zeros(1)
            if self._has_exponent.any():
                steps = self._exponent_steps(terms, values, fitted, residuals, robust)
                exponents = np.clip(exponents + steps, *EXPONENTS)
                terms = self._terms(shape, exponents)
            moved = max(np.abs(apart - before).max(), np.abs(steps).max())
            if turn > SPREADS + 1 and moved < settled:
                break
        return _Found(values, exponents, residuals, robust, spreads)

    def _terms(self, shape: Shape, exponents: FloatArray) -> FloatArray:
        """(rows, terms): what multiplies the values."""
        return form_terms(shape, self._powered, self._log_sparsity, exponents[self._part])

    def _of_rows(self, values: FloatArray) -> FloatArray:
        """(rows, terms) those of the group of each row, each column in one piece."""
        return np.take(np.ascontiguousarray(values.T), self._groups, axis=1).T

    def _spreads(self, residuals: FloatArray) -> FloatArray:
        """(parts,) by the median, as if of points that no parameter had followed."""
        apart = np.abs(residuals)
        spreads = np.full(len(self._slices), LEAST_SPREAD)
        for part, rows in enumerate(self._slices):
            own = apart[rows][self._spoken[rows]]
            if len(own):
                followed = np.sqrt(len(own) / max(len(own) - self._parameters[part], 1))
                spreads[part] = max(LEAST_SPREAD, NORMAL_MAD * _median(own) * followed)
        return spreads

    def _summed(self, columns: FloatArray) -> FloatArray:
        """(groups, …) sums over the rows of each group."""
        flat = columns.reshape(len(columns), -1)
        summed = np.empty((self._count, flat.shape[1]))
        for place in range(flat.shape[1]):
            summed[:, place] = np.bincount(self._groups, flat[:, place], self._count)
        return summed.reshape(self._count, *columns.shape[1:])

    def _products(self, columns: FloatArray, weight: FloatArray) -> FloatArray:
        """(groups, columns, columns) sums of the products of each two, weighted."""
        count = columns.shape[1]
        summed = np.empty((self._count, count, count))
        for place in range(count):
            weighted = columns[:, place] * weight
            for other in range(place, count):
                product = weighted * columns[:, other]
                summed[:, place, other] = np.bincount(self._groups, product, self._count)
                summed[:, other, place] = summed[:, place, other]
        return summed

    def _non_negative(
        self, terms: FloatArray, target: FloatArray, weight: FloatArray
    ) -> FloatArray:
        """(groups, terms) the best values of none below zero; zeros where nothing is carried."""
        outer = self._products(terms, weight)
        inner = self._summed(terms * (target * weight)[:, None])
        values = np.zeros((self._count, terms.shape[1]))
        left = np.flatnonzero(self.carried)
        found = _solved(outer[left], inner[left], self._free[left])
        is_best = (found >= 0).all(axis=1)  # with all of them free: nothing is better
        values[left[is_best]] = found[is_best]
        left = left[~is_best]
        if len(left):
            values[left] = _best_of_subsets(outer[left], inner[left], self._free[left])
        return values

    def _exponent_steps(
        self,
        terms: FloatArray,
        values: FloatArray,
        fitted: FloatArray,
        residuals: FloatArray,
        robust: FloatArray,
    ) -> FloatArray:
        """(parts,) Gauss-Newton's step of the exponent, floors and slopes following it."""
        assert self._shape is not None
        active = values > 0
        local = terms * self._of_rows(active / self._shape.power) / fitted[:, None]
        slope = terms[:, 1] * values[:, 1][self._groups]
        shared = slope * self._log_sparsity / fitted  # of log(fitted) / power
        use = robust * self._spoken
        matrix = self._products(local, use)
        matrix += np.where(active, 0.0, 1.0)[:, :, None] * np.eye(2)
        border = self._summed(local * (shared * use)[:, None])
        gradient = self._summed(local * (residuals * use)[:, None])
        followed = np.linalg.solve(
            matrix + 1e-300 * np.eye(2), np.stack([border, gradient], axis=2)
        )
        by_part = (len(self._slices), len(self._names) * 2)
        of_groups = (border[:, :, None] * followed).reshape(*by_part, 2).sum(axis=1)
        curvature = self._of_parts(shared**2 * use) - of_groups[:, 0]
        pull = self._of_parts(shared * residuals * use) - of_groups[:, 1]
        is_told = self._has_exponent & (curvature > 1e-12)
        step = np.where(is_told, -pull / np.where(is_told, curvature, 1.0), 0.0)
        return np.asarray(np.clip(step, -0.3, 0.3))

    def _of_parts(self, column: FloatArray) -> FloatArray:
        """(parts,) sums over the rows of each part."""
        summed = np.bincount(self._part, weights=column, minlength=len(self._slices))
        return np.asarray(summed, np.float64)

    def _squares(self) -> tuple["_Found", FloatArray, FloatArray]:
        """Queries per second as they are, as the paper did: no weights, no bounds.

        Beside what was found, the terms and their normal matrices.
        """
        terms = eq2_terms(self._batch_size, self._sparsity)
        rate = self._batch_size / self._seconds
        outer = self._products(terms, np.ones(len(rate)))
        inner = self._summed(terms * rate[:, None])
        outer[~self.carried] = np.eye(2)
        values: FloatArray = np.array(
            np.linalg.solve(outer, inner[:, :, None])[:, :, 0], np.float64
        )
        fitted = (terms * values[self._groups]).sum(axis=1)
        ratio = np.where(fitted > 0, rate / np.where(fitted > 0, fitted, 1.0), np.nan)
        residuals: FloatArray = np.array(np.log(ratio), np.float64)
        spreads = self._spreads(np.nan_to_num(residuals, nan=1.0))
        exponents = np.zeros(len(self._slices))
        return _Found(values, exponents, residuals, np.ones(len(rate)), spreads), terms, outer

    def _logarithm(self) -> FittedForm:
        found, terms, outer = self._squares()
        told = self._told(found, terms)
        # Errors grow with the rate, and yet all count alike: what follows from both is this.
        rate = self._batch_size / self._seconds
        inverse = np.linalg.inv(outer)
        pulls = np.einsum("rij,rj->ri", inverse[self._groups], terms) * rate[:, None]
        errors = told.spread * np.sqrt(self._summed(pulls**2))
        return replace(told, standard_errors=np.where(self.carried[:, None], errors, np.nan))

    def _told(self, found: "_Found", columns: FloatArray | None = None) -> FittedForm:
        values, residuals, weights = found.values, found.residuals, found.weights
        exponent = float(found.exponents[0]) if self._has_exponent[0] else None
        spread = float(found.spreads[0])
        if columns is None:
            assert self._shape is not None
            columns = self._terms(self._shape, found.exponents)
            columns = columns / self._seconds[:, None] ** self._shape.power
        pull = self._pull(found)
        free = np.where(self._free[self._groups], columns, 0.0)
        leverages, condition = self._leverages(free, pull, weights)
        above = np.where((values > 0)[self._groups], columns, 0.0)
        errors, exponent_error = self._standard_errors(above, pull, weights)
        power = 1.0 if self._shape is None else self._shape.power
        inside = exponent is not None and EXPONENTS[0] < exponent < EXPONENTS[1]
        silent = ~self._spoken
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
            parameters=int(self._parameters[0]),
            condition=condition,
        )

    def _pull(self, found: _Found) -> FloatArray:
        """(rows,) how the logarithm of a powered step time follows the exponent."""
        if self._shape is None or not self._has_exponent.any():
            return np.zeros(len(self._seconds))
        slope = self._terms(self._shape, found.exponents)[:, 1] * found.values[self._groups, 1]
        powered = self._seconds**self._shape.power
        return np.asarray(slope * self._shape.power * self._log_sparsity / powered)

    def _leverages(
        self, local: FloatArray, pull: FloatArray, weights: FloatArray
    ) -> tuple[FloatArray, float]:
        """(rows,) the diagonal of the hat matrix; the condition of the worst group's own terms."""
        use = weights * self._spoken
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
        use = weights * self._spoken
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
        matrix = self._products(scaled, use)
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
    order = np.lexsort((size, sparsity, groups))
    of, sparsity, size = groups[order], sparsity[order], size[order]
    is_curve = np.concatenate([[True], (np.diff(of) != 0) | (np.diff(sparsity) != 0)])[: len(of)]
    is_point = is_curve | np.concatenate([[True], np.diff(size) != 0])[: len(of)]
    sizes = np.bincount(np.cumsum(is_curve)[is_point] - 1)
    most = np.zeros(count, np.int64)
    np.maximum.at(most, of[is_curve], sizes)
    return np.bincount(of[is_curve], minlength=count) > 1, most


def _solved(outer: FloatArray, inner: FloatArray, free: BoolArray) -> FloatArray:
    """(groups, terms) what solves each group's normal equations; zero for what is not free."""
    count = inner.shape[1]
    matrix = np.where(free[:, :, None] & free[:, None, :], outer, np.eye(count))
    scale = np.sqrt(np.einsum("gii->gi", matrix))
    scaled = matrix / scale[:, :, None] / scale[:, None, :]
    scaled += 1e-13 * np.eye(count)
    asked = np.where(free, inner, 0.0) / scale
    return np.asarray(np.linalg.solve(scaled, asked[:, :, None])[:, :, 0] / scale)


def _best_of_subsets(outer: FloatArray, inner: FloatArray, free: BoolArray) -> FloatArray:
    """(groups, terms) the best values of none below zero, by trying each set of free ones."""
    count = inner.shape[1]
    best, least = np.zeros(inner.shape), np.full(len(inner), np.inf)
    for subset in range(2**count - 1, 0, -1):
        tried = np.array([bool(subset >> place & 1) for place in range(count)])
        values = _solved(outer, inner, np.broadcast_to(tried, inner.shape))
        cost = -np.einsum("gi,gi->g", values, np.where(tried, inner, 0.0))
        allowed = ~(tried & ~free).any(axis=1)
        better = allowed & (values >= 0).all(axis=1) & (cost < least)
        best[better], least[better] = values[better], cost[better]
    return best


def _median(values: FloatArray) -> float:
    """What np.median says, some times as fast of some hundred."""
    half = len(values) // 2
    if len(values) % 2:
        return float(np.partition(values, half)[half])
    low, high = np.partition(values, (half - 1, half))[half - 1 : half + 1]
    return float((low + high) / 2)


def _log_weights(fitted: FloatArray, target: FloatArray, apart: FloatArray) -> FloatArray:
    """What makes the squares of ``fitted - target`` pull as those of their logarithms' difference.

    ``log(f / y) / (f (f - y))``, which is ``1 / f**2`` where they meet; ``apart`` is the logarithm.
    """
    off = fitted / target - 1
    near = np.abs(off) < 1e-6
    ratio = np.where(near, 1 - off / 2, apart / np.where(near, 1.0, off))
    return np.asarray(ratio / (fitted * target))
