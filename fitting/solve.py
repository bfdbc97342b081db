"""Least squares with an honest answer: the only module that imports scipy, and when it is used.

Its import takes as long as all else that most commands import.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from fitting.laws import FloatArray

BoolArray = NDArray[np.bool_]

# A direction of parameter space counts as seen when its singular value, with columns scaled to
# length 1, exceeds this share of the largest. Exact designs carry rounding of about 1e-15;
# three-point Jacobians an error of about 1e-10.
LINEAR_RANK_TOLERANCE = 1e-10
JACOBIAN_RANK_TOLERANCE = 1e-7
# A parameter takes part in an unseen direction when its share of it exceeds this.
NULL_SHARE = 1e-4


class Status(StrEnum):
    """What became of a fit. Only OK and BOUND_HIT give parameters to use."""

    OK = "OK"
    """Every parameter is identified and inside its bounds."""
    BOUND_HIT = "BOUND_HIT"
    """A parameter was held at its bound; the others are fitted given that."""
    RANK_DEFICIENT = "RANK_DEFICIENT"
    """The points cannot tell the parameters apart."""
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
    """The parameters that fit best, and how far they can be trusted.

    Attributes:
        values: the parameters; meaningless one by one unless the status is usable.
        standard_errors: absent for a parameter the points do not identify, or held at its bound.
        covariance: of the parameters, from the residual variance; rows of a parameter held at its
            bound are zero, because the rest is conditional on it. Absent unless the status is
            usable.
        status: what became of the fit.
        rank: independent directions of parameter space the points see.
        parameter_count: parameters asked for.
        points: how many there were.
        rmse: root mean square of the weighted residuals; absent without points.
        degrees_of_freedom: points less fitted parameters.
        condition: ratio of extreme singular values, columns scaled to length 1; absent when the
            rank falls short.
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
    """Where a solver stopped.

    Attributes:
        values: the parameters there.
        matrix: slope of the residuals along each parameter, one row per point.
        residuals: one per point.
        held: the parameters a bound holds.
        tolerance: relative size below which a singular value of the matrix counts as zero.
        converged: whether the solver says that this is a minimum.
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
    """Minimises ``sum((weights * (design @ values - observed)) ** 2)``, values >= lower.

    Args:
        design: one row per point, one column per parameter.
        observed: one number per point.
        weights: multiplies each residual: 1 / (expected error), up to a common factor.
        lower: least value of each parameter; -inf for none.

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
    """Minimises ``sum(residuals(values) ** 2)`` from a start strictly inside the bounds.

    The covariance is that of the law linearised at the minimum. It stops where no value changes by
    more than ``tolerance``, as a part of it.
    """
    if len(residuals(start)) == 0:
        idle = np.zeros(len(start), dtype=bool)
        return _solution(_Minimum(start, np.zeros((0, len(start))), np.zeros(0), idle, 0.0))
    from scipy.optimize import least_squares  # noqa: PLC0415 - see the top

    found = least_squares(
        residuals, start, jac="3-point", bounds=(lower, upper), x_scale="jac", xtol=tolerance
    )
    held = np.asarray(found.active_mask) != 0
    values = np.where(held, np.where(found.active_mask < 0, lower, upper), found.x)
    minimum = _Minimum(
        values=values,
        matrix=np.asarray(found.jac),
        residuals=residuals(values),
        held=held,
        tolerance=JACOBIAN_RANK_TOLERANCE,
        converged=found.status > 0,
    )
    return _solution(minimum)


def t_quantile(probability: float, degrees_of_freedom: int) -> float:
    """Quantile of Student's t: what a standard error is multiplied by to make an interval."""
    from scipy.special import stdtrit  # noqa: PLC0415 - see the top

    return float(stdtrit(degrees_of_freedom, probability))


def _least_squares(
    matrix: FloatArray, target: FloatArray, lower: FloatArray | None
) -> tuple[FloatArray, BoolArray]:
    """The best values, and which of them a bound holds."""
    lengths = _column_lengths(matrix)
    values = np.linalg.lstsq(matrix / lengths, target, rcond=LINEAR_RANK_TOLERANCE)[0] / lengths
    held = np.zeros(len(values), dtype=bool)
    if lower is not None and len(target) > 0 and np.any(values < lower):
        from scipy.optimize import lsq_linear  # noqa: PLC0415 - see the top

        found = lsq_linear(matrix / lengths, target, (lower * lengths, np.inf), method="bvls")
        held = np.asarray(found.active_mask) != 0
        values = np.where(held, lower, found.x / lengths)
    return values, held


def _solution(minimum: _Minimum) -> Solution:
    points, parameter_count = minimum.matrix.shape
    rank, condition, identified = _spectrum(minimum)
    status = _status(minimum, rank)
    covariance = _covariance(minimum)
    errors: list[float | None] = [None] * parameter_count
    if covariance is not None:
        for index in np.flatnonzero(identified & ~minimum.held):
            errors[index] = float(np.sqrt(covariance[index, index]))
    return Solution(
        values=minimum.values,
        standard_errors=tuple(errors),
        covariance=covariance if status.is_usable else None,
        status=status,
        rank=rank,
        parameter_count=parameter_count,
        points=points,
        rmse=float(np.sqrt(np.mean(minimum.residuals**2))) if points else None,
        degrees_of_freedom=_degrees_of_freedom(minimum),
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
    """Rank, condition, and which parameters no unseen direction moves."""
    points, parameter_count = minimum.matrix.shape
    if points == 0:
        return 0, None, np.zeros(parameter_count, dtype=bool)
    _, singular, directions = np.linalg.svd(minimum.matrix / _column_lengths(minimum.matrix))
    rank = int(np.sum(singular > minimum.tolerance * singular[0]))
    condition = float(singular[0] / singular[-1]) if rank == parameter_count else None
    return rank, condition, np.linalg.norm(directions[rank:], axis=0) < NULL_SHARE


def _degrees_of_freedom(minimum: _Minimum) -> int:
    """Points less the parameters that were free to follow them."""
    points, parameter_count = minimum.matrix.shape
    return int(points - parameter_count + np.count_nonzero(minimum.held))


def _covariance(minimum: _Minimum) -> FloatArray | None:
    """``s**2 * (A^T A)^-1`` over the free parameters, ``s**2`` the residual variance.

    Through the pseudo-inverse, so that what a rank-deficient design does identify keeps its error.
    """
    freedom = _degrees_of_freedom(minimum)
    if len(minimum.residuals) == 0 or freedom <= 0:
        return None
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
