"""Least squares with rank, bounds and covariance: the only module that imports scipy.

Functions import scipy themselves, because that takes as long as all other imports of most commands.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import combinations

import numpy as np

from fitting.numerics.arrays import BoolArray, FloatArray

# The points identify a direction of parameter space whose singular value, with columns scaled to
# length 1, exceeds this share of the largest. The scaling makes the rank independent of units, and
# brings n columns within sqrt(n) of the best condition of any scaling (van der Sluis, Numer. Math.
# 14, 1969). Exact designs have rounding errors of about 1e-15, three-point Jacobians of 1e-10.
LINEAR_RANK_TOLERANCE = 1e-10
JACOBIAN_RANK_TOLERANCE = 1e-7
# A parameter with a larger share of a null direction is not identified. The others are, and keep
# their errors, even if the design as a whole is rank-deficient.
NULL_SHARE = 1e-4
LEAST_UNIT = 1e-3  # least scale of a value relative to its start: values may converge to zero
MOST_ITERATIONS = 1000  # per parameter; the longest of NIST's problems takes 520
CORNER_TOLERANCE = 1e-9  # of a corner of the planes, relative to a limit
LEAST_MARGIN = 1e-6  # of a row that holds, relative to its limit: equality does not count


class Status(StrEnum):
    """Status of a fit. Only OK and BOUND_HIT give parameters to use."""

    OK = "OK"
    """Every parameter is identified and inside its bounds."""
    BOUND_HIT = "BOUND_HIT"
    """A parameter was held at its bound; the others are fitted given that."""
    RANK_DEFICIENT = "RANK_DEFICIENT"
    """The points do not identify all parameters."""
    TOO_FEW_POINTS = "TOO_FEW_POINTS"
    """Not more points than parameters: nothing is left to judge the fit by."""
    NOT_CONVERGED = "NOT_CONVERGED"
    """The iteration stopped before a minimum."""
    NO_DATA = "NO_DATA"
    """There are no points."""

    @property
    def is_usable(self) -> bool:
        """Whether the parameters may be used."""
        return self in (Status.OK, Status.BOUND_HIT)


@dataclass(frozen=True, slots=True)
class Solution:
    """Best-fit parameters with their errors and the diagnostics of the fit.

    Attributes:
        values: parameters; meaningless one by one unless the status is usable.
        standard_errors: None for a parameter that is not identified or is held at its bound.
        covariance: covariance of the parameters from the residual variance, conditional on the
            parameters held at their bounds, whose rows are zero. None unless the status is usable.
        rank: number of independent directions of parameter space that the points identify.
        rmse: root mean square of the weighted residuals; None without points.
        degrees_of_freedom: number of points less the number of free parameters.
        condition: ratio of the extreme singular values, columns scaled to length 1; None for a
            rank-deficient design.
    """

    values: FloatArray
    standard_errors: tuple[float | None, ...]
    covariance: FloatArray | None
    status: Status
    rank: int
    parameter_count: int
    points: int
    rmse: float | None
    degrees_of_freedom: int
    condition: float | None


@dataclass(frozen=True, slots=True)
class _Minimum:
    """Result of a solver.

    Attributes:
        matrix: (points, parameters) Jacobian of the residuals.
        held: (parameters,) mask of the parameters held at a bound.
        tolerance: relative size below which a singular value of the matrix counts as zero.
    """

    values: FloatArray
    matrix: FloatArray
    residuals: FloatArray
    held: BoolArray
    tolerance: float
    converged: bool = True


def solve_linear(
    design: FloatArray,
    observed: FloatArray,
    *,
    weights: FloatArray | None = None,
    lower: FloatArray | None = None,
) -> Solution:
    """Minimise ``sum((weights * (design @ values - observed)) ** 2)`` over values >= lower.

    Args:
        design: (points, parameters) matrix.
        observed: (points,) values.
        weights: (points,) factors of the residuals: 1 / (expected error), up to a common factor.
        lower: (parameters,) least values; -inf for none.

    Raises:
        ValueError: a number is not finite.
    """
    scale = np.ones(len(observed)) if weights is None else weights
    matrix, target = design * scale[:, None], observed * scale
    for array in (matrix, target):
        if not np.all(np.isfinite(array)):
            raise ValueError(f"points to fit must be finite numbers, got {array.tolist()}")
    values, held = _least_squares(matrix, target, lower)
    residuals = matrix @ values - target
    return _solution(_Minimum(values, matrix, residuals, held, LINEAR_RANK_TOLERANCE))


def solve_nonlinear(
    residuals: Callable[[FloatArray], FloatArray],
    start: FloatArray,
    *,
    lower: FloatArray,
    upper: FloatArray,
    tolerance: float = 1e-12,
) -> Solution:
    """Minimise ``sum(residuals(values) ** 2)`` from a start strictly inside the bounds.

    The covariance is that of the law linearised at the minimum. The solver stops where the relative
    change of every value is below ``tolerance``, or that of the sum below a thousandth of it: in a
    narrow valley the sum hardly falls far from the minimum. A second run starts from the first
    one's values and is scaled by them.
    """
    if len(residuals(start)) == 0:
        idle = np.zeros(len(start), dtype=bool)
        return _solution(_Minimum(start, np.zeros((0, len(start))), np.zeros(0), idle, 0.0))
    unit = np.where(start == 0, 1.0, np.abs(start))
    near = _minimum(residuals, start, unit, (lower, upper), tolerance).values
    unit = np.maximum(np.abs(near), LEAST_UNIT * unit)
    return _solution(_minimum(residuals, near, unit, (lower, upper), tolerance))


def _minimum(
    residuals: Callable[[FloatArray], FloatArray],
    start: FloatArray,
    unit: FloatArray,
    bounds: tuple[FloatArray, FloatArray],
    tolerance: float,
) -> _Minimum:
    """Minimise in scaled units, because scipy's tolerances are absolute.

    Its difference steps are relative to ``max(1, |value|)``, and a gradient below 2e-16 ends its
    search.
    """
    from scipy.optimize import least_squares  # noqa: PLC0415 - see the top

    size = float(np.linalg.norm(residuals(start))) or 1.0
    lower, upper = bounds

    def scaled(parts: FloatArray) -> FloatArray:
        return residuals(parts * unit) / size

    with np.errstate(all="ignore"):  # a trial step may overflow; the solver rejects it
        result = least_squares(
            scaled,
            start / unit,
            jac="3-point",
            bounds=(lower / unit, upper / unit),
            x_scale="jac",
            ftol=tolerance / 1000,
            xtol=tolerance,
            gtol=np.finfo(float).eps,
            max_nfev=MOST_ITERATIONS * len(start),
        )
    held = np.asarray(result.active_mask) != 0
    values = np.where(held, np.where(result.active_mask < 0, lower, upper), result.x * unit)
    return _Minimum(
        values=values,
        matrix=np.asarray(result.jac) * size / unit,
        residuals=residuals(values),
        held=held,
        tolerance=JACOBIAN_RANK_TOLERANCE,
        converged=result.status > 0,
    )


def solve_most_agreed(at: FloatArray, beyond: FloatArray, limit: FloatArray) -> FloatArray:
    """Non-negative values ``v`` with ``at @ v <= limit < beyond @ v`` for as many rows as possible.

    Counting rows is robust: a bad row has no pull. Of the best values, the result has the largest
    relative margin of the rows that hold. The search is exact: the best count is reached at a
    corner where as many planes meet as there are parameters, and it visits all corners. It suits
    some dozens of rows and three parameters.

    Args:
        at: (rows, parameters) coefficients of what must be within the limit.
        beyond: (rows, parameters) coefficients of what must exceed it.
        limit: (rows,) positive limits.

    Raises:
        ValueError: there are no rows, or a number is not finite.
    """
    if len(limit) == 0 or not all(np.all(np.isfinite(array)) for array in (at, beyond, limit)):
        raise ValueError("limits must be finite numbers, and at least one")
    lower, upper = at / limit[:, None], beyond / limit[:, None]
    below, above = 1 - LEAST_MARGIN, 1 + LEAST_MARGIN
    corners = _corners(np.vstack([lower / below, upper / above]))
    is_below = corners @ lower.T <= below + CORNER_TOLERANCE
    within = is_below & (corners @ upper.T >= above - CORNER_TOLERANCE)
    counts = within.sum(axis=1)
    most = np.unique(within[counts == counts.max()], axis=0)
    middles = (_middle(lower[rows], upper[rows]) for rows in most)
    return max(middles, key=lambda margin_and_values: margin_and_values[0])[1]


def _corners(planes: FloatArray) -> FloatArray:
    """(corners, parameters) non-negative points where ``planes @ v = 1`` meet each other or 0."""
    count, parameters = planes.shape
    walls = np.vstack([planes, np.eye(parameters)])
    heights = np.r_[np.ones(count), np.zeros(parameters)]
    sets = np.array(list(combinations(range(len(walls)), parameters)))
    meeting = walls[sets]
    scale = np.abs(meeting).max(axis=2, keepdims=True)
    determinants = np.linalg.det(meeting / np.where(scale > 0, scale, 1.0))
    is_regular = np.abs(determinants) > LINEAR_RANK_TOLERANCE
    points = np.linalg.solve(meeting[is_regular], heights[sets[is_regular]][:, :, None])[:, :, 0]
    return np.asarray(points[(points >= -CORNER_TOLERANCE).all(axis=1)])


def _middle(lower: FloatArray, upper: FloatArray) -> tuple[float, FloatArray]:
    """Largest margin of ``lower @ v <= 1 <= upper @ v``, and its values v."""
    from scipy.optimize import linprog  # noqa: PLC0415 - see the top

    parameters = lower.shape[1]
    one = np.ones((len(lower), 1))
    result = linprog(
        np.r_[np.zeros(parameters), -1.0],
        A_ub=np.vstack([np.hstack([lower, one]), np.hstack([-upper, one])]),
        b_ub=np.r_[one[:, 0], -one[:, 0]],
    )
    values = np.asarray(result.x)
    return float(values[-1]), values[:-1]


@lru_cache(maxsize=1024)
def t_quantile(probability: float, degrees_of_freedom: float) -> float:
    """Quantile of Student's t distribution."""
    from scipy.special import stdtrit  # noqa: PLC0415 - see the top

    return float(stdtrit(degrees_of_freedom, probability))


