"""The solvers against certified answers, and their status where there is no answer."""

import numpy as np
import pytest

from fitting.numerics import least_squares as solve
from fitting.numerics.arrays import FloatArray
from fitting.numerics.least_squares import (
    Solution,
    Status,
    solve_linear,
    solve_most_agreed,
    solve_nonlinear,
    t_quantile,
)

# NIST StRD, linear regression, Norris (y, x):
# https://www.itl.nist.gov/div898/strd/lls/data/LINKS/DATA/Norris.dat
NORRIS_TEXT = """
    0.1 0.2  338.8 337.4  118.1 118.2  888.0 884.6  9.2 10.1  228.1 226.5  668.5 666.3  998.5 996.3
    449.1 448.6  778.9 777.0  559.2 558.2  0.3 0.4  0.1 0.6  778.1 775.5  668.8 666.9  339.3 338.0
    448.9 447.5  10.8 11.6  557.7 556.0  228.3 228.1  998.0 995.8  888.8 887.6  119.6 120.2
    0.3 0.3  0.6 0.3  557.6 556.8  339.3 339.1  888.0 887.2  998.5 999.0  778.9 779.0  10.2 11.1
    117.6 118.3  228.9 229.2  668.4 669.1  449.2 448.9  0.2 0.5
"""

# NIST StRD, nonlinear regression, Misra1a (y, x):
# https://www.itl.nist.gov/div898/strd/nls/data/LINKS/DATA/Misra1a.dat
MISRA1A_TEXT = """
    10.07 77.6  14.73 114.9  17.94 141.1  23.93 190.8  29.61 239.9  35.18 289.0  40.02 332.8
    44.82 378.4  50.76 434.8  55.05 477.3  61.01 536.8  66.40 593.1  75.47 689.1  81.78 760.0
"""


NORRIS, MISRA1A = (
    np.array(text.split(), dtype=float).reshape(-1, 2) for text in (NORRIS_TEXT, MISRA1A_TEXT)
)


def _line(x: list[float]) -> np.ndarray:
    return np.stack([np.ones(len(x)), np.array(x)], axis=-1)


def test_linear_solution_has_the_certified_digits_of_norris() -> None:
    """Values, standard errors and residual deviation agree to eleven of NIST's fifteen digits."""
    y, x = NORRIS.T
    solution = solve_linear(_line(list(x)), y)
    assert solution.status is Status.OK
    assert solution.values == pytest.approx([-0.262323073774029, 1.00211681802045], rel=1e-11)
    certified = pytest.approx([0.232818234301152, 0.429796848199937e-03], rel=1e-11)
    assert list(solution.standard_errors) == certified
    assert solution.degrees_of_freedom == 34
    assert solution.rmse is not None
    assert solution.rmse * np.sqrt(36 / 34) == pytest.approx(0.884796396144373, rel=1e-11)


@pytest.mark.parametrize("start", [(500.0, 0.0001), (250.0, 0.0005)])
def test_nonlinear_solution_has_the_certified_digits_of_misra1a(
    start: tuple[float, float],
) -> None:
    """From both of NIST's starts values agree to six digits and standard errors to four."""
    y, x = MISRA1A.T
    solution = solve_nonlinear(
        lambda b: b[0] * (1 - np.exp(-b[1] * x)) - y,
        np.array(start),
        lower=np.zeros(2),
        upper=np.full(2, np.inf),
    )
    assert solution.status is Status.OK
    assert solution.values == pytest.approx([2.3894212918e02, 5.5015643181e-04], rel=1e-6)
    certified = pytest.approx([2.7070075241, 7.2668688436e-06], rel=1e-4)
    assert list(solution.standard_errors) == certified


def test_parameters_that_the_points_cannot_separate_are_a_rank_deficiency() -> None:
    """Two proportional columns have no standard errors; the column beside them keeps its own."""
    x = np.arange(1.0, 7.0)
    noise = np.array([0.1, -0.1, 0.0, 0.1, -0.1, 0.0])
    solution = solve_linear(np.stack([np.ones(6), x, 0.25 * x], axis=-1), 2 + 3 * x + noise)
    assert solution.status is Status.RANK_DEFICIENT
    assert (solution.rank, solution.parameter_count) == (2, 3)
    assert solution.standard_errors[0] is not None
    assert solution.standard_errors[1:] == (None, None)
    assert solution.covariance is None
    assert solution.condition is None


def test_a_nonlinear_law_of_a_ratio_is_rank_deficient() -> None:
    """C2 and C3 of Eq. 2 as printed: scipy reports success, the rank is 1 of 2."""
    batch = np.array([1.0, 2.0, 4.0, 8.0])
    solution = solve_nonlinear(
        lambda c: c[0] / c[1] * np.log(batch) - 0.2 * np.log(batch) ** 1.1,
        np.array([1.0, 1.8]),
        lower=np.full(2, 1e-3),
        upper=np.full(2, 1e3),
    )
    assert solution.status is Status.RANK_DEFICIENT
    assert solution.rank == 1
    assert solution.standard_errors == (None, None)


