"""Conformal prediction intervals of step times, with a scale for each series.

The method is locally weighted conformal prediction (Lei et al., JASA 113, 2018) with leave-one-out
residuals: each residual is divided by the scale of its series, and the quantile of all of them is
the half-width in units of the scale. Errors need not be normal, but points to predict must be
exchangeable with measured ones: nothing is claimed beyond their range. The variance of a series is
shrunk towards that of the family, which counts as ``BORROWED`` points (Smyth, 2004).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fitting.numerics.arrays import FloatArray, IntArray, NameArray
from fitting.numerics.least_squares import t_quantile

LEVEL = 0.9  # nominal coverage of an interval
MOST_JUDGED = 500  # points that a coverage is estimated from: 90 % with a standard error of 1.3 %
BORROWED = 4.0  # number of points that the family's scale counts as in the scale of a series


@dataclass(frozen=True, slots=True)
class Scales:
    """Scales of the residuals of a law, by series.

    Attributes:
        sigmas: scales of ``log(fitted / measured)`` by series:
            ``sigma**2 = (4 g**2 + sum r**2) / (4 + n)``, with g the family's root mean square and r
            the n residuals of the series.
        family: g, the scale of a series without points.
        scores: (points,) sorted absolute residuals, each over a scale that leaves it out.
        most: largest absolute residual.
    """

    sigmas: Mapping[str, float]
    family: float
    scores: FloatArray
    most: float

    def sigma(self, series: str | None) -> float:
        """Scale of a series; the family's for None or a series without points."""
        return self.family if series is None else self.sigmas.get(series, self.family)

    def half_width(self, series: str | None, level: float) -> float:
        """Half-width of the interval of the logarithm of a step time at a level, such as 0.9."""
        return _half_width(self.scores, self.most, self.sigma(series), level)


def scales(series: NameArray, residuals: FloatArray) -> Scales | None:
    """Estimate the scales of leave-one-out residuals; None for fewer than two residuals.

    Args:
        series: (points,) names.
        residuals: (points,) ``log(fitted / measured)``; nan is left out.
    """
    is_finite = np.isfinite(residuals)
    series, residuals = series[is_finite], residuals[is_finite]
    if len(residuals) < 2:
        return None
    names, at = np.unique(series, return_inverse=True)
    sigmas, family, scores = _scaled(np.asarray(at, np.int64), residuals**2, len(names))
    by_series = dict(zip(names.tolist(), sigmas.tolist(), strict=True))
    return Scales(by_series, family, np.sort(scores), most=float(np.abs(residuals).max()))


def _scaled(at: IntArray, squares: FloatArray, count: int) -> tuple[FloatArray, float, FloatArray]:
    """Scales of the series, scale of the family, and (points,) scores of squared residuals."""
    total, points = squares.sum(), len(squares)
    own = np.bincount(at, weights=squares, minlength=count)
    sizes = np.bincount(at, minlength=count)
    family = total / points
    others = (total - squares) / (points - 1)
    without = (BORROWED * others + own[at] - squares) / (BORROWED + sizes[at] - 1)
    scores = np.sqrt(squares / np.maximum(without, 1e-12))
    sigmas = np.sqrt((BORROWED * family + own) / (BORROWED + sizes))
    return sigmas, float(np.sqrt(family)), scores


def _half_width(scores: FloatArray, most: float, sigma: float, level: float) -> float:
    """Scale times the conformal quantile, the ``ceil((n + 1) level)``-th of n scores.

    It is at most the largest residual, which a new one exceeds once in n + 1: a bad point inflates
    its score and the scale of its series alike. Where the scores are too few for the quantile,
    Student's t with as many degrees of freedom stands in for it.
    """
    place = int(np.ceil((len(scores) + 1) * level))
    if place <= len(scores):
        return min(float(np.partition(scores, place - 1)[place - 1]) * sigma, most)
    return t_quantile((1 + level) / 2, max(len(scores) - 1, 1)) * sigma


def coverage(series: NameArray, residuals: FloatArray, level: float) -> tuple[float, FloatArray]:
    """Share of points inside intervals made without them, and (judged,) the half-widths.

    The interval of a point uses neither its residual for the scale nor its score for the quantile.
    At most ``MOST_JUDGED`` points, evenly spread, are judged.

    Args:
        series: (points,) names.
        residuals: (points,) ``log(fitted / measured)``; nan is left out, three must remain.
        level: nominal coverage.
    """
    is_finite = np.isfinite(residuals)
    names, at = np.unique(series[is_finite], return_inverse=True)
    squares = residuals[is_finite] ** 2
    points = np.arange(len(squares))
    judged = np.unique(np.linspace(0, len(points) - 1, min(len(points), MOST_JUDGED)).astype(int))
    widths = np.empty(len(judged))
    for place, point in enumerate(judged):
        others = points != point
        sigmas, _, scores = _scaled(at[others], squares[others], len(names))
        most = float(np.sqrt(squares[others].max()))
        widths[place] = _half_width(scores, most, float(sigmas[at[point]]), level)
    return float(np.mean(np.sqrt(squares[judged]) <= widths)), widths
