"""Robust fits of families with a known law, and of the paper's points."""

from dataclasses import replace

import numpy as np
import pytest
from builders.step_times import (
    OURS,
    Truth,
    fitted_law,
    made,
    noisy,
    visits,
    with_bad_points,
    work_of,
)
from scipy.optimize import least_squares

from fitting.laws.forms import SHAPES, FittedForm, Form, Sparsity, group_of
from fitting.laws.robust_fit import LEAST_SPREAD, NORMAL_MAD, fit_form, fit_values
from fitting.numerics.arrays import FloatArray
from fitting.numerics.least_squares import solve_linear
from fitting.paper.published import throughput_points
from fitting.points.step_time_rows import StepTimes

NOISE = 0.02


def _log_errors(fitted: FittedForm, truth: StepTimes) -> FloatArray:
    """Absolute error of the law in the logarithm, (rows,)."""
    return np.asarray(np.abs(np.log(fitted.seconds(truth) / truth.seconds)))


def _plain(form: Form, rows: StepTimes, truth: Truth) -> FloatArray:
    """Least squares of relative errors with the true exponent and scale, (rows,)."""
    shape = SHAPES[form]
    powered = work_of(shape, rows) ** shape.power
    columns = [np.ones(len(rows)), powered, powered * rows.sparsity]
    if truth.exponent is not None:
        columns = [columns[0], powered * rows.sparsity ** (truth.exponent * shape.power)]
    design, target = np.stack(columns, axis=1), rows.seconds**shape.power
    groups, seconds = group_of(form, rows), np.empty(len(rows))
    for name in np.unique(groups):
        own = groups == name
        weights = truth.rows.seconds[own] ** -shape.power
        solution = solve_linear(design[own], target[own], weights=weights)
        seconds[own] = np.maximum(design[own] @ solution.values, 1e-9) ** (1 / shape.power)
    return seconds


@pytest.mark.parametrize("form", Form)
def test_a_form_recovers_its_own_truth(form: Form) -> None:
    """Floors, slopes and the exponent return to nine digits, without suspects."""
    for seed in range(5):
        truth = made(form, np.random.default_rng(seed))
        fitted = fitted_law(form, truth.rows)
        assert fitted.values == pytest.approx(truth.values, rel=1e-9)
        if truth.exponent is not None:
            assert fitted.exponent == pytest.approx(truth.exponent, rel=1e-9)
        assert _log_errors(fitted, truth.rows).max() < 1e-10
        assert fitted.spread == LEAST_SPREAD
        assert not fitted.suspects.any()


@pytest.mark.parametrize("sigma", [0.02, 0.05])
@pytest.mark.parametrize("form", Form)
def test_errors_under_noise_agree_with_standard_errors(form: Form, sigma: float) -> None:
    """Over twenty families the errors have an RMS near one standard error and none beyond five."""
    off, off_exponent, spreads = [], [], []
    for seed in range(20):
        random = np.random.default_rng(seed)
        truth = made(form, random)
        fitted = fitted_law(form, noisy(truth.rows, random, sigma))
        off.append((fitted.values - truth.values) / fitted.standard_errors)
        spreads.append(fitted.spread)
        if truth.exponent is not None:
            assert fitted.exponent is not None
            assert fitted.exponent_error is not None
            off_exponent.append((fitted.exponent - truth.exponent) / fitted.exponent_error)
    assert 0.75 < np.sqrt(np.nanmean(np.square(off))) < 1.25
    assert np.nanmax(np.abs(off)) < 5
    assert np.mean(np.isnan(off)) < 0.02  # a value held at zero has no error
    assert np.median(spreads) == pytest.approx(sigma, rel=0.15)
    if off_exponent:
        assert np.sqrt(np.mean(np.square(off_exponent))) < 1.5


@pytest.mark.parametrize(("share", "tolerance"), [(0.1, 0.02), (0.2, 0.04)])
@pytest.mark.parametrize("form", OURS)
def test_bad_points_hardly_move_a_law(form: Form, share: float, tolerance: float) -> None:
    """Points that take three times as long in each series leave the mean error small."""
    ours, plain = [], []
    for seed in range(10):
        random = np.random.default_rng(seed)
        truth = made(form, random)
        rows, _ = with_bad_points(noisy(truth.rows, random, NOISE), random, share, 3.0)
        ours.append(_log_errors(fitted_law(form, rows), truth.rows).mean())
        plain.append(np.abs(np.log(_plain(form, rows, truth) / truth.rows.seconds)).mean())
    assert max(ours) < tolerance
    assert min(plain) > 2 * tolerance


