"""What a measurement may save: against integration, and in the cases that one can tell."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fitting.numerics.value_of_information import (
    ALIKE,
    Ways,
    expected_value_of_measurement,
    probability_right,
)


def ways(*each: tuple[float, float], group: tuple[int, ...] | None = None) -> Ways:
    """Means and standard deviations, each a thing of its own unless told otherwise."""
    mean, sigma = np.array(each, float).T
    return Ways(
        mean, sigma, np.zeros(len(each)), np.array(range(len(each)) if group is None else group)
    )


def by_integration(told: Ways, noise: float, which: int) -> float:
    """How far the least mean falls on average, over what the measurement may show."""
    moved = told.sigma[which] ** 2 / np.hypot(told.sigma[which], noise)
    points = np.linspace(-8, 8, 20_001)
    weights = np.exp(-(points**2) / 2)
    after = told.mean[which] + moved * points
    others = np.delete(told.mean, which).min()
    return float(told.mean.min() - (np.minimum(after, others) * weights).sum() / weights.sum())


@given(
    st.lists(
        st.tuples(st.floats(-1, 1), st.floats(0.01, 1)),
        min_size=2,
        max_size=6,
    ),
    st.floats(0.01, 0.3),
)
def test_a_saving_is_what_integration_gives(each: list[tuple[float, float]], noise: float) -> None:
    """Of every way, with any doubt about it."""
    told = ways(*each)
    found = expected_value_of_measurement(told, np.full(len(each), noise))
    for which in range(len(each)):
        assert found[which] == pytest.approx(by_integration(told, noise, which), abs=2e-6)


def test_what_is_known_or_far_off_saves_nothing() -> None:
    """Nor what stands alone; the most is saved where two are close and one is in doubt."""
    noise = np.full(3, 0.02)
    known, close, far = expected_value_of_measurement(ways((0, 1e-9), (0.05, 0.3), (3, 0.3)), noise)
    assert known < 1e-6
    assert far < 1e-6
    assert 0.05 < close < 0.15
    assert expected_value_of_measurement(ways((0, 1)), np.array([0.02])) == [0]


def test_the_likely_winner_is_told_with_how_likely_it_is() -> None:
    """A hundred to one, a coin, and a third that is as cheap by one of two ways."""
    sure = probability_right(ways((0, 0.05), (1, 0.05)), seed=1)
    assert sure == pytest.approx([1, 0], abs=1e-3)
    coin = probability_right(ways((0, 0.3), (0, 0.3)), seed=1)
    assert coin == pytest.approx([0.51, 0.51], abs=0.015)
    two_ways = probability_right(ways((0, 0.3), (0, 0.3), (0, 0.3), group=(0, 1, 1)), seed=1)
    assert two_ways == pytest.approx([1 / 3, 2 / 3], abs=0.02)
    alike = probability_right(ways((0, 1e-6), (0.9 * ALIKE, 1e-6)), seed=1)
    assert list(alike) == [1, 1]


def test_what_all_have_in_common_decides_nothing() -> None:
    """Off together, one stays as much cheaper as it is; beside one that is measured it counts."""
    told = ways((0, 0.05), (0.3, 0.05))
    together = dataclasses.replace(told, shared=np.array([1.0, 1.0]))
    assert probability_right(together, seed=1) == pytest.approx([1, 0], abs=1e-3)
    noise = np.full(2, 0.02)
    assert list(expected_value_of_measurement(together, noise)) == list(
        expected_value_of_measurement(told, noise)
    )
    beside = dataclasses.replace(told, shared=np.array([1.0, 0.0]))
    assert probability_right(beside, seed=1)[0] == pytest.approx(0.62, abs=0.02)
    assert expected_value_of_measurement(beside, noise)[0] > 0.2