def _least_squares(
    matrix: FloatArray, target: FloatArray, lower: FloatArray | None
) -> tuple[FloatArray, BoolArray]:
    """Least-squares values, and the mask of those held at a bound."""
    lengths = _column_lengths(matrix)
    values = np.linalg.lstsq(matrix / lengths, target, rcond=LINEAR_RANK_TOLERANCE)[0] / lengths
    held = np.zeros(len(values), dtype=bool)
    if lower is not None and len(target) > 0 and np.any(values < lower):
        from scipy.optimize import lsq_linear  # noqa: PLC0415 - see the top

        result = lsq_linear(matrix / lengths, target, (lower * lengths, np.inf), method="bvls")
        held = np.asarray(result.active_mask) != 0
        values = np.where(held, lower, result.x / lengths)
    return values, held


def _solution(minimum: _Minimum) -> Solution:
    points, parameter_count = minimum.matrix.shape
    freedom = int(points - parameter_count + np.count_nonzero(minimum.held))
    errors: list[float | None] = [None] * parameter_count
    rank, condition, covariance, rmse = 0, None, None, None
    if points > 0:
        rank, condition, identified = _spectrum(minimum)
        rmse = float(np.sqrt(np.mean(minimum.residuals**2)))
    if points > 0 and freedom > 0:
        covariance = _covariance(minimum, freedom)
        for index in np.flatnonzero(identified & ~minimum.held):
            errors[index] = float(np.sqrt(covariance[index, index]))
    status = _status(minimum, rank)
    return Solution(
        values=minimum.values,
        standard_errors=tuple(errors),
        covariance=covariance if status.is_usable else None,
        status=status,
        rank=rank,
        parameter_count=parameter_count,
        points=points,
        rmse=rmse,
        degrees_of_freedom=freedom,
        condition=condition,
    )


