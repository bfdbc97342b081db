"""Throughput of a cell, as far as it was timed. Pure."""

import math
import statistics
from collections.abc import Sequence

from gpu_catalog.number_text import short
from trials.records.observation import CAPPED, FITS, MEMORY_MISSES, Observation


def median_seconds(o: Observation) -> float | None:
    """Median of a probe's seconds per micro-batch; None without timed steps."""
    steps = o.micro_batch_seconds
    if len(steps) == 1:  # of all lines that are read without their steps
        return steps[0]
    return statistics.median(steps) if steps else None


def fastest(observations: Sequence[Observation]) -> str | None:
    """Best throughput of a cell's own probes below its smallest batch that missed, as text."""
    lowest_miss = min(
        (o.batch_size for o in observations if o.outcome in MEMORY_MISSES), default=math.inf
    )
    best = max(
        (
            o.cell.examples_per_second(o.batch_size, seconds)
            for o in observations
            # A capped GPU's speed is that of the larger one that stood in for it.
            if o.outcome is FITS and o.basis is not CAPPED
            if o.batch_size < lowest_miss and (seconds := median_seconds(o)) is not None
        ),
        default=None,
    )
    return None if best is None else f"{short(best)} examples/s"
