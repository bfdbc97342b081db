"""Intervals of the memory, by published runs."""

import itertools
import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from benchmarks.published_intervals import (
    FEWEST_SOURCES,
    PublishedError,
    coverage,
    error_interval,
)

from orchestrator.estimating.memory_error import LengthKind, published_errors
from trials.recipes.fields import Method
from trials.recipes.recipe import Recipe

PUBLISHED: tuple[tuple[tuple[Method, LengthKind, int], ...], ...] = (
    (("full", "constant", 1), ("lora", "constant", 12), ("qlora", "constant", 14)),
    (("lora", "constant", 18),),
    (("full", "constant", 4),),
    (("full", "varying", 1), ("lora", "varying", 4)),
    (("full", "constant", 4),),
    (("lora", "varying", 4),),
)
"""Runs of each published source by method and kind of lengths."""
LORA = Recipe(method="lora", lora_rank=8, attention="sdpa")


def errors_of(source: str, errors: list[float], method: Method = "lora") -> list[PublishedError]:
    """Runs of one source, with lengths that do not vary."""
    return [PublishedError(source, method, "constant", LORA, error) for error in errors]


@pytest.mark.parametrize("method", get_args(Method))
@pytest.mark.parametrize("lengths", get_args(LengthKind))
def test_every_method_has_an_interval_of_several_sources(
    method: Method, lengths: LengthKind
) -> None:
    """It includes the prediction."""
    interval = published_errors().interval(method, lengths)
    assert interval.low <= 1 <= interval.high
    assert interval.sources >= FEWEST_SOURCES
    around = interval.around(10)
    assert (around.low, around.high) == (10 * interval.low, 10 * interval.high)
    assert interval.limits(around.high).low == pytest.approx(10)
    assert interval.limits(around.low).high == pytest.approx(10)


def test_a_recipe_that_no_published_run_has_is_named() -> None:
    """A switch by its name alone; switches that are off, and fields that do not apply, never."""
    assert published_errors().not_compared(LORA.model_copy(update={"optimizer": "adamw"})) == ()
    other = Recipe(method="full", loss="liger", liger_kernels=True, attention="sdpa")
    assert published_errors().not_compared(other) == ("loss liger", "liger_kernels")


def test_runs_of_few_sources_are_pooled_with_those_of_the_nearest_kind() -> None:
    """First with those of the other kind of lengths, then of the other adapters, then with all."""
    errors = [
        *errors_of("a", [0.0, 0.01]),
        *errors_of("b", [0.02]),
        *errors_of("c", [0.01], method="qlora"),
        *errors_of("d", [0.5], method="full"),
    ]
    pooled = error_interval(errors, "lora", "constant")
    assert (pooled.pooled, pooled.runs, pooled.sources) == ("lora and qlora", 4, 3)
    assert error_interval(errors, "full", "constant").runs == len(errors)
    own = [*errors, *errors_of("e", [0.03])]
    assert error_interval(own, "lora", "constant").runs == 4
    assert error_interval(own, "lora", "constant").pooled == "lora with constant lengths"


@pytest.mark.parametrize("between", [0.0, 0.05, 0.1])
@pytest.mark.parametrize("sizes", [(4, 4, 1), (12, 18, 4, 4), (5, 11, 7, 11)])
def test_nine_of_ten_runs_of_a_further_source_are_within_the_interval(
    between: float, sizes: tuple[int, ...]
) -> None:
    """Runs of a source differ by 5 %, sources by less, as much or more."""
    random = np.random.default_rng(0)
    within, draws = 0, 1000
    for _ in range(draws):
        runs = [
            errors_of(str(source), list(random.normal(random.normal(0.05, between), 0.05, size)))
            for source, size in enumerate(sizes)
        ]
        interval = error_interval([*itertools.chain(*runs)], "lora", "constant")
        further = math.exp(random.normal(random.normal(0.05, between), 0.05))
        within += interval.low <= further <= interval.high
    assert within / draws == pytest.approx(0.9, abs=0.03)


@pytest.mark.parametrize("between", [0.03, 0.05])
def test_nine_of_ten_runs_are_within_the_intervals_of_the_other_sources(between: float) -> None:
    """Of drawn sources with the methods, lengths and sizes of the published ones, on average.

    One draw says little: shares of 85 to 95 % are those of a half of the draws.
    """
    random = np.random.default_rng(0)
    shares = np.array([_left_out_share(random, between) for _ in range(100)])
    assert shares.mean() == pytest.approx(0.9, abs=0.03)
    assert 0.25 < np.mean((shares >= 0.85) & (shares <= 0.95)) < 0.6


def _left_out_share(random: np.random.Generator, between: float) -> float:
    """Share of drawn runs within the intervals of the other sources' runs."""
    drawn: list[PublishedError] = []
    for source, kinds in enumerate(PUBLISHED):
        mean = random.normal(0.02, between)
        for method, lengths, runs in kinds:
            errors = errors_of(str(source), [*random.normal(mean, 0.03, runs)], method)
            drawn += [replace(one, lengths=lengths) for one in errors]
    ((within, runs),) = coverage(drawn, lambda _: "all").values()
    return within / runs


def test_runs_that_err_alike_have_an_interval_without_width() -> None:
    """It still includes the prediction."""
    errors = [run for source in "abc" for run in errors_of(source, [0.5, 0.5])]
    interval = error_interval(errors, "lora", "constant")
    assert (interval.low, interval.high) == (1.0, round(math.exp(0.5), 3))


def test_coverage_leaves_out_each_source_in_turn() -> None:
    """A source whose runs are far from all others' is not covered."""
    near = [run for n in range(4) for run in errors_of(str(n), [0.0, 0.01 * n])]
    errors = [*near, *errors_of("far", [2.0, 2.1])]
    covered = coverage(errors, lambda one: one.source)
    assert covered["far"] == (0, 2)
    assert covered["0"] == (2, 2)
    assert coverage(errors, lambda one: one.method) == {"lora": (8, 10)}
