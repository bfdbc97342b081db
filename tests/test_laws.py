"""The laws as equations: what the paper printed, what it drew, and what the terms add up to."""

import numpy as np
import pytest

from fitting.laws import (
    eq2_terms,
    max_batch_eq1,
    step_seconds_affine,
    step_seconds_smooth,
    throughput_eq2,
)
from fitting.step_times import Form, StepTimes, form_seconds


def test_eq1_gives_what_the_figure_of_the_paper_shows_with_the_constants_of_the_figure() -> None:
    """Its text says 28 and 35 at 100 and 120 GB: so c0 = 62, c1 = 0.89 and no floor for the 28."""
    drawn = max_batch_eq1([100, 120], 23.35, 512, 0.25, c0=62, c1=0.89)
    printed = max_batch_eq1([100, 120], 23.35, 512, 0.25, c0=82, c1=0.95)
    assert np.floor(drawn).tolist() == [27, 35]
    assert drawn[0] == pytest.approx(28, abs=0.1)
    assert np.floor(printed).tolist() == [42, 53]


def test_eq1_does_not_round_down() -> None:
    """The continuous form is what can be fitted; the floor is the caller's."""
    assert max_batch_eq1(48, 24, 100, 1.0, c0=10, c1=0.5) == pytest.approx(2.4)


def test_eq2_depends_on_c2_and_c3_only_through_their_ratio() -> None:
    """The artifact's form, C2 * ln(batch ** (1 / (s * C3))) + C4, is the law of the ratio."""
    batch, sparsity = np.array([1.0, 2.0, 8.0]), np.array([1.0, 0.25, 0.25])
    for c2, c3 in ((0.36, 1.8), (0.72, 3.6)):
        artifact = 0.3 + c2 * np.log(batch ** (1 / (sparsity * c3)))
        assert throughput_eq2(batch, sparsity, c2_over_c3=0.2, c4=0.3) == pytest.approx(artifact)


def test_eq2_at_batch_one_is_its_intercept_at_any_sparsity() -> None:
    """C4 is the throughput of one query, as the paper says: ln 1 = 0."""
    assert throughput_eq2(1, [0.25, 1.0], c2_over_c3=0.2, c4=0.3).tolist() == [0.3, 0.3]


def test_terms_broadcast_one_sparsity_over_many_batches() -> None:
    """A scalar input stands for a column."""
    assert eq2_terms([1, 1], 0.5).tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize("sparsity", [0.25, 1.0])
def test_fitted_forms_are_the_laws(sparsity: float) -> None:
    """What is fitted and what is documented are one."""
    batch = np.array([1.0, 3.0, 17.0])
    rows = StepTimes(
        gpu=np.array(["a"] * 3),
        series=np.array(["a/1"] * 3),
        batch_size=batch,
        tokens=128 * batch,
        sparsity=np.full(3, sparsity),
        seconds=np.ones(3),
    )

    def of(form: Form, *values: float, exponent: float | None = None) -> np.ndarray:
        return form_seconds(form, np.tile(values, (3, 1)), exponent, rows)

    affine = step_seconds_affine(128 * batch, sparsity, 0.5, 1e-3, 4e-3)
    assert of(Form.AFFINE_TOKENS, 0.5, 1e-3, 4e-3) == pytest.approx(affine)
    by_query = step_seconds_affine(batch, sparsity, 0.5, 0.1, 0.4)
    assert of(Form.AFFINE_QUERIES, 0.5, 0.1, 0.4) == pytest.approx(by_query)
    pooled = step_seconds_smooth(128 * batch, sparsity, 0.5, 2e-3, 0.7, 1.1)
    assert of(Form.POOLED, 0.5**1.1, 2e-3**1.1, exponent=0.7) == pytest.approx(pooled)
    largest = (0.5**1.5 + batch**1.5 * (0.01 + 0.04 * sparsity)) ** (1 / 1.5)
    assert of(Form.SMOOTH_MAXIMUM, 0.5**1.5, 0.01, 0.04) == pytest.approx(largest)
    rate = throughput_eq2(batch, sparsity, 0.3, 0.8)
    assert of(Form.LOGARITHM, 0.3, 0.8) == pytest.approx(batch / rate)
