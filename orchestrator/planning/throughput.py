"""Throughput of a cell, as far as it was timed. Pure."""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

from gpu_catalog.number_text import short
from trials.records.observation import (
    CAPPED,
    FITS,
    MEMORY_MISSES,
    Basis,
    Observation,
    without_superseded,
)


def median_seconds(o: Observation) -> float | None:
    """Median of a probe's seconds per micro-batch; None without timed steps."""
    steps = o.micro_batch_seconds
    if len(steps) == 1:  # of all lines that are read without their steps
        return steps[0]
    return statistics.median(steps) if steps else None


def fastest(observations: Sequence[Observation]) -> str | None:
    """Best throughput of a cell below its smallest batch that missed, as text.

    It is that of a ranking: the median step over all repeats of a batch size, so that no lucky
    repeat wins.
    """
    lowest_miss = min(
        (o.batch_size for o in observations if o.outcome in MEMORY_MISSES), default=math.inf
    )
    repeats: dict[tuple[str | None, Basis, int], list[Sequence[float]]] = defaultdict(list)
    for o in without_superseded(observations):
        # A capped GPU's speed is that of the larger one that stood in for it.
        if o.outcome is FITS and o.basis is not CAPPED and o.batch_size < lowest_miss:
            stack = None if o.environment is None else o.environment.stack
            repeats[stack, o.basis, o.batch_size].append(o.micro_batch_seconds)
    cell = observations[0].cell if observations else None
    best = max(
        (
            cell.examples_per_second(size, statistics.median(steps))
            for (*_, size), visits in repeats.items()
            if cell is not None and (steps := [*chain.from_iterable(visits)])
        ),
        default=None,
    )
    return None if best is None else f"{short(best)} examples/s"