@pytest.mark.parametrize("form", OURS)
def test_bad_points_that_crowd_a_series_do_not_set_the_spread(form: Form) -> None:
    """One random point in five takes three times as long; outliers have little weight."""
    for seed in range(10):
        random = np.random.default_rng(seed)
        truth = made(form, random)
        clean = noisy(truth.rows, random, NOISE)
        bad = random.random(len(clean)) < 0.2
        rows = replace(clean, seconds=clean.seconds * np.where(bad, 3.0, 1.0))
        assert _log_errors(fitted_law(form, rows), truth.rows).mean() < 0.038


@pytest.mark.parametrize("form", Form)
def test_a_point_measured_twice_is_two_points_that_agree(form: Form) -> None:
    """Doubling every point keeps the law and halves each leverage; repeats alone give no law."""
    random = np.random.default_rng(0)
    truth = made(form, random)
    twice = np.repeat(np.arange(len(truth.rows)), 2)
    once, again = (fitted_law(form, rows) for rows in (truth.rows, truth.rows.where(twice)))
    assert again.values == pytest.approx(once.values, rel=1e-9)
    assert again.leverages == pytest.approx(once.leverages[twice] / 2, rel=1e-6)
    alike = truth.rows.where(np.zeros(9, int))
    assert fit_form(form, alike) is None


@pytest.mark.parametrize("form", Form)
def test_the_order_of_points_does_not_matter(form: Form) -> None:
    """Shuffling rows, series and GPUs changes nothing."""
    random = np.random.default_rng(0)
    rows = noisy(made(form, random).rows, random, NOISE)
    order = random.permutation(len(rows))
    plain, shuffled = fitted_law(form, rows), fitted_law(form, rows.where(order))
    assert shuffled.values == pytest.approx(plain.values, rel=1e-9)
    assert shuffled.residuals == pytest.approx(plain.residuals[order], abs=1e-9)


@pytest.mark.parametrize("unit", [1e-6, 1e3])
@pytest.mark.parametrize("form", Form)
def test_a_unit_of_time_does_not_change_the_law(form: Form, unit: float) -> None:
    """Step times in microseconds or kiloseconds give the same law."""
    random = np.random.default_rng(1)
    rows = noisy(made(form, random).rows, random, 0.05)
    rows = replace(rows, seconds=rows.seconds * np.where(np.arange(len(rows)) == 7, 3.0, 1.0))
    plain = fitted_law(form, rows)
    other = fitted_law(form, replace(rows, seconds=rows.seconds * unit))
    assert other.seconds(rows) == pytest.approx(plain.seconds(rows) * unit, rel=1e-7)
    assert other.leverages == pytest.approx(plain.leverages, abs=1e-7)
    assert other.spread == pytest.approx(plain.spread)
    assert other.condition == pytest.approx(plain.condition)
    assert other.suspects.tolist() == plain.suspects.tolist()


def test_a_unit_of_work_does_not_change_the_law() -> None:
    """Counting thousands of tokens gives the same law."""
    random = np.random.default_rng(2)
    rows = noisy(made(Form.POOLED, random).rows, random, NOISE)
    thousands = replace(rows, tokens=rows.tokens / 1000)
    plain, other = fitted_law(Form.POOLED, rows), fitted_law(Form.POOLED, thousands)
    assert other.exponent == pytest.approx(plain.exponent)
    assert other.seconds(thousands) == pytest.approx(plain.seconds(rows))


@pytest.mark.parametrize("form", Form)
def test_at_one_sparsity_a_law_has_no_parameter_of_the_sparsity(form: Form) -> None:
    """Without two sparsities there is no exponent and no k1; the rest is exact."""
    truth = made(form, np.random.default_rng(3), visits(sparsities=(0.25,)))
    fitted = fitted_law(form, truth.rows)
    assert _log_errors(fitted, truth.rows).max() < 1e-9
    assert fitted.exponent is None
    groups = len(np.unique(group_of(form, truth.rows)))
    assert fitted.parameters == 2 * groups
    assert not fitted.values[:, 2:].any()


