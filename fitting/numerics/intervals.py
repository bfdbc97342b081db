"""Conformal prediction intervals of step times, with a scale for each series.

Residuals of left-out points, each divided by the scale of its series, are pooled, and their
quantile is the half-width in units of that scale: locally weighted conformal prediction (Lei et
al., JASA 113, 2018, section 5.2), with residuals that leave one point out. It needs no normal
errors, only points to predict that are exchangeable with those measured; nothing is claimed beyond
their range. A series of few points borrows from all: its variance is a weighted mean of its own and
the family's, as if the latter were ``BORROWED`` points more (Smyth, 2004).
"""

from dataclasses import dataclass

import numpy as np

from fitting.numerics.arrays import FloatArray, IntArray, NameArray
from fitting.numerics.least_squares import t_quantile

LEVEL = 0.9  # nominal coverage of an interval
MOST_JUDGED = 500  # points that a coverage is estimated from: 90 % to within 1.3
BORROWED = 4.0  # points that the family's scale counts as, in that of a series


@dataclass(frozen=True, slots=True)
class Scales:
    """Scales of the residuals of a law, by series.

    Attributes:
        names: (series,) sorted.
        sigmas: (series,) of ``log(fitted / measured)``:
            ``sigma**2 = (4 g**2 + sum r**2) / (4 + n)``, with g the family's root mean square and r
            the n residuals of the series.
        family: g, for a series that was never seen.
        scores: (points,) residuals over their scale, each by a scale that leaves it out; sorted.
        most: the largest residual.
    """

    names: NameArray
    sigmas: FloatArray
    family: float
    scores: FloatArray
    most: float

    def sigma(self, series: str | None) -> float:
        """Scale of a series, or of a new one."""
        if series is None:
            return self.family
        at = int(np.searchsorted(self.names, series))
        known = at < len(self.names) and self.names[at] == series
        return float(self.sigmas[at]) if known else self.family

    def half_width(self, series: str | None, level: float) -> float:
        """Half the interval of the logarithm of a step time at a level, for example 0.9."""
        return _half_width(self.scores, self.most, self.sigma(series), level)


def scales(series: NameArray, residuals: FloatArray) -> Scales | None:
    """The scales of residuals, each of a point that its law had not seen; None of fewer than two.

    Args:
        series: (points,) names.
        residuals: (points,) ``log(fitted / measured)``; nan is left out.
    """
    seen = np.isfinite(residuals)
    series, residuals = series[seen], residuals[seen]
    if len(residuals) < 2:
        return None
    names, at = np.unique(series, return_inverse=True)
    sigmas, family, scores = _scaled(np.asarray(at, np.int64), residuals**2, len(names))
    most = float(np.abs(residuals).max())
    return Scales(names=names, sigmas=sigmas, family=family, scores=np.sort(scores), most=most)


def _scaled(at: IntArray, squares: FloatArray, count: int) -> tuple[FloatArray, float, FloatArray]:
    """The sigmas of so many series, the family's, and the scores, from squared residuals."""
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
    """The conformal quantile, the ``ceil((n + 1) level)``-th of n scores, times the scale.

    No more than the largest residual, within which a new one is n times in n + 1: one bad point has
    both a score and, in its series, a scale that are too large. With too few scores to have a
    quantile, Student's t of as many stands for it.
    """
    place = int(np.ceil((len(scores) + 1) * level))
    if place <= len(scores):
        return min(float(np.partition(scores, place - 1)[place - 1]) * sigma, most)
    return t_quantile((1 + level) / 2, max(len(scores) - 1, 1)) * sigma


def coverage(series: NameArray, residuals: FloatArray, level: float) -> tuple[float, FloatArray]:
    """How often the interval made without a point holds it, and (judged,) the half-widths.

    Nothing of a point is in its own interval: neither its residual in the scale, nor its score in
    the quantile. Of more than ``MOST_JUDGED`` points as many are judged, evenly spread.

    Args:
        series: (points,) names.
        residuals: (points,) ``log(fitted / measured)``; nan is left out, and three must be left.
        level: how often it should.
    """
    seen = np.isfinite(residuals)
    names, at = np.unique(series[seen], return_inverse=True)
    squares = residuals[seen] ** 2
    points = np.arange(len(squares))
    judged = np.unique(np.linspace(0, len(points) - 1, min(len(points), MOST_JUDGED)).astype(int))
    widths = np.empty(len(judged))
    for place, point in enumerate(judged):
        others = points != point
        sigmas, _, scores = _scaled(at[others], squares[others], len(names))
        most = float(np.sqrt(squares[others].max()))
        widths[place] = _half_width(scores, most, float(sigmas[at[point]]), level)
    return float(np.mean(np.sqrt(squares[judged]) <= widths)), widths
