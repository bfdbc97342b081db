"""Expected padded lengths of batches, compared with an enumeration of all batches."""

from collections import Counter
from itertools import product
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fitting.paper.published import dataset_lengths
from fitting.points.batch_lengths import Lengths


@st.composite
def some_lengths(draw: st.DrawFn) -> Lengths:
    """Lengths of a small data set."""
    tokens = sorted(draw(st.sets(st.integers(1, 300), min_size=1, max_size=6)))
    counts = st.integers(1, 9)
    examples = draw(st.lists(counts, min_size=len(tokens), max_size=len(tokens)))
    return Lengths(tokens=np.array(tokens, float), examples=np.array(examples, float))


@given(some_lengths(), st.integers(1, 4), st.sampled_from([1, 8, 64]))
def test_padding_is_the_mean_over_every_batch_that_can_be_drawn(
    lengths: Lengths, batch_size: int, multiple: int
) -> None:
    """Each possible batch, weighted by its probability, is padded to its longest example."""
    parts = lengths.examples / lengths.examples.sum()
    mean = 0.0
    for batch in product(range(len(parts)), repeat=batch_size):
        longest = lengths.tokens[list(batch)].max()
        mean += float(np.prod(parts[list(batch)])) * -(-longest // multiple) * multiple
    assert lengths.padded(batch_size, multiple) == pytest.approx(mean)


@given(some_lengths(), st.sampled_from([1, 8]))
def test_larger_batches_are_never_padded_to_less(lengths: Lengths, multiple: int) -> None:
    """The length rises from the mean of one example to the longest example."""
    padded = np.array([lengths.padded(b, multiple) for b in (1, 1.5, 2, 3, 8, 100, 10**6)])
    rounded = np.ceil(lengths.tokens / multiple) * multiple
    assert padded[0] == pytest.approx(np.average(rounded, weights=lengths.examples))
    assert padded[-1] == pytest.approx(rounded.max())
    assert (np.diff(padded) >= -1e-9 * padded[1:]).all()


@given(some_lengths(), st.integers(1, 50))
def test_rounding_up_adds_less_than_a_multiple(lengths: Lengths, batch_size: int) -> None:
    """It never makes a batch shorter."""
    added = lengths.padded(batch_size, 8) - lengths.padded(batch_size, 1)
    assert -1e-9 < added < 8


def test_only_the_shares_of_the_lengths_matter() -> None:
    """A thousand times as many examples give the same padded length and median."""
    few = Lengths(tokens=np.array([30.0, 50.0, 90.0]), examples=np.array([2.0, 5.0, 1.0]))
    many = Lengths(tokens=few.tokens, examples=1000 * few.examples)
    assert many.padded(7) == pytest.approx(few.padded(7))
    assert few.median == many.median == 50


@given(some_lengths())
def test_the_median_is_an_example_with_half_of_all_on_either_side(lengths: Lengths) -> None:
    """At least half of the examples are no longer, and at least half no shorter."""
    every = np.repeat(lengths.tokens, lengths.examples.astype(int))
    assert lengths.median in every
    assert np.mean(every <= lengths.median) >= 0.5
    assert np.mean(every >= lengths.median) >= 0.5


@pytest.mark.parametrize("batch_size", [2, 16, 128])
def test_drawing_without_replacement_changes_the_length_by_less_than_a_thousandth(
    batch_size: int,
) -> None:
    """An epoch never repeats an example; on the paper's data sets that hardly matters."""
    for lengths in dataset_lengths().values():
        counts = np.cumsum(lengths.examples).astype(int)
        below = [comb(int(n), batch_size) / comb(int(counts[-1]), batch_size) for n in counts]
        rounded = np.ceil(lengths.tokens / 8) * 8
        exact = rounded @ np.diff(below, prepend=0.0)
        assert lengths.padded(batch_size) == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("batch_size", [1, 3, 16, 64])
@pytest.mark.parametrize(("examples", "near"), [(40, 0.06), (700, 0.025), (13_921, 0.004)])
def test_grouped_batches_are_as_long_as_those_of_transformers(
    batch_size: int, examples: int, near: float
) -> None:
    """The reference is transformers' sampler over shuffled epochs; only full batches count."""
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
    # The longest example is always in a full batch, which matters when there are few batches.
    assert lengths.grouped(batch_size, examples) == pytest.approx(np.mean(result), rel=near)


def grouped_batches(lengths: list[float], batch_size: int, seed: int) -> list[list[float]]:
    """Lengths of an epoch's batches, from transformers' sampler."""
    from torch import Generator  # noqa: PLC0415 - seconds, for these tests alone
    from transformers.trainer_pt_utils import LengthGroupedSampler  # noqa: PLC0415 - as above

    generator = Generator().manual_seed(seed)
    order = list(LengthGroupedSampler(batch_size, lengths=lengths, generator=generator))
    batches = (order[at : at + batch_size] for at in range(0, len(order), batch_size))
    return [[lengths[place] for place in batch] for batch in batches]


@given(some_lengths(), st.integers(1, 40), st.integers(1, 400))
def test_grouping_is_between_no_padding_and_the_longest(
    lengths: Lengths, batch_size: int, examples: int
) -> None:
    """It holds for as many examples as the histogram has, for fewer and for more."""
    rounded = np.ceil(lengths.tokens / 8) * 8
    least = np.average(rounded, weights=lengths.examples)
    # Counts are rounded to whole examples, and a last batch is left out.
    slack = rounded.max() * (len(rounded) + batch_size) / examples
    assert least - slack <= lengths.grouped(batch_size, examples) <= rounded.max() + 1e-6


@given(some_lengths(), st.integers(1, 320))
def test_a_cutoff_keeps_every_example(lengths: Lengths, cutoff: int) -> None:
    """Longer examples get the length of the cutoff; shorter ones are unchanged."""
    cut = lengths.cut(cutoff)
    every = np.minimum(np.repeat(lengths.tokens, lengths.examples.astype(int)), cutoff)
    assert np.array_equal(np.repeat(cut.tokens, cut.examples.astype(int)), every)
    assert cut.mean == pytest.approx(every.mean())
    assert cut.quantile(1.0) == every.max()


def test_pairs_of_length_and_count_give_mean_median_and_quantile() -> None:
    """Lengths can be built from such pairs."""
    lengths = Lengths.of([(10, 1), (20, 2), (40, 1)])
    assert (lengths.mean, lengths.median, lengths.quantile(0.95)) == (22.5, 20, 40)