@pytest.mark.parametrize("form", [Form.POOLED, Form.POOLED_BY_SERIES])
def test_dense_points_that_are_missing_follow_from_the_family_s_others(form: Form) -> None:
    """The H100 was timed sparse only: the shared exponent predicts its dense step times."""
    random = np.random.default_rng(4)
    truth = made(form, random)
    timed = (truth.rows.gpu == "A40") | (truth.rows.sparsity < 1)
    exact = fitted_law(form, truth.rows.where(timed))
    assert _log_errors(exact, truth.rows).max() < 1e-9
    rough = fitted_law(form, noisy(truth.rows, random, NOISE).where(timed))
    assert _log_errors(rough, truth.rows)[~timed].max() < 0.05


@pytest.mark.parametrize("points", range(3, 31))
def test_any_number_of_points_makes_a_law_or_none(points: int) -> None:
    """From 3 to 30 points on one GPU, each form with more points than parameters is exact."""
    rows = visits(("A40",), (64,), (0.25, 1.0), tuple(range(1, 16)))
    order = np.random.default_rng(points).permutation(len(rows))[:points]
    for form in Form:
        truth = made(form, np.random.default_rng(points), rows).rows
        fitted = fit_form(form, truth.where(order))
        own = form in SHAPES and SHAPES[form].sparsity is Sparsity.OWN
        several = len(np.unique(truth.sparsity[order])) > 1
        needed = 3 + (own and several)
        if points < needed:
            assert fitted is None
        elif fitted is not None:
            assert _log_errors(fitted, truth.where(order)).max() < 1e-6
        else:
            assert points < 5


@pytest.mark.parametrize("form", Form)
def test_two_batch_sizes_make_a_law(form: Form) -> None:
    """One of them is timed twice, so that there are more points than parameters."""
    truth = made(form, np.random.default_rng(1), visits(("A40",), (64,), (1.0,), (1, 8)))
    fitted = fitted_law(form, truth.rows.where(np.array([0, 1, 1])))
    assert _log_errors(fitted, truth.rows).max() < 1e-9


@pytest.mark.parametrize("form", Form)
def test_a_group_with_too_few_points_has_no_prediction_while_others_do(form: Form) -> None:
    """A GPU with two points or none has no prediction; the others are exact."""
    truth = made(form, np.random.default_rng(5))
    few = np.char.startswith(truth.rows.gpu, "H100")
    few[np.flatnonzero(few)[[0, 3]]] = False
    rows = truth.rows.where(~few)
    fitted = fitted_law(form, rows)
    is_h100 = truth.rows.gpu == "H100"
    assert np.isnan(fitted.seconds(truth.rows)[is_h100]).all()
    assert _log_errors(fitted, truth.rows)[~is_h100].max() < 1e-9
    assert np.isnan(fitted.residuals[rows.gpu == "H100"]).all()
    assert np.isnan(fitted.left_out_residuals[rows.gpu == "H100"]).all()
    assert not fitted.suspects.any()
    never = replace(truth.rows, gpu=np.char.add(truth.rows.gpu, "x"))
    never = replace(never, series=np.char.add(never.series, "x"))
    assert np.isnan(fitted.seconds(never)).all()


@pytest.mark.parametrize("form", [Form.POOLED, Form.AFFINE_TOKENS])
def test_a_constant_number_of_tokens_does_not_identify_floor_and_slope(form: Form) -> None:
    """Batches of 8, 4 and 2 at lengths of 64, 128 and 256 are equal work."""
    batch, random = np.array([8.0, 4.0, 2.0] * 3), np.random.default_rng(6)
    rows = StepTimes(
        gpu=np.full(9, "A40"),
        series=np.array(["A40/64", "A40/128", "A40/256"] * 3),
        batch_size=batch,
        tokens=np.full(9, 512.0),
        sparsity=np.ones(9),
        seconds=random.lognormal(0, NOISE, 9),
    )
    assert fit_form(form, rows) is None


@pytest.mark.parametrize("form", OURS)
def test_a_floor_that_would_be_negative_is_held_at_zero(form: Form) -> None:
    """Step times that grow faster than the work have no floor and no standard error of it."""
    rows = visits(("A40",), (64,), (1.0,))
    fitted = fitted_law(form, replace(rows, seconds=rows.batch_size**1.3))
    assert fitted.values[0, 0] == 0
    assert np.isnan(fitted.standard_errors[0, 0])
    assert fitted.values[0, 1] > 0


