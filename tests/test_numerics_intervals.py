"""Coverage of intervals on series whose errors are known."""

from collections.abc import Callable

import numpy as np
import pytest

from fitting.numerics.arrays import FloatArray, NameArray
from fitting.numerics.intervals import Scales, coverage, scales
from fitting.numerics.least_squares import t_quantile

Draw = Callable[[np.random.Generator, FloatArray], FloatArray]


def _normal(random: np.random.Generator, sigmas: FloatArray) -> FloatArray:
    return np.asarray(random.normal(0, sigmas))


def _heavy_tailed(random: np.random.Generator, sigmas: FloatArray) -> FloatArray:
    return np.asarray(random.standard_t(4, len(sigmas)) * sigmas)


def _family(
    random: np.random.Generator, draw: Draw, *, series: int, points: int
) -> tuple[NameArray, FloatArray, FloatArray]:
    """Names of series, their residuals, and fresh residuals with the same scales."""
    names = np.repeat([f"series {n}" for n in range(series)], points)
    sigmas = np.repeat(0.03 * random.lognormal(0, 0.7, series), points)
    return names, draw(random, sigmas), draw(random, sigmas)


def _scales(series: NameArray, residuals: FloatArray) -> Scales:
    result = scales(series, residuals)
    assert result is not None
    return result


@pytest.mark.parametrize("level", [0.8, 0.9])
@pytest.mark.parametrize("draw", [_normal, _heavy_tailed])
@pytest.mark.parametrize(("series", "points"), [(8, 12), (5, 6), (1, 20)])
def test_intervals_have_their_nominal_coverage(
    level: float, draw: Draw, series: int, points: int
) -> None:
    """Over many families coverage is within 3 points of the level, for normal and heavy tails."""
    random = np.random.default_rng(0)
    held, coverages = [], []
    for _ in range(150):
        names, residuals, new = _family(random, draw, series=series, points=points)
        result = _scales(names, residuals)
        widths = np.array([result.half_width(str(name), level) for name in names])
        held.append(np.mean(np.abs(new) <= widths))
        coverages.append(coverage(names, residuals, level)[0])
    assert np.mean(held) == pytest.approx(level, abs=0.03)
    assert np.mean(coverages) == pytest.approx(level, abs=0.03)


def test_interval_widths_follow_the_noise_of_each_series() -> None:
    """With scales ten times apart both series keep at least about their nominal coverage."""
    random = np.random.default_rng(1)
    names = np.repeat(["steady", "unsteady"], 15)
    sigmas = np.repeat([0.01, 0.1], 15)
    held, ratio = [], []
    for _ in range(300):
        result = _scales(names, random.normal(0, sigmas))
        widths = np.array([result.half_width(str(name), 0.9) for name in names])
        held.append(np.abs(random.normal(0, sigmas)) <= widths)
        ratio.append(widths[-1] / widths[0])
    steady, unsteady = np.mean(held, axis=0).reshape(2, 15).mean(axis=1)
    assert steady > 0.9
    assert unsteady > 0.8
    assert np.median(ratio) > 2


def test_a_series_that_was_never_seen_has_the_family_s_scale() -> None:
    """The scale of an unmeasured series lies between those of the others."""
    names = np.repeat(["a", "b"], 10)
    residuals = np.random.default_rng(2).normal(0, np.repeat([0.01, 0.1], 10))
    result = _scales(names, residuals)
    assert result.half_width("a", 0.8) < result.half_width("c", 0.8) < result.half_width("b", 0.8)
    assert result.family == pytest.approx(np.sqrt(np.mean(residuals**2)))


def test_a_unit_and_the_order_of_errors_do_not_matter() -> None:
    """Ten times the errors make ten times the interval, in any order."""
    random = np.random.default_rng(3)
    names, residuals, _ = _family(random, _normal, series=3, points=8)
    order = random.permutation(len(names))
    plain, tenfold = _scales(names, residuals), _scales(names[order], 10 * residuals[order])
    for name in np.unique(names):
        for level in (0.5, 0.9, 0.99):
            width = plain.half_width(str(name), level)
            assert tenfold.half_width(str(name), level) == pytest.approx(10 * width)


def test_a_higher_level_is_never_a_narrower_interval() -> None:
    """Half widths are sorted by level where the scores have a quantile."""
    names, residuals, _ = _family(np.random.default_rng(4), _normal, series=3, points=10)
    result = _scales(names, residuals)
    widths = [result.half_width("series 1", level) for level in np.arange(0.05, 0.96, 0.05)]
    assert widths == sorted(widths)


def test_few_points_have_student_s_interval() -> None:
    """Three points have no 90 % quantile: the interval is t at two degrees of freedom."""
    residuals = np.array([0.02, -0.03, 0.01])
    result = _scales(np.array(["a", "a", "a"]), residuals)
    sigma = np.sqrt(np.mean(residuals**2))
    assert result.half_width("a", 0.9) == pytest.approx(t_quantile(0.95, 2) * sigma)


def test_missing_residuals_are_ignored() -> None:
    """Residuals that are nan are ignored; fewer than two give no scale."""
    names = np.array(["a", "a", "b", "b"])
    residuals = np.array([0.01, np.nan, -0.02, 0.03])
    finite = np.isfinite(residuals)
    result, alone = _scales(names, residuals), _scales(names[finite], residuals[finite])
    assert result.scores.tolist() == alone.scores.tolist()
    assert result.sigmas == alone.sigmas
    assert scales(names, np.array([0.1, np.nan, np.nan, np.nan])) is None


def test_a_point_is_not_in_its_own_interval() -> None:
    """A residual of 1 among others of 0.01 is outside, as it does not enter its own width."""
    residuals = np.random.default_rng(5).normal(0, 0.01, 21)
    _, before = coverage(np.full(21, "a"), residuals, 0.9)
    residuals[7] = 1.0
    inside, widths = coverage(np.full(21, "a"), residuals, 0.9)
    assert widths[7] == before[7] < 0.03
    assert inside < 1
