"""Equations of the laws against the paper, worked examples and the fitted forms."""

import numpy as np
import pytest
from builders.step_time_equations import (
    step_seconds_affine,
    step_seconds_smooth,
    throughput_eq2,
    throughput_eq2_printed,
)

from fitting.laws.equations import (
    TransferCoefficients,
    eq2_terms,
    max_batch_affine,
    max_batch_eq1,
    step_seconds_transferred,
)
from fitting.laws.forms import Form, form_seconds
from fitting.numerics.least_squares import Status, solve_nonlinear
from fitting.points.step_time_rows import StepTimes


def test_eq1_with_the_figures_constants_gives_the_figures_batches() -> None:
    """The text says 28 and 35 at 100 and 120 GB: c0 = 62, c1 = 0.89, 28 before rounding down."""
    drawn = max_batch_eq1([100, 120], 23.35, 512, 0.25, c0=62, c1=0.89)
    printed = max_batch_eq1([100, 120], 23.35, 512, 0.25, c0=82, c1=0.95)
    assert np.floor(drawn).tolist() == [27, 35]
    assert drawn[0] == pytest.approx(28, abs=0.1)
    assert np.floor(printed).tolist() == [42, 53]


def test_eq1_does_not_round_down() -> None:
    """The continuous form can be fitted; the caller rounds down."""
    assert max_batch_eq1(48, 24, 100, 1.0, c0=10, c1=0.5) == pytest.approx(2.4)


def test_eq2_depends_on_c2_and_c3_only_through_their_ratio() -> None:
    """The artifact's form, C2 * ln(batch ** (1 / (s * C3))) + C4, depends on C2 / C3 alone."""
    batch, sparsity = np.array([1.0, 2.0, 8.0]), np.array([1.0, 0.25, 0.25])
    for c2, c3 in ((0.36, 1.8), (0.72, 3.6)):
        artifact = 0.3 + c2 * np.log(batch ** (1 / (sparsity * c3)))
        assert throughput_eq2(batch, sparsity, c2_over_c3=0.2, c4=0.3) == pytest.approx(artifact)


def test_eq2_at_batch_one_is_its_intercept_at_any_sparsity() -> None:
    """C4 is the throughput of one example, as the paper says: ln 1 = 0."""
    assert throughput_eq2(1, [0.25, 1.0], c2_over_c3=0.2, c4=0.3).tolist() == [0.3, 0.3]


def test_terms_broadcast_one_sparsity_over_many_batches() -> None:
    """A scalar sparsity applies to every batch size; the terms are the last axis."""
    assert eq2_terms([1, 1], 0.5).tolist() == [[0, 1], [0, 1]]
    assert eq2_terms(1, 0.5).tolist() == [0, 1]


@pytest.mark.parametrize("sparsity", [0.25, 1.0])
def test_fitted_forms_equal_the_documented_equations(sparsity: float) -> None:
    """Each form gives the step time of its documented equation."""
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
    by_example = step_seconds_affine(batch, sparsity, 0.5, 0.1, 0.4)
    assert of(Form.AFFINE_EXAMPLES, 0.5, 0.1, 0.4) == pytest.approx(by_example)
    pooled = step_seconds_smooth(128 * batch, sparsity, 0.5, 2e-3, 0.7, 1.1)
    assert of(Form.POOLED, 0.5**1.1, 2e-3**1.1, exponent=0.7) == pytest.approx(pooled)
    largest = (0.5**1.5 + batch**1.5 * (0.01 + 0.04 * sparsity)) ** (1 / 1.5)
    assert of(Form.SMOOTH_MAXIMUM, 0.5**1.5, 0.01, 0.04) == pytest.approx(largest)
    rate = throughput_eq2(batch, sparsity, 0.3, 0.8)
    assert of(Form.LOGARITHM, 0.3, 0.8) == pytest.approx(batch / rate)


def test_memory_affine_in_tokens_is_its_equation() -> None:
    """By hand, (20 - 8) / (100 * (0.01 + 0.04 * 0.25)) = 6: six examples fill it exactly."""
    assert max_batch_affine(20, 8, 100, 0.25, p0=0.01, p1=0.04) == pytest.approx(6)


