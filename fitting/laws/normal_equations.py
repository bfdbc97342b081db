"""Weighted least squares in many small groups at once, by each group's normal equations.

A group has two or three terms, and one call of numpy solves thousands of groups. Normal equations
square the condition number, so columns are scaled to length 1 first: for n columns that is within
``sqrt(n)`` of the best condition that any scaling gives (van der Sluis, Numer. Math. 14, 1969).
"""

from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np

from fitting.numerics.arrays import BoolArray, FloatArray, IntArray

RIDGE = 1e-13  # on a diagonal of ones: collinear columns stay solvable, others keep twelve digits


@dataclass(frozen=True, slots=True)
class GroupSums:
    """Sums over the rows of each group, by one ``bincount`` per column: numpy's fastest way.

    Attributes:
        groups: (rows,) index of the group of each row.
        count: number of groups, those without rows included.
    """

    groups: IntArray
    count: int

    def sums(self, columns: FloatArray) -> FloatArray:
        """(groups, columns) sums of (rows, columns)."""
        summed = [np.bincount(self.groups, column, self.count) for column in columns.T]
        return np.stack(summed, axis=1)

    def by_row(self, values: FloatArray | BoolArray) -> FloatArray:
        """(rows, columns) values of each row's group, from (groups, columns)."""
        columns = np.ascontiguousarray(values.T, np.float64)  # bincount reads one at a time
        return np.take(columns, self.groups, axis=1).T

    def products(self, columns: FloatArray, weights: FloatArray) -> FloatArray:
        """(groups, columns, columns) weighted sums of the products of every two columns."""
        size, weighted = columns.shape[1], columns * weights[:, None]
        summed = np.empty((self.count, size, size))
        for i, j in combinations_with_replacement(range(size), 2):
            product = weighted[:, i] * columns[:, j]
            summed[:, i, j] = summed[:, j, i] = np.bincount(self.groups, product, self.count)
        return summed


@dataclass(frozen=True, slots=True)
class BorderedNormal:
    """Normal matrix ``[[A, b], [b', c]]``: a block of A per group, b and c of a shared column.

    Only the blocks are inverted. The shared column enters by its Schur complement
    ``c - b' A^-1 b``, the weighted sum of squares of its remainder.

    Attributes:
        scaled: (rows, terms) columns of the groups, each of length 1 in its group.
        lengths: (groups, terms) lengths of the columns before scaling; 0 for a column of zeros.
        matrix: (groups, terms, terms) A.
        inverse: (groups, terms, terms) ``A^-1``.
        projected: (groups, terms) ``A^-1 b``.
        remainder: (rows,) the shared column less its projection on the groups' columns.
    """

    scaled: FloatArray
    lengths: FloatArray
    matrix: FloatArray
    inverse: FloatArray
    projected: FloatArray
    remainder: FloatArray

    @classmethod
    def of(
        cls, sums: GroupSums, columns: FloatArray, shared: FloatArray, weights: FloatArray
    ) -> "BorderedNormal":
        """Build the matrix of (rows, terms) columns, a (rows,) shared one and (rows,) weights."""
        lengths = np.sqrt(sums.sums(columns**2 * weights[:, None]))
        scaled = columns / sums.by_row(np.where(lengths > 0, lengths, 1.0))
        matrix = sums.products(scaled, weights)
        matrix += np.where(lengths > 0, RIDGE, 1.0)[:, :, None] * np.eye(columns.shape[1])
        inverse: FloatArray = np.asarray(np.linalg.inv(matrix), np.float64)
        border = sums.sums(scaled * (shared * weights)[:, None])
        projected = np.einsum("gij,gj->gi", inverse, border)
        remainder = shared - (scaled * sums.by_row(projected)).sum(axis=1)
        return cls(scaled, lengths, matrix, inverse, projected, remainder)

    def leverages(self, sums: GroupSums, weights: FloatArray) -> FloatArray:
        """(rows,) diagonal of the hat matrix, 0 to 1."""
        own = np.einsum("ri,rij,rj->r", self.scaled, self.inverse[sums.groups], self.scaled)
        shared = _over(self.remainder**2, self._complement(weights))
        return np.asarray(np.clip(weights * (own + shared), 0.0, 1.0))

    def standard_errors(self, weights: FloatArray) -> tuple[FloatArray, float]:
        """Standard errors for residuals of spread 1: (groups, terms), and the shared parameter's.

        Roots of the diagonal of the inverse; nan for a parameter whose column is zero.
        """
        complement = self._complement(weights)
        variances = np.einsum("gii->gi", self.inverse) + _over(self.projected**2, complement)
        with np.errstate(divide="ignore"):
            errors = np.where(self.lengths > 0, np.sqrt(variances) / self.lengths, np.nan)
        return np.asarray(errors), float(1 / np.sqrt(complement)) if complement > 0 else np.nan

    def _complement(self, weights: FloatArray) -> float:
        """Schur complement of the shared column."""
        return float((self.remainder**2 * weights).sum())