def test_a_column_of_zeros_is_a_rank_deficiency() -> None:
    """A parameter that no point depends on is not reported as measured at 0."""
    design = np.stack([np.ones(4), np.zeros(4)], axis=-1)
    solution = solve_linear(design, np.array([1.0, 1.1, 0.9, 1.0]))
    assert solution.status is Status.RANK_DEFICIENT
    assert solution.standard_errors[1] is None


def test_a_parameter_pressed_against_its_bound_is_held_there_without_an_error() -> None:
    """Its standard error is absent, and the others are those of the law without it."""
    x, y = [1.0, 2.0, 3.0, 4.0], np.array([0.8, 1.9, 2.8, 3.9])
    solution = solve_linear(_line(x), y, lower=np.zeros(2))
    alone = solve_linear(_line(x)[:, 1:], y)
    assert solution.status is Status.BOUND_HIT
    assert solution.values.tolist() == pytest.approx([0.0, alone.values[0]])
    assert solution.standard_errors[0] is None
    assert solution.standard_errors[1] == pytest.approx(alone.standard_errors[0])
    assert solution.degrees_of_freedom == alone.degrees_of_freedom == 3


def test_a_bound_holds_a_nonlinear_parameter_too() -> None:
    """A minimum outside the bounds ends exactly on a bound."""
    x = np.array([1.0, 2.0, 3.0])
    solution = solve_nonlinear(
        lambda v: v[0] * x - 2 * x + 0.01 * np.cos(x),
        np.array([0.5]),
        lower=np.zeros(1),
        upper=np.ones(1),
    )
    assert solution.status is Status.BOUND_HIT
    assert solution.values.tolist() == [1.0]
    assert solution.standard_errors == (None,)


@pytest.mark.parametrize(
    ("count", "status"),
    [(0, Status.NO_DATA), (1, Status.TOO_FEW_POINTS), (2, Status.TOO_FEW_POINTS), (3, Status.OK)],
)
def test_no_more_points_than_parameters_is_not_a_fit(count: int, status: Status) -> None:
    """A line through two points has no residual to judge it by, in either solver."""
    x, y = [1.0, 2.0, 3.0][:count], np.array([1.0, 2.1, 2.9])[:count]
    linear = solve_linear(_line(x), y)
    nonlinear = solve_nonlinear(
        lambda v: _line(x) @ v - y,
        np.array([0.5, 0.5]),
        lower=np.full(2, -9.0),
        upper=np.full(2, 9.0),
    )
    assert linear.status is nonlinear.status is status
    assert linear.points == nonlinear.points == count


def test_weights_divide_by_the_expected_error() -> None:
    """A point of weight 2 counts as four equal points of weight 1."""
    once = solve_linear(np.ones((2, 1)), np.array([1.0, 2.0]), weights=np.array([2.0, 1.0]))
    assert once.values.tolist() == pytest.approx([(4 * 1 + 2) / 5])


def test_scaling_a_column_changes_neither_rank_nor_condition() -> None:
    """Seconds or nanoseconds: a unit does not make a parameter unidentifiable."""
    y, x = NORRIS.T
    plain, scaled = (solve_linear(_line(list(x)) * [1, unit], y) for unit in (1.0, 1e-12))
    assert scaled.status is Status.OK
    assert scaled.condition == pytest.approx(plain.condition)


def test_a_number_that_is_not_finite_is_refused() -> None:
    """The error names it before it spreads to every parameter."""
    with pytest.raises(ValueError, match="finite"):
        solve_linear(np.ones((2, 1)), np.array([1.0, np.nan]))


def test_t_quantile_is_that_of_the_tables() -> None:
    """97.5 % at 4 degrees of freedom is 2.776."""
    assert t_quantile(0.975, 4) == pytest.approx(2.7764451, rel=1e-7)


def _saturation(start: tuple[float, float], *, unit: float = 1.0) -> Solution:
    """Solution of Misra1a without bounds from a start, with y in another unit."""
    y, x = MISRA1A.T
    return solve_nonlinear(
        lambda b: b[0] * (1 - np.exp(-b[1] * x)) - y * unit,
        np.array([start[0] * unit, start[1]]),
        lower=np.full(2, -np.inf),
        upper=np.full(2, np.inf),
    )


@pytest.mark.parametrize("unit", [1e-12, 1e-3, 1e9])
def test_a_unit_does_not_change_a_nonlinear_solution(unit: float) -> None:
    """Step sizes and stopping rules are relative: values of 1e-12 have all digits."""
    plain, scaled = _saturation((250.0, 5e-4)), _saturation((250.0, 5e-4), unit=unit)
    assert scaled.status is Status.OK
    assert scaled.values / [unit, 1] == pytest.approx(plain.values, rel=1e-7)
    errors = np.array(scaled.standard_errors, float) / [unit, 1]
    assert errors == pytest.approx(np.array(plain.standard_errors, float), rel=1e-6)