def _status(minimum: _Minimum, rank: int) -> Status:
    points, parameter_count = minimum.matrix.shape
    if points == 0:
        return Status.NO_DATA
    if points <= parameter_count:
        return Status.TOO_FEW_POINTS
    if rank < parameter_count:
        return Status.RANK_DEFICIENT
    if not minimum.converged:
        return Status.NOT_CONVERGED
    return Status.BOUND_HIT if minimum.held.any() else Status.OK


def _spectrum(minimum: _Minimum) -> tuple[int, float | None, BoolArray]:
    """Rank, condition, and the mask of the parameters that are identified."""
    points, parameter_count = minimum.matrix.shape
    scaled = minimum.matrix / _column_lengths(minimum.matrix)
    # Full matrices would take points**2 numbers; null directions need them with few points only.
    _, singular, directions = np.linalg.svd(scaled, full_matrices=points < parameter_count)
    rank = int(np.sum(singular > minimum.tolerance * singular[0]))
    condition = float(singular[0] / singular[-1]) if rank == parameter_count else None
    return rank, condition, np.linalg.norm(directions[rank:], axis=0) < NULL_SHARE


def _covariance(minimum: _Minimum, freedom: int) -> FloatArray:
    """``s**2 * (A^T A)^-1`` over the free parameters, with ``s**2`` the residual variance.

    The pseudo-inverse keeps the errors of what a rank-deficient design does identify.
    """
    free = ~minimum.held
    lengths = _column_lengths(minimum.matrix)[free]
    inverse = np.linalg.pinv(minimum.matrix[:, free] / lengths, rcond=minimum.tolerance)
    variance = float(minimum.residuals @ minimum.residuals) / freedom
    covariance = np.zeros((len(free), len(free)))
    covariance[np.ix_(free, free)] = variance * (inverse @ inverse.T) / np.outer(lengths, lengths)
    return covariance


def _column_lengths(matrix: FloatArray) -> FloatArray:
    lengths = np.linalg.norm(matrix, axis=0)
    return np.where(lengths > 0, lengths, 1.0)
