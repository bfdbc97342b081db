"""Least squares of many groups at once, against dense matrices and scipy."""

import numpy as np
import pytest
from scipy.optimize import nnls

from fitting.laws.normal_equations import (
    BorderedNormal,
    GroupSums,
    log_weights,
    median,
    non_negative,
    varied,
)
from fitting.numerics.arrays import FloatArray

GROUPS = np.array([2, 0, 0, 2, 0, 2, 0, 2])  # none of groups 1 and 3
SUMS = GroupSums(GROUPS, 4)


def drawn(terms: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Columns of very different lengths, a shared column, and weights."""
    random = np.random.default_rng(terms)
    columns = random.random((8, terms)) * 10.0 ** np.arange(0, 3 * terms, 3)
    return columns, random.random(8), random.random(8)


def test_sums_are_those_of_the_rows_of_each_group() -> None:
    """A group without rows sums to zero; a row has the values of its group."""
    columns = np.arange(16.0).reshape(8, 2)
    sums = SUMS.sums(columns)
    assert sums.tolist() == [[26, 30], [0, 0], [30, 34], [0, 0]]
    assert SUMS.by_row(sums)[:3].tolist() == [[30, 34], [26, 30], [26, 30]]
    weights = np.arange(8.0)
    products = SUMS.products(columns, weights)
    own = columns[GROUPS == 2]
    assert products[2] == pytest.approx(own.T @ (own * weights[GROUPS == 2][:, None]))
    assert not products[1].any()


@pytest.mark.parametrize("terms", [2, 3])
def test_a_bordered_matrix_gives_the_errors_and_leverages_of_the_dense_one(terms: int) -> None:
    """All groups' columns beside the shared one, inverted at once."""
    columns, shared, weights = drawn(terms)
    dense = np.zeros((8, 2 * terms + 1))
    dense[GROUPS == 0, :terms] = columns[GROUPS == 0]
    dense[GROUPS == 2, terms:-1] = columns[GROUPS == 2]
    dense[:, -1] = shared
    scale = np.linalg.norm(dense, axis=0)
    inverse = np.linalg.inv((dense / scale).T @ (dense / scale * weights[:, None]))
    errors = np.sqrt(np.diag(inverse)) / scale
    hat = weights * np.einsum("ri,ij,rj->r", dense / scale, inverse, dense / scale)
    normal = BorderedNormal.of(SUMS, columns, shared, weights)
    by_group, shared_error = normal.standard_errors(weights)
    assert by_group[[0, 2]].ravel() == pytest.approx(errors[:-1], rel=1e-5)
    assert shared_error == pytest.approx(errors[-1], rel=1e-5)
    assert normal.leverages(SUMS, weights) == pytest.approx(hat, rel=1e-5)
    assert hat.sum() == pytest.approx(2 * terms + 1)
    assert np.isnan(by_group[1]).all()


def test_without_a_shared_column_each_group_stands_alone() -> None:
    """A column of zeros has no error and changes none."""
    columns, _, weights = drawn(2)
    columns[:, 1] = 0.0
    normal = BorderedNormal.of(SUMS, columns, np.zeros(8), weights)
    errors, shared_error = normal.standard_errors(weights)
    squares = np.bincount(GROUPS, columns[:, 0] ** 2 * weights)
    assert errors[[0, 2], 0] == pytest.approx(squares[[0, 2]] ** -0.5)
    assert np.isnan(errors[:, 1]).all()
    assert np.isnan(shared_error)
    leverages = normal.leverages(SUMS, weights)
    assert leverages == pytest.approx(columns[:, 0] ** 2 * weights / squares[GROUPS])


def test_the_best_values_that_are_not_negative_are_those_of_nnls() -> None:
    """Of hundreds of groups, most of which have a value at zero."""
    random = np.random.default_rng(0)
    terms = random.random((400, 6, 3)) * [1.0, 30.0, 1e3]
    target = random.normal(size=(400, 6)) + 0.5
    free = np.ones((400, 3), bool)
    free[200:, 2] = False
    outer = np.einsum("gri,grj->gij", terms, terms)
    inner = np.einsum("gri,gr->gi", terms, target)
    expected = np.array(
        [
            nnls(design * is_free, y)[0]
            for design, y, is_free in zip(terms, target, free, strict=True)
        ]
    )
    values = non_negative(outer, inner, free)
    assert values == pytest.approx(expected, rel=1e-6, abs=1e-9)
    held = (values == 0).sum(axis=1)
    assert set(held[:200]) == {0, 1, 2, 3}
    assert not values[200:, 2].any()


def test_sizes_are_counted_at_one_sparsity() -> None:
    """Group 0 has two sizes at one of its two sparsities; group 2 repeats one size."""
    groups = np.array([0, 0, 0, 0, 2, 2, 3, 3])
    sparsity = np.array([0.5, 1.0, 0.5, 0.5, 1.0, 1.0, 0.25, 1.0])
    size = np.array([4.0, 8.0, 2.0, 4.0, 1.0, 1.0, 1.0, 2.0])
    is_varied, most = varied(groups, sparsity, size, 4)
    assert is_varied.tolist() == [True, False, False, True]
    assert most.tolist() == [2, 0, 1, 1]


@pytest.mark.parametrize("values", [[3.0], [4.0, 1.0], [9.0, 1.0, 2.0], [8.0, 1.0, 4.0, 2.0]])
def test_a_median_is_that_of_numpy(values: list[float]) -> None:
    """Of odd and even numbers of values."""
    assert median(np.array(values)) == np.median(values)


def test_weighted_squares_have_the_gradient_of_squared_logarithms() -> None:
    """``w (f - y) = log(f / y) / f``, also where f and y agree but for rounding."""
    fitted, target = np.array([3.0, 0.5, 2.0, 2.0]), np.array([2.0, 2.0, 2.0, 2.0 / (1 + 1e-5)])
    weights = log_weights(fitted, target, np.log(fitted / target))
    off = fitted != target
    gradient = np.log(fitted / target) / fitted
    assert (weights * (fitted - target))[off] == pytest.approx(gradient[off], rel=1e-9)
    assert weights[2] == pytest.approx(1 / 4)
    close = log_weights(np.full(1, 2.0), np.full(1, 2.0 / (1 + 9e-7)), np.full(1, np.nan))
    assert close == pytest.approx((1 - 4.5e-7) * (1 + 9e-7) / 4, rel=1e-12)
