import subprocess
import sys
from collections import Counter
from itertools import pairwise
from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trials.batch_ladder import MOST_SIZES, LadderStep, batch_ladder

largest_batches = st.integers(1, 10_000)


def sizes(largest: int) -> list[int]:
    """List the distinct batch sizes of a ladder."""
    return sorted({step.batch_size for step in batch_ladder(largest, seed_text="any")})


@pytest.mark.parametrize(
    ("largest", "expected"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (6, [1, 2, 3, 4, 6]),
        (28, [1, 2, 4, 7, 14, 28]),
        (256, [1, 3, 9, 28, 84, 256]),
    ],
)
def test_ladder_sizes_are_stable(largest: int, expected: list[int]) -> None:
    """Fits of today and of next year use the same batch sizes."""
    assert sizes(largest) == expected


@given(largest_batches)
def test_sizes_run_from_one_to_the_largest_and_are_few(largest: int) -> None:
    """Both ends are measured, and no device measures more sizes than a fit needs."""
    assert (sizes(largest)[0], sizes(largest)[-1]) == (1, largest)
    assert len(sizes(largest)) <= MOST_SIZES


@given(st.integers(100, 10_000))
def test_sizes_are_spaced_evenly_in_the_logarithm(largest: int) -> None:
    """Each size is within rounding (half an example) of its place on the geometric scale."""
    places = [round(largest ** (power / 5)) for power in range(6)]
    assert sizes(largest) == pytest.approx(places, abs=1)
    steps = [log(above / below) for below, above in pairwise(sizes(largest))]
    assert max(steps) < 1.6 * min(steps)


@pytest.mark.parametrize(
    ("largest", "repeated"), [(2, [1, 2]), (3, [2, 3]), (4, [2, 4]), (6, [3, 6]), (28, [4, 28])]
)
def test_repeated_sizes_are_stable(largest: int, repeated: list[int]) -> None:
    """The middle size is the lower one of two; no size is visited three times."""
    steps = batch_ladder(largest, seed_text="any")
    assert sorted(step.batch_size for step in steps if step.repeat) == repeated


@given(largest_batches, st.text())
def test_the_largest_and_a_middle_size_are_visited_twice(largest: int, seed_text: str) -> None:
    """Two anchors are repeated, each after its first visit, and no other size is."""
    steps = batch_ladder(largest, seed_text=seed_text)
    visits = Counter(step.batch_size for step in steps)
    repeated = {step.batch_size for step in steps if step.repeat == 1}
    assert largest in repeated
    assert len(repeated) == min(2, len(visits))
    assert {size for size, number in visits.items() if number == 2} == repeated
    for size in repeated:
        assert [step.repeat for step in steps if step.batch_size == size] == [0, 1]


@given(st.integers(2, 10_000), st.text())
def test_a_repeat_never_follows_its_first_visit(largest: int, seed_text: str) -> None:
    """Caches and clocks of the first visit must not affect the second."""
    for step, following in pairwise(batch_ladder(largest, seed_text=seed_text)):
        assert step.batch_size != following.batch_size


@pytest.mark.parametrize(
    ("largest", "effective_batch", "expected"),
    [(16, 16, [1, 2, 4, 8, 16]), (12, 16, [1, 2, 4, 8]), (7, 12, [1, 2, 3, 6]), (5, 7, [1])],
)
def test_micro_batches_divide_the_effective_batch(
    largest: int, effective_batch: int, expected: list[int]
) -> None:
    """No other size accumulates to exactly that many examples."""
    ladder = batch_ladder(largest, seed_text="", effective_batch=effective_batch)
    assert sorted({step.batch_size for step in ladder}) == expected


def test_one_example_at_most_is_visited_twice_in_a_row() -> None:
    """A single size has no other visit to separate its two."""
    assert batch_ladder(1, seed_text="any") == [LadderStep(1, 0), LadderStep(1, 1)]


def test_a_largest_batch_of_zero_has_no_ladder() -> None:
    """A search that ends at 0 can pass it on."""
    assert batch_ladder(0, seed_text="any") == []


def test_a_negative_size_is_an_error() -> None:
    """The message names the value."""
    with pytest.raises(ValueError, match="got largest -1"):
        batch_ladder(-1, seed_text="any")


def test_the_ladder_order_is_stable() -> None:
    """The seed text gives the same order on every machine and Python from 3.11."""
    order = [(step.batch_size, step.repeat) for step in batch_ladder(28, seed_text="cell/7")]
    assert order == [(1, 0), (4, 0), (28, 0), (4, 1), (7, 0), (28, 1), (2, 0), (14, 0)]


def test_the_order_is_the_same_in_another_process() -> None:
    """Hash randomisation does not affect it."""
    program = "from trials.batch_ladder import *; print(batch_ladder(28, seed_text='cell/7'))"
    ran = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert ran.stdout.strip() == str(batch_ladder(28, seed_text="cell/7"))


def test_different_seed_texts_give_different_orders() -> None:
    """One order for all cells would put one drift into every fit."""
    orders = {tuple(batch_ladder(28, seed_text=f"cell/{number}")) for number in range(100)}
    assert len(orders) > 90
