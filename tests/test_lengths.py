"""How long batches are padded to, against every batch there can be."""

from itertools import product
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fitting.lengths import Lengths
from fitting.paper import dataset_lengths


@st.composite
def some_lengths(draw: st.DrawFn) -> Lengths:
    """Of a small data set."""
    tokens = sorted(draw(st.sets(st.integers(1, 300), min_size=1, max_size=6)))
    counts = st.integers(1, 9)
    examples = draw(st.lists(counts, min_size=len(tokens), max_size=len(tokens)))
    return Lengths(tokens=np.array(tokens, float), examples=np.array(examples, float))


@given(some_lengths(), st.integers(1, 4), st.sampled_from([1, 8, 64]))
@settings(deadline=None)
def test_padding_is_the_mean_over_every_batch_that_can_be_drawn(
    lengths: Lengths, batch_size: int, multiple: int
) -> None:
    """Each batch by its probability, padded to its longest, rounded up."""
    parts = lengths.examples / lengths.examples.sum()
    mean = 0.0
    for batch in product(range(len(parts)), repeat=batch_size):
        longest = lengths.tokens[list(batch)].max()
        mean += float(np.prod(parts[list(batch)])) * -(-longest // multiple) * multiple
    assert lengths.padded(batch_size, multiple) == pytest.approx(mean)


@given(some_lengths(), st.sampled_from([1, 8]))
@settings(deadline=None)
def test_more_queries_are_padded_to_no_less(lengths: Lengths, multiple: int) -> None:
    """From the mean of one query to the longest of all, never down on the way."""
    padded = np.array([lengths.padded(b, multiple) for b in (1, 1.5, 2, 3, 8, 100, 10**6)])
    rounded = np.ceil(lengths.tokens / multiple) * multiple
    assert padded[0] == pytest.approx(np.average(rounded, weights=lengths.examples))
    assert padded[-1] == pytest.approx(rounded.max())
    assert (np.diff(padded) >= -1e-9 * padded[1:]).all()


@given(some_lengths(), st.integers(1, 50))
@settings(deadline=None)
def test_rounding_up_adds_less_than_a_multiple(lengths: Lengths, batch_size: int) -> None:
    """And takes nothing away."""
    added = lengths.padded(batch_size, 8) - lengths.padded(batch_size, 1)
    assert -1e-9 < added < 8


def test_how_many_examples_there_are_does_not_matter() -> None:
    """Only how many of them have each length."""
    few = Lengths(tokens=np.array([30.0, 50.0, 90.0]), examples=np.array([2.0, 5.0, 1.0]))
    many = Lengths(tokens=few.tokens, examples=1000 * few.examples)
    assert many.padded(7) == pytest.approx(few.padded(7))
    assert few.median == many.median == 50


@given(some_lengths())
@settings(deadline=None)
def test_the_median_is_an_example_with_half_of_all_on_either_side(lengths: Lengths) -> None:
    """At least half are no longer, and at least half no shorter."""
    every = np.repeat(lengths.tokens, lengths.examples.astype(int))
    assert lengths.median in every
    assert np.mean(every <= lengths.median) >= 0.5
    assert np.mean(every >= lengths.median) >= 0.5


@pytest.mark.parametrize("batch_size", [2, 16, 128])
def test_that_no_example_is_drawn_twice_hardly_matters(batch_size: int) -> None:
    """On the paper's data sets an epoch's batches, without repetition, are as long within 0.1 %."""
    for lengths in dataset_lengths().values():
        counts = np.cumsum(lengths.examples).astype(int)
        below = [comb(int(n), batch_size) / comb(int(counts[-1]), batch_size) for n in counts]
        rounded = np.ceil(lengths.tokens / 8) * 8
        exact = rounded @ np.diff(below, prepend=0.0)
        assert lengths.padded(batch_size) == pytest.approx(exact, rel=1e-3)
