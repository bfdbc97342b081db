"""Expected saving of a measurement against integration and in simple cases."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fitting.numerics.value_of_information import (
    INDIFFERENCE,
    OptionCosts,
    expected_value_of_measurement,
    probability_cheapest,
)


def options(*beliefs: tuple[float, float], group: tuple[int, ...] | None = None) -> OptionCosts:
    """Options with these means and standard deviations, by default each its own group."""
    mean, sigma = np.array(beliefs, float).T
    return OptionCosts(
        mean,
        sigma,
        np.zeros(len(beliefs)),
        np.array(range(len(beliefs)) if group is None else group),
    )


def by_integration(costs: OptionCosts, noise: float, which: int) -> float:
    """Average fall of the least mean, over the values that the measurement may show."""
    moved = costs.sigma[which] ** 2 / np.hypot(costs.sigma[which], noise)
    points = np.linspace(-8, 8, 20_001)
    weights = np.exp(-(points**2) / 2)
    after = costs.mean[which] + moved * points
    others = np.delete(costs.mean, which).min()
    return float(costs.mean.min() - (np.minimum(after, others) * weights).sum() / weights.sum())


@given(
    st.lists(
        st.tuples(st.floats(-1, 1), st.floats(0.01, 1)),
        min_size=2,
        max_size=6,
    ),
    st.floats(0.01, 0.3),
)
def test_a_saving_agrees_with_integration(beliefs: list[tuple[float, float]], noise: float) -> None:
    """The formula holds for every option and any uncertainty."""
    costs = options(*beliefs)
    savings = expected_value_of_measurement(costs, np.full(len(beliefs), noise))
    for which in range(len(beliefs)):
        assert savings[which] == pytest.approx(by_integration(costs, noise, which), abs=2e-6)


def test_measuring_a_certain_or_distant_option_saves_nothing() -> None:
    """A single option saves nothing; most is saved where two are close and one is uncertain."""
    noise = np.full(3, 0.02)
    certain, close, far = expected_value_of_measurement(
        options((0, 1e-9), (0.05, 0.3), (3, 0.3)), noise
    )
    assert certain < 1e-6
    assert far < 1e-6
    assert 0.05 < close < 0.15
    assert expected_value_of_measurement(options((0, 1)), np.array([0.02])) == [0]


def test_the_cheapest_has_its_probability() -> None:
    """Near certainty, of a coin toss, and of a group with two of three equal options."""
    sure = probability_cheapest(options((0, 0.05), (1, 0.05)), seed=1)
    assert sure == pytest.approx([1, 0], abs=1e-3)
    coin = probability_cheapest(options((0, 0.3), (0, 0.3)), seed=1)
    assert coin == pytest.approx([0.51, 0.51], abs=0.015)
    two_ways = probability_cheapest(options((0, 0.3), (0, 0.3), (0, 0.3), group=(0, 1, 1)), seed=1)
    assert two_ways == pytest.approx([1 / 3, 2 / 3], abs=0.02)
    alike = probability_cheapest(options((0, 1e-6), (0.9 * INDIFFERENCE, 1e-6)), seed=1)
    assert list(alike) == [1, 1]


def test_an_error_that_all_options_share_decides_nothing() -> None:
    """A shared error keeps the order; beside an option without it, it counts."""
    costs = options((0, 0.05), (0.3, 0.05))
    together = dataclasses.replace(costs, shared=np.array([1.0, 1.0]))
    assert probability_cheapest(together, seed=1) == pytest.approx([1, 0], abs=1e-3)
    noise = np.full(2, 0.02)
    assert list(expected_value_of_measurement(together, noise)) == list(
        expected_value_of_measurement(costs, noise)
    )
    beside = dataclasses.replace(costs, shared=np.array([1.0, 0.0]))
    assert probability_cheapest(beside, seed=1)[0] == pytest.approx(0.62, abs=0.02)
    assert expected_value_of_measurement(beside, noise)[0] > 0.2
