"""The laws as equations: what the paper printed, what it drew, and what the terms add up to."""

import numpy as np
import pytest

from fitting.laws import (
    eq2_terms,
    max_batch_eq1,
    throughput_eq2,
)


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