def test_a_point_without_a_positive_rate_counts_as_an_error_of_100_percent() -> None:
    """A straight line through rates that leap at the end is negative at the first batch sizes."""
    rows = visits(("A40",), (64,), (1.0,), (1, 2, 4, 8, 16, 32))
    rows = replace(rows, seconds=rows.batch_size / np.array([*5 * [0.01], 5.0]))
    fitted = fitted_law(Form.LOGARITHM, rows)
    is_missing = np.isnan(fitted.residuals)
    assert is_missing.tolist() == [True, True, False, False, False, False]
    errors = np.where(is_missing, 1.0, np.abs(fitted.residuals))
    assert fitted.spread == pytest.approx(NORMAL_MAD * np.median(errors) * np.sqrt(6 / 4))


@pytest.mark.parametrize("form", Form)
def test_parts_fitted_at_once_are_as_if_each_were_fitted_alone(form: Form) -> None:
    """Parts may overlap, lack a GPU or a sparsity, or identify nothing."""
    random = np.random.default_rng(0)
    rows = noisy(made(form, random).rows, random, NOISE)
    parts = [
        np.ones(len(rows), bool),
        rows.batch_size < 12,
        rows.gpu != "A40",
        rows.sparsity == 1,
        rows.batch_size == 1,
    ]
    for part, fit in zip(parts, fit_values(form, rows, parts), strict=True):
        alone = fit_form(form, rows.where(part))
        assert (fit is None) == (alone is None)
        if fit is not None and alone is not None:
            assert fit.seconds(rows) == pytest.approx(alone.seconds(rows), rel=1e-5, nan_ok=True)
            assert (fit.exponent is None) == (alone.exponent is None)


@pytest.mark.parametrize("model", ["mixtral-8x7b", "blackmamba-2.8b"])
@pytest.mark.parametrize("form", Form)
def test_every_law_is_identifiable_on_the_paper_s_points(form: Form, model: str) -> None:
    """Scaled terms of each group are far from parallel, and every group is identified."""
    points = throughput_points()
    fitted = fitted_law(form, points.rows.where(points.model == model))
    assert fitted.condition < 12
    assert np.isfinite(fitted.values).all()
    if form is not Form.LOGARITHM:
        assert np.isfinite(fitted.standard_errors[fitted.values > 0]).all()


@pytest.mark.parametrize("model", ["mixtral-8x7b", "blackmamba-2.8b"])
@pytest.mark.parametrize("form", OURS)
def test_no_general_solver_gets_below_the_loss_of_a_fit(form: Form, model: str) -> None:
    """scipy, started at the fit with its spread, stays there: the fit is a minimum."""
    points = throughput_points()
    rows = points.rows.where(points.model == model)
    _assert_least_loss(fitted_law(form, rows), rows)


@pytest.mark.parametrize("form", [Form.POOLED, Form.POOLED_BY_SERIES])
def test_a_fit_with_a_floor_at_zero_is_a_minimum(form: Form) -> None:
    """The A40's steps grow faster than the work: its floor is zero, the exponent still free."""
    random = np.random.default_rng(0)
    rows = noisy(made(form, random).rows, random, NOISE)
    bent = np.where(rows.gpu == "A40", rows.tokens**1.3 * rows.sparsity**0.2 / 1e4, rows.seconds)
    rows = replace(rows, seconds=bent)
    fitted = fitted_law(form, rows)
    assert (fitted.values == 0).any()
    assert fitted.exponent_error is not None
    _assert_least_loss(fitted, rows)


def _assert_least_loss(fitted: FittedForm, rows: StepTimes) -> None:
    """Check that scipy, started at a fit with its spread, does not leave it."""
    free = fitted.values > 0
    start = fitted.values[free]
    exponent = [] if fitted.exponent is None else [fitted.exponent]

    def residuals(scales: FloatArray) -> FloatArray:
        values = fitted.values.copy()
        values[free] = start * scales[: len(start)]
        shared = None if fitted.exponent is None else fitted.exponent * float(scales[-1])
        law = replace(fitted, values=values, exponent=shared)
        return np.asarray(np.log(law.seconds(rows) / rows.seconds))

    least = least_squares(
        residuals,
        np.ones(len(start) + len(exponent)),
        bounds=(0.0, np.inf),
        loss="soft_l1",
        f_scale=fitted.spread,
    )
    loss = 2 * (np.sqrt(1 + (residuals(np.ones(len(least.x))) / fitted.spread) ** 2) - 1)
    assert least.cost == pytest.approx(fitted.spread**2 * loss.sum() / 2, rel=1e-6)
    assert least.x == pytest.approx(1.0, abs=1e-3)
