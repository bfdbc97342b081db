"""How long batches are padded to, against every batch there can be."""

from collections import Counter
from itertools import product
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fitting.paper.published import dataset_lengths
from fitting.points.batch_lengths import Lengths


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
def test_more_examples_are_padded_to_no_less(lengths: Lengths, multiple: int) -> None:
    """From the mean of one example to the longest of all, never down on the way."""
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


@pytest.mark.parametrize("batch_size", [1, 3, 16, 64])
@pytest.mark.parametrize(("examples", "near"), [(40, 0.06), (700, 0.025), (13_921, 0.004)])
def test_batches_of_like_lengths_are_as_transformers_makes_them(
    batch_size: int, examples: int, near: float
) -> None:
    """Its own sampler, over shuffled epochs: every full batch padded to its longest."""
    whole = dataset_lengths()["math_14k"]
    every = np.repeat(whole.tokens, whole.examples.astype(int))
    drawn = np.random.default_rng(examples).choice(every, examples, replace=False)
    lengths = Lengths.of(sorted(Counter(drawn.tolist()).items()))
    epochs = 4 if examples > 10_000 else 200
    result = [
        -(-max(batch) // 8) * 8
        for seed in range(epochs)
        for batch in grouped_batches(drawn.tolist(), batch_size, seed)
        if len(batch) == min(batch_size, examples)
    ]
    # That the longest of all is always in a full batch counts where there are few.
    assert lengths.grouped(batch_size, examples) == pytest.approx(np.mean(result), rel=near)


def grouped_batches(lengths: list[float], batch_size: int, seed: int) -> list[list[float]]:
    """The lengths of an epoch's batches by transformers' sampler."""
    from torch import Generator  # noqa: PLC0415 - seconds, for these tests alone
    from transformers.trainer_pt_utils import LengthGroupedSampler  # noqa: PLC0415 - as above

    generator = Generator().manual_seed(seed)
    order = list(LengthGroupedSampler(batch_size, lengths=lengths, generator=generator))
    batches = (order[at : at + batch_size] for at in range(0, len(order), batch_size))
    return [[lengths[place] for place in batch] for batch in batches]


@given(some_lengths(), st.integers(1, 40), st.integers(1, 400))
@settings(deadline=None)
def test_grouping_is_between_no_padding_and_the_longest(
    lengths: Lengths, batch_size: int, examples: int
) -> None:
    """Of as many examples as the histogram has, or of fewer, or more."""
    rounded = np.ceil(lengths.tokens / 8) * 8
    least = np.average(rounded, weights=lengths.examples)
    # Counts are rounded to whole examples, and a last batch is left out.
    slack = rounded.max() * (len(rounded) + batch_size) / examples
    assert least - slack <= lengths.grouped(batch_size, examples) <= rounded.max() + 1e-6


@given(some_lengths(), st.integers(1, 320))
@settings(deadline=None)
def test_cutting_off_leaves_every_example(lengths: Lengths, cutoff: int) -> None:
    """None longer than that, the shorter ones as they were."""
    cut = lengths.cut(cutoff)
    every = np.minimum(np.repeat(lengths.tokens, lengths.examples.astype(int)), cutoff)
    assert np.array_equal(np.repeat(cut.tokens, cut.examples.astype(int)), every)
    assert cut.mean == pytest.approx(every.mean())
    assert cut.quantile(1.0) == every.max()


def test_lengths_of_pairs_are_what_they_are() -> None:
    """Mean, parts and the longest."""
    lengths = Lengths.of([(10, 1), (20, 2), (40, 1)])
    assert (lengths.mean, lengths.median, lengths.quantile(0.95)) == (22.5, 20, 40)