def _over(squares: FloatArray, complement: float) -> FloatArray:
    return squares / complement if complement > 0 else np.zeros_like(squares)


def non_negative(outer: FloatArray, inner: FloatArray, free: BoolArray) -> FloatArray:
    """(groups, terms) least-squares values, none below zero, from normal equations.

    Args:
        outer: (groups, terms, terms) sums of products of the terms.
        inner: (groups, terms) sums of products of the terms with the target.
        free: (groups, terms) mask of the values that may differ from zero.
    """
    values = _solved(outer, inner, free)
    negative = np.flatnonzero(~(values >= 0).all(axis=1))
    if len(negative):
        values[negative] = _best_of_subsets(outer[negative], inner[negative], free[negative])
    return values


def _solved(outer: FloatArray, inner: FloatArray, free: BoolArray) -> FloatArray:
    """(groups, terms) solution of each group's normal equations; zero where not free."""
    identity = np.eye(inner.shape[1])
    matrix = np.where(free[:, :, None] & free[:, None, :], outer, identity)
    scale = np.sqrt(np.einsum("gii->gi", matrix))
    scaled = matrix / scale[:, :, None] / scale[:, None, :] + RIDGE * identity
    target = np.where(free, inner, 0.0) / scale
    return np.asarray(np.linalg.solve(scaled, target[:, :, None])[:, :, 0] / scale)


def _best_of_subsets(outer: FloatArray, inner: FloatArray, free: BoolArray) -> FloatArray:
    """(groups, terms) best non-negative values over every subset of the free terms.

    Exact, because the optimum solves the equations of its positive terms. Three terms have seven
    subsets, which cost less than the active-set method of Lawson and Hanson (1974): that one cannot
    be vectorised over groups.
    """
    count = inner.shape[1]
    best, least = np.zeros(inner.shape), np.full(len(inner), np.inf)
    for subset in range(2**count - 1, 0, -1):
        is_positive = np.array([bool(subset >> place & 1) for place in range(count)])
        values = _solved(outer, inner, np.broadcast_to(is_positive, inner.shape))
        cost = -np.einsum("gi,gi->g", values, np.where(is_positive, inner, 0.0))
        allowed = ~(is_positive & ~free).any(axis=1)
        better = allowed & (values >= 0).all(axis=1) & (cost < least)
        best[better], least[better] = values[better], cost[better]
    return best


def varied(
    groups: IntArray, sparsity: FloatArray, size: FloatArray, count: int
) -> tuple[BoolArray, IntArray]:
    """(groups,) whether a group has several sparsities, and (groups,) its most sizes at one."""
    order = np.lexsort((size, sparsity, groups))
    groups, sparsity, size = groups[order], sparsity[order], size[order]
    starts_curve = (np.diff(groups, prepend=-1) != 0) | (np.diff(sparsity, prepend=-1.0) != 0)
    starts_size = starts_curve | (np.diff(size, prepend=-1.0) != 0)
    sizes = np.bincount(np.cumsum(starts_curve)[starts_size] - 1)
    most = np.zeros(count, np.int64)
    np.maximum.at(most, groups[starts_curve], sizes)
    return np.bincount(groups[starts_curve], minlength=count) > 1, most


def median(values: FloatArray) -> float:
    """Median by sorting, several times as fast as ``numpy.median`` for some hundred values."""
    ordered = np.sort(values)
    return float((ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) / 2)


def log_weights(fitted: FloatArray, target: FloatArray, log_residual: FloatArray) -> FloatArray:
    """(rows,) weights that make squared errors ``f - y`` have the gradient of ``log(f / y)**2``.

    ``w (f - y) = log(f / y) / f``, so ``w = log(f / y) / (f (f - y))``, with the limit ``1 / f**2``
    at f = y. The fixed point of the least squares weighted so is the minimum in logarithms.

    Args:
        fitted: (rows,) f.
        target: (rows,) y.
        log_residual: (rows,) ``log(f / y)``.
    """
    relative = fitted / target - 1
    near = np.abs(relative) < 1e-6
    ratio = np.where(near, 1 - relative / 2, log_residual / np.where(near, 1.0, relative))
    return np.asarray(ratio / (fitted * target))
