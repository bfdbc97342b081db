"""90 % intervals of published over predicted memory, and the share of runs that they cover.

Runs of one source share its libraries, so their errors are alike: ``m_i + e_ij``, with a mean of
the source and a deviation of the run. An interval is for a run of a further source: Student's t
around the mean of the S sources' means, whose variance is V. With w the standard deviation within
sources and n their harmonic mean size, V holds ``w**2 / n`` of it already, so the variance of a
further run is ``V (1 + 1/S) + w**2 (1 - 1/n)``. Its degrees of freedom are Satterthwaite's: V has
S - 1, w those of all runs.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import get_args

import numpy as np
from scipy.special import stdtrit

from orchestrator.estimating.memory_error import (
    LengthKind,
    MemoryError90,
    PublishedErrors,
    axis_values,
)
from trials.recipes.fields import Method
from trials.recipes.recipe import Recipe

FEWEST_SOURCES = 3
"""Runs of a kind with fewer sources are pooled with those of the nearest kind."""
LEVEL = 0.95  # of Student's t: an interval of 90 %


@dataclass(frozen=True, slots=True)
class PublishedError:
    """Error of one published run.

    Attributes:
        error: logarithm of published / predicted memory.
    """

    source: str
    method: Method
    lengths: LengthKind
    recipe: Recipe
    error: float


def _pools(
    method: Method, lengths: LengthKind
) -> Iterable[tuple[str, Callable[[PublishedError], bool]]]:
    """Pools of runs, the nearest first, with their descriptions."""
    yield (
        f"{method} with {lengths} lengths",
        lambda one: one.method == method and one.lengths == lengths,
    )
    yield method, lambda one: one.method == method
    if method != "full":
        yield "lora and qlora", lambda one: one.method != "full"
    yield "all methods", lambda _: True


def error_interval(
    errors: Sequence[PublishedError], method: Method, lengths: LengthKind
) -> MemoryError90:
    """Interval of a method and kind of lengths, from the nearest pool with enough sources."""
    pools = [(name, list(filter(belongs, errors))) for name, belongs in _pools(method, lengths)]
    description, pool = next(
        (one for one in pools if len(_by_source(one[1])) >= FEWEST_SOURCES), pools[-1]
    )
    by_source = _by_source(pool)
    low, high = ends_of_interval(list(by_source.values()))
    return MemoryError90(
        method=method,
        lengths=lengths,
        pooled=description,
        runs=len(pool),
        sources=len(by_source),
        low=round(min(1.0, math.exp(low)), 3),
        high=round(max(1.0, math.exp(high)), 3),
    )


def _by_source(errors: Iterable[PublishedError]) -> dict[str, list[float]]:
    by_source = defaultdict(list)
    for one in errors:
        by_source[one.source].append(one.error)
    return by_source


def ends_of_interval(errors: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Ends of the interval of a run of a further source, for the errors of each source."""
    sources, runs = len(errors), sum(map(len, errors))
    means = np.array([np.mean(one) for one in errors])
    squares = sum(float(np.sum((np.array(one) - np.mean(one)) ** 2)) for one in errors)
    within = squares / (runs - sources) if runs > sources else 0.0
    parts = (
        (float(np.var(means, ddof=1)) * (1 + 1 / sources), sources - 1),
        (within * (1 - float(np.mean([1 / len(one) for one in errors]))), runs - sources),
    )
    variance = sum(part for part, _ in parts)
    of_parts = sum(part**2 / freedom for part, freedom in parts if part > 0)
    freedom = variance**2 / of_parts if of_parts else sources - 1
    half = float(stdtrit(freedom, LEVEL)) * math.sqrt(variance)
    return float(means.mean()) - half, float(means.mean()) + half


def coverage(
    errors: Sequence[PublishedError], kind: Callable[[PublishedError], str]
) -> dict[str, tuple[int, int]]:
    """Runs of each kind within the intervals of the other sources' runs, and all its runs."""

    @cache
    def interval_without(source: str, method: Method, lengths: LengthKind) -> MemoryError90:
        return error_interval([one for one in errors if one.source != source], method, lengths)

    covered = dict.fromkeys(sorted(map(kind, errors)), (0, 0))
    for one in errors:
        interval = interval_without(one.source, one.method, one.lengths)
        within, runs = covered[kind(one)]
        is_within = interval.low <= math.exp(one.error) <= interval.high
        covered[kind(one)] = (within + is_within, runs + 1)
    return covered


def published_errors(errors: Sequence[PublishedError]) -> PublishedErrors:
    """Record of all intervals, their coverage, and the axes that were compared."""
    compared = defaultdict(set)
    for one in errors:
        for name, value in axis_values(one.recipe).items():
            compared[name].add(value)
    ((within, _),) = coverage(errors, lambda _: "all").values()
    kinds = [(m, k) for m in get_args(Method) for k in get_args(LengthKind)]
    return PublishedErrors(
        runs=len(errors),
        covered=round(within / len(errors), 3),
        intervals=tuple(error_interval(errors, *kind) for kind in kinds),
        compared={name: tuple(sorted(values)) for name, values in sorted(compared.items())},
    )
