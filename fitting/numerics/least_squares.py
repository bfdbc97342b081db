"""Least squares with rank, bounds and covariance: the only module that imports scipy.

It imports scipy where it is used: that takes as long as all else that most commands import.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from fitting.numerics.arrays import FloatArray

BoolArray = NDArray[np.bool_]

# A direction of parameter space counts as seen when its singular value, with columns scaled to
# length 1, exceeds this share of the largest. Scaling makes the rank independent of units, and the
# condition nearly the least that any scaling gives (van der Sluis, Numer. Math. 14, 1969). Exact
# designs carry rounding of about 1e-15; three-point Jacobians an error of about 1e-10.
LINEAR_RANK_TOLERANCE = 1e-10
JACOBIAN_RANK_TOLERANCE = 1e-7
# A parameter takes part in an unseen direction when its share of it exceeds this. The others are
# identified, and keep their errors, though the design as a whole is rank-deficient.
NULL_SHARE = 1e-4
LEAST_UNIT = 1e-3  # of a value, as a part of its start: that which goes to zero keeps a magnitude
MOST_ITERATIONS = 1000  # for each parameter; the longest of NIST's problems takes 520
CORNER = 1e-9  # how far a corner of the planes may be off, as a part of a limit
LEAST_MARGIN = 1e-6  # of a row that agrees, as a part of its limit: touching is not agreeing


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
    more than ``tolerance``, as a part of it, or the sum by a thousandth of that: in a narrow valley
    the sum hardly falls far from the minimum. It does so twice, the second
    time scaled by the values that the first one found.
    """
    if len(residuals(start)) == 0:
        idle = np.zeros(len(start), dtype=bool)
        return _solution(_Minimum(start, np.zeros((0, len(start))), np.zeros(0), idle, 0.0))
    problem = _Nonlinear(residuals, lower, upper, tolerance)
    unit = np.where(start == 0, 1.0, np.abs(start))
    near = problem.minimum(start, unit).values
    return _solution(problem.minimum(near, np.maximum(np.abs(near), LEAST_UNIT * unit)))


@dataclass(frozen=True, slots=True)
class _Nonlinear:
    """Residuals, bounds and tolerance of ``solve_nonlinear``."""

    residuals: Callable[[FloatArray], FloatArray]
    lower: FloatArray
    upper: FloatArray
    tolerance: float

    def minimum(self, start: FloatArray, unit: FloatArray) -> _Minimum:
        """Minimise in scaled units: to scipy, 1 is large and 2e-16 is zero.

        Its steps for slopes are parts of ``max(1, |value|)``, and a gradient of less than 2e-16
        ends its search.
        """
        from scipy.optimize import least_squares  # noqa: PLC0415 - see the top

        size = float(np.linalg.norm(self.residuals(start))) or 1.0

        def scaled(parts: FloatArray) -> FloatArray:
            return self.residuals(parts * unit) / size

        with np.errstate(all="ignore"):  # a step that is tried may overflow: it is not taken
            found = least_squares(
                scaled,
                start / unit,
                jac="3-point",
                bounds=(self.lower / unit, self.upper / unit),
                x_scale="jac",
                ftol=self.tolerance / 1000,
                xtol=self.tolerance,
                gtol=np.finfo(float).eps,
                max_nfev=MOST_ITERATIONS * len(start),
            )
        held = np.asarray(found.active_mask) != 0
        values = np.where(
            held, np.where(found.active_mask < 0, self.lower, self.upper), found.x * unit
        )
        return _Minimum(
            values=values,
            matrix=np.asarray(found.jac) * size / unit,
            residuals=self.residuals(values),
            held=held,
            tolerance=JACOBIAN_RANK_TOLERANCE,
            converged=found.status > 0,
        )


def solve_most_agreed(at: FloatArray, beyond: FloatArray, limit: FloatArray) -> FloatArray:
    """The values ``v``, none below zero, with ``at @ v <= limit < beyond @ v`` for most rows.

    Of all that agree with as many, those in the middle: the least margin of any row that agrees, as
    a part of its limit, is the largest. A count does not care how wrong a row is, so no bad one
    pulls. It is exact: most rows agree at a corner, where as many planes meet as there are
    parameters, and all corners are looked at. Meant for some dozens of rows and three parameters.

    Args:
        at: (rows, parameters) what must be within the limit.
        beyond: (rows, parameters) what must not.
        limit: (rows,) above zero.

    Raises:
        ValueError: there are no rows, or a number is not finite.
    """
    if len(limit) == 0 or not all(np.all(np.isfinite(each)) for each in (at, beyond, limit)):
        raise ValueError("limits to agree with must be finite numbers, and at least one")
    lower, upper = at / limit[:, None], beyond / limit[:, None]
    below, above = 1 - LEAST_MARGIN, 1 + LEAST_MARGIN
    corners = _corners(np.vstack([lower / below, upper / above]))
    within = (corners @ lower.T <= below + CORNER) & (corners @ upper.T >= above - CORNER)
    counts = within.sum(axis=1)
    most = np.unique(within[counts == counts.max()], axis=0)
    return max((_middle(lower[rows], upper[rows]) for rows in most), key=lambda found: found[0])[1]


def _corners(planes: FloatArray) -> FloatArray:
    """(corners, parameters) where ``planes @ v = 1`` meet each other or zero, none below zero."""
    count, parameters = planes.shape
    walls = np.vstack([planes, np.eye(parameters)])
    heights = np.r_[np.ones(count), np.zeros(parameters)]
    sets = np.array(list(combinations(range(len(walls)), parameters)))
    meeting = walls[sets]
    scale = np.abs(meeting).max(axis=2, keepdims=True)
    apart = np.abs(np.linalg.det(meeting / np.where(scale > 0, scale, 1.0))) > LINEAR_RANK_TOLERANCE
    points = np.linalg.solve(meeting[apart], heights[sets[apart]][:, :, None])[:, :, 0]
    return np.asarray(points[(points >= -CORNER).all(axis=1)])


def _middle(lower: FloatArray, upper: FloatArray) -> tuple[float, FloatArray]:
    """The margin, and the values, where ``lower @ v <= 1 <= upper @ v`` by the most."""
    from scipy.optimize import linprog  # noqa: PLC0415 - see the top

    parameters = lower.shape[1]
    one = np.ones((len(lower), 1))
    found = linprog(
        np.r_[np.zeros(parameters), -1.0],
        A_ub=np.vstack([np.hstack([lower, one]), np.hstack([-upper, one])]),
        b_ub=np.r_[one[:, 0], -one[:, 0]],
    )
    values = np.asarray(found.x)
    return float(values[-1]), values[:-1]


def t_quantile(probability: float, degrees_of_freedom: float) -> float:
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
    scaled = minimum.matrix / _column_lengths(minimum.matrix)
    # All directions are needed only where points are fewer; else they would take points**2 numbers.
    _, singular, directions = np.linalg.svd(scaled, full_matrices=points < parameter_count)
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