@pytest.mark.parametrize("start", [(2e4, 5e-3), (250.0, 1e-7), (1.0, 1e-4)])
def test_a_start_that_is_far_off_costs_no_digits(start: tuple[float, float]) -> None:
    """Derivatives use steps relative to the current values, not to the start."""
    solution = _saturation(start)
    assert solution.status is Status.OK
    assert solution.values == pytest.approx([2.3894212918e02, 5.5015643181e-04], rel=1e-7)
    certified = pytest.approx([2.7070075241, 7.2668688436e-06], rel=1e-6)
    assert list(solution.standard_errors) == certified


def test_a_value_that_is_zero_keeps_its_standard_error() -> None:
    """Without bounds, a slope of zero has the linear solution's value and error."""
    x = np.arange(-5.0, 6.0)
    even = 3 + 0.1 * np.cos(np.pi * x)
    linear = solve_linear(_line(list(x)), even)
    free = np.full(2, np.inf)
    solution = solve_nonlinear(
        lambda v: _line(list(x)) @ v - even, np.array([1.0, 1.0]), lower=-free, upper=free
    )
    assert solution.status is Status.OK
    assert solution.values == pytest.approx(linear.values, abs=1e-12)
    errors = np.array(linear.standard_errors, float)
    assert np.array(solution.standard_errors, float) == pytest.approx(errors, rel=1e-6)


def test_a_search_that_runs_out_is_not_converged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The point where the iterations ended is not reported as an answer."""
    monkeypatch.setattr(solve, "MOST_ITERATIONS", 1)
    solution = _saturation((1.0, 1e-4))
    assert solution.status is Status.NOT_CONVERGED
    assert solution.covariance is None


def _agreeing(at: FloatArray, beyond: FloatArray, limit: FloatArray, values: FloatArray) -> int:
    return int(np.sum((at @ values <= limit) & (limit < beyond @ values)))


@pytest.mark.parametrize("parameters", [1, 2, 3])
@pytest.mark.parametrize("wrong", [0, 3])
def test_the_solution_agrees_with_as_many_rows_as_possible(parameters: int, wrong: int) -> None:
    """It agrees with at least as many rows as the truth and thousands of values around it."""
    random = np.random.default_rng(parameters)
    for _ in range(10):
        terms = random.uniform(0.2, 2.0, (12, parameters))
        truth = random.uniform(0.5, 2.0, parameters)
        limit = random.uniform(20, 60, 12)
        counts = np.floor(limit / (terms @ truth))
        counts[:wrong] += [4, -4, 9][:wrong]
        at, beyond = counts[:, None] * terms, (counts + 1)[:, None] * terms
        result = solve_most_agreed(at, beyond, limit)
        agreeing = _agreeing(at, beyond, limit, result)
        others = truth * random.lognormal(0, 0.1, (2000, parameters))
        tries = [_agreeing(at, beyond, limit, values) for values in (truth, *others)]
        assert agreeing >= max(tries) >= 12 - wrong
        assert (result >= 0).all()


def test_rows_that_only_touch_do_not_agree() -> None:
    """Limits of 3 and 4 meet in one plane, where neither holds."""
    at = np.array([[3.0], [3.0], [4.0], [4.0], [4.0], [3.2], [3.2]])
    beyond = np.array([[4.0], [4.0], [5.0], [5.0], [5.0], [3.5], [3.5]])
    limit = np.full(7, 12.0)
    assert _agreeing(at, beyond, limit, solve_most_agreed(at, beyond, limit)) == 4


def test_the_solution_is_central_among_agreeing_values() -> None:
    """For 2 v <= 6 < 3 v it is v = 2.4, central relative to the limit."""
    result = solve_most_agreed(np.array([[2.0]]), np.array([[3.0]]), np.array([6.0]))
    assert result.tolist() == pytest.approx([2.4])


def test_the_unit_of_a_row_does_not_matter() -> None:
    """A row in GiB is equivalent to the same row in bytes."""
    terms = np.array([[1.0, 0.3], [1.0, 1.1], [1.0, 2.0], [1.0, 0.9]])
    limit = np.array([10.0, 30.0, 50.0, 33.0])
    at, beyond = terms * [1.0, 20.0], terms * [1.0, 30.0]
    unit = np.array([1.0, 2.0**30, 1e-6, 1.0])
    plain = solve_most_agreed(at, beyond, limit)
    scaled = solve_most_agreed(at * unit[:, None], beyond * unit[:, None], limit * unit)
    assert scaled == pytest.approx(plain, rel=1e-9)


@pytest.mark.parametrize("limit", [[], [np.nan]])
def test_missing_or_non_finite_limits_are_refused(limit: list[float]) -> None:
    """Both raise ValueError."""
    rows = np.ones((len(limit), 1))
    with pytest.raises(ValueError, match="finite"):
        solve_most_agreed(rows, 2 * rows, np.array(limit))