def test_memory_affine_in_tokens_equals_eq1() -> None:
    """c0 = 1 / (p0 + p1) and c1 = p1 / (p0 + p1) turn the affine law into Eq. 1."""
    sparsity = np.array([0.25, 0.5, 1.0])
    affine = max_batch_affine(48, 24, 100, sparsity, p0=0.004, p1=0.016)
    eq1 = max_batch_eq1(48, 24, 100, sparsity, c0=1 / 0.02, c1=0.8)
    assert affine == pytest.approx(eq1)


def test_eq2_as_printed_cannot_be_fitted() -> None:
    """C3 and C4 shift a curve alike at any batch size and sparsity: the rank is two of three."""
    batch, sparsity = np.tile([1.0, 2.0, 4.0, 8.0], 2), np.repeat([0.25, 1.0], 4)
    rate = throughput_eq2_printed(batch, sparsity, 0.5, 1.8, 1.0) + 0.01 * np.cos(batch)
    solution = solve_nonlinear(
        lambda c: throughput_eq2_printed(batch, sparsity, *c) - rate,
        np.array([1.0, 1.0, 0.5]),
        lower=np.full(3, 1e-3),
        upper=np.full(3, 1e3),
    )
    assert solution.status is Status.RANK_DEFICIENT
    assert solution.rank == 2
    assert solution.standard_errors[1:] == (None, None)


def test_eq2_as_printed_is_not_what_was_fitted() -> None:
    """As printed, sparsity shifts the curve; in the fitted form it makes the curve steeper."""
    batch = np.array([1.0, 8.0])
    printed = [np.diff(throughput_eq2_printed(batch, s, 0.2, 1.8, 0.3)) for s in (1.0, 0.25)]
    fitted = [np.diff(throughput_eq2(batch, s, 0.2, 0.3)) for s in (1.0, 0.25)]
    assert printed[1] == pytest.approx(printed[0])
    assert fitted[1] == pytest.approx(4 * fitted[0])
    assert throughput_eq2_printed(1, 0.25, 0.2, 4.0, 0.3) == pytest.approx(0.3)
    assert throughput_eq2_printed(1, 1.0, 0.2, 4.0, 0.3) != pytest.approx(0.3)


@pytest.mark.parametrize("sparsity", [0.25, 1.0])
def test_a_smooth_maximum_lies_between_the_larger_and_the_sum(sparsity: float) -> None:
    """The smooth maximum is the sum at p = 1 and approaches the larger term as p grows."""
    work = np.array([1.0, 10.0, 100.0, 1000.0])
    slope = 0.02 * sparsity**0.7
    by_power = [step_seconds_smooth(work, sparsity, 1.0, 0.02, 0.7, p) for p in (1, 1.1, 1.5, 60)]
    assert by_power[0] == pytest.approx(1 + work * slope)
    assert by_power[-1] == pytest.approx(np.maximum(1, work * slope), rel=0.02)
    for less, more in zip(by_power[1:], by_power[:-1], strict=True):
        assert (np.maximum(1, work * slope) <= less).all()
        assert (less < more).all()


def test_a_transferred_law_scales_with_bandwidth_and_rate() -> None:
    """The floor is 0.1 s + 60 GB / 600 GB/s = 0.2 s; twice the speed halves all but 0.1 s."""
    tokens, sparsity = np.array([1.0, 64.0, 4096.0]), np.array([1.0, 0.25, 0.25])

    def seconds(bandwidth: float, tflops: float) -> np.ndarray:
        coefficients = TransferCoefficients(
            moved_gb=60.0, host_seconds=0.1, tflop_per_token=0.3, exponent=0.6
        )
        return step_seconds_transferred(tokens, sparsity, bandwidth, tflops, coefficients)

    law = step_seconds_smooth(tokens, sparsity, 0.2, 0.002, 0.6, 1.1)
    assert seconds(600, 150) == pytest.approx(law)
    faster = step_seconds_smooth(tokens, sparsity, 0.15, 0.001, 0.6, 1.1)
    assert seconds(1200, 300) == pytest.approx(faster)
