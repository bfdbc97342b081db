"""Diagnostics and predictions of fitted forms: suspects, left-out residuals, condition."""

from dataclasses import replace

import numpy as np
import pytest
from builders.step_times import (
    BATCHES,
    OURS,
    fitted_law,
    made,
    noisy,
    visits,
    with_bad_points,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from fitting.laws.forms import Form
from fitting.laws.model_selection import held_out_residuals
from fitting.laws.robust_fit import fit_form
from fitting.points.step_time_rows import StepTimes

NOISE = 0.02


@pytest.mark.parametrize("factor", [0.2, 3.0])
@pytest.mark.parametrize("form", OURS)
def test_gross_errors_are_suspects_and_nothing_else_is(form: Form, factor: float) -> None:
    """One point in twenty per series is three times too slow or five times too fast."""
    for seed in range(10):
        random = np.random.default_rng(seed)
        clean = noisy(made(form, random).rows, random, NOISE)
        rows, bad = with_bad_points(clean, random, 0.05, factor)
        assert fitted_law(form, rows).suspects.tolist() == bad.tolist()


@pytest.mark.parametrize("form", OURS)
def test_where_one_point_in_ten_is_bad_all_of_them_are_suspects(form: Form) -> None:
    """All bad points are suspects; at most a few in a thousand good points are as well."""
    wrongly = []
    for seed in range(10):
        random = np.random.default_rng(seed)
        clean = noisy(made(form, random).rows, random, NOISE)
        rows, bad = with_bad_points(clean, random, 0.1, 3.0)
        suspects = fitted_law(form, rows).suspects
        assert suspects[bad].all()
        wrongly.append(suspects[~bad].mean())
    assert np.mean(wrongly) < 0.01


@st.composite
def anything(draw: st.DrawFn) -> StepTimes:
    """Visits to a part of a small grid, with arbitrary step times."""
    grid = visits(lengths=(64, 128), batches=(1, 2, 4, 8))
    some = draw(st.lists(st.integers(0, len(grid) - 1), min_size=1, max_size=20))
    seconds = draw(
        st.lists(st.floats(1e-6, 1e6), min_size=len(some), max_size=len(some)).map(np.array)
    )
    return replace(grid.where(np.array(some)), seconds=seconds)


@given(anything())
@settings(max_examples=25, derandomize=True)
def test_step_times_are_never_negative_nor_do_they_fall_with_the_batch(rows: StepTimes) -> None:
    """Every form but the paper's predicts non-negative, non-decreasing times without warnings."""
    steps_to_predict = visits(lengths=(64, 128), batches=(1, 2, 3, 5, 8, 100, 10**4))
    for form in Form:
        fitted = fit_form(form, rows)
        if fitted is None:
            continue
        assert np.isfinite(fitted.leverages[np.isfinite(fitted.residuals)]).all()
        curves = fitted.seconds(steps_to_predict).reshape(-1, 7)
        assert (curves[np.isfinite(curves)] > 0).all()
        if form is not Form.LOGARITHM:
            assert np.isfinite(fitted.seconds(rows)).sum() == np.isfinite(fitted.residuals).sum()
            steps = np.diff(np.log(curves), axis=1)
            assert (steps[np.isfinite(steps)] > -1e-12).all()


@pytest.mark.parametrize("form", Form)
def test_left_out_residuals_agree_with_fits_without_each_point(form: Form) -> None:
    """They give the change by leaving a point out, and the mean error that decides the choice.

    Closely for a law without weights; elsewhere to first order, with the robust weights held fixed.
    """
    tolerance = 0.1 if form is Form.LOGARITHM else 0.7
    for seed in range(2):
        random = np.random.default_rng(seed)
        truth = made(form, random, visits(batches=(1, 2, 4, 8, 16)))
        rows = noisy(truth.rows, random, NOISE)
        fitted = fitted_law(form, rows)
        refitted = held_out_residuals(
            rows, np.arange(len(rows)), lambda others: fit_form(form, others)
        )
        residuals = fitted.left_out_residuals
        change = refitted - fitted.residuals
        assert np.linalg.norm(residuals - refitted) < tolerance * np.linalg.norm(change)
        assert np.abs(residuals).mean() == pytest.approx(np.abs(refitted).mean(), rel=0.15)


def test_the_condition_grows_where_batch_sizes_are_close_to_each_other() -> None:
    """Close batch sizes exceed the condition number of the paper's points."""
    far, near = (
        fitted_law(
            Form.AFFINE_EXAMPLES, made(Form.AFFINE_EXAMPLES, np.random.default_rng(0), rows).rows
        )
        for rows in (visits(batches=BATCHES), visits(batches=(1000, 1001, 1002)))
    )
    assert far.condition < 12 < near.condition
