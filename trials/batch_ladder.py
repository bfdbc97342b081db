"""Batch sizes at which a trial measures throughput: few, spread for the fit, in random order."""

import math
from bisect import bisect
from dataclasses import dataclass
from itertools import pairwise
from random import Random

MOST_SIZES = 6
"""Most distinct batch sizes. The laws fitted to them have two parameters, affine in the batch size
or in its logarithm. Two sizes determine the parameters; four more discriminate between the laws and
leave enough points when one is held out. Every size costs a timed run: a second visit, which
measures the variation between runs of one size, is worth more than a seventh size."""


@dataclass(frozen=True, slots=True)
class LadderStep:
    """One visit of one batch size.

    Attributes:
        repeat: 0 for the first visit, 1 for the second visit of an anchor.
    """

    batch_size: int
    repeat: int


def batch_ladder(
    largest: int, *, seed_text: str, effective_batch: int | None = None
) -> list[LadderStep]:
    """Ordered visits for a device whose largest batch size is ``largest``.

    The sizes form a geometric sequence from 1 to ``largest`` (``_geometric_sizes``). Two anchors,
    the largest and the middle size, are visited twice: their two results differ by something else
    than the batch size. The order is random, so that a device slowing down as it warms does not
    look like an effect of the batch size. The two visits of an anchor are not consecutive where
    another size can separate them.

    Args:
        largest: largest batch size that fits; 0 (none fits) gives no visits.
        seed_text: seed of the order. The same text gives the same order on every machine.
        effective_batch: examples per optimizer step, which every size must divide; None for any.

    Raises:
        ValueError: ``largest`` is negative.
    """
    if largest < 0:
        raise ValueError(f"batch_ladder got largest {largest}: a batch size is 0 (none) or more")
    sizes = _geometric_sizes(largest)
    if effective_batch is not None:
        sizes = _nearest_divisors(sizes, effective_batch)
    if len(sizes) <= 1:
        return [LadderStep(size, repeat) for size in sizes for repeat in (0, 1)]
    # The list starts with the largest twice in a row, so the loop draws at least one order. Two or
    # more sizes have an order without equal neighbours, so the loop ends.
    visits = [*sizes, sizes[-1], sizes[(len(sizes) - 1) // 2]]
    random = Random(seed_text)
    while any(size == following for size, following in pairwise(visits)):
        # Python guarantees that random() keeps its sequence for a seed; shuffle has no such
        # promise.
        visits.sort(key=lambda _: random.random())
    return [LadderStep(size, visits[:at].count(size)) for at, size in enumerate(visits)]


def _nearest_divisors(sizes: list[int], effective_batch: int) -> list[int]:
    """Distinct divisors up to the largest size, the nearest to each size in the logarithm."""
    most = max(sizes, default=0)
    divisors = [size for size in range(1, most + 1) if effective_batch % size == 0]
    return sorted({min(divisors, key=lambda d: abs(math.log(d / size))) for size in sizes})


def _geometric_sizes(largest: int) -> list[int]:
    """Distinct integers nearest to ``largest ** (i / 5)`` for i from 0 to 5, ascending.

    Equal steps in the logarithm determine a logarithmic law best, the two ends an affine one. Few
    sizes are large, where a step takes longest.
    """
    if largest == 0:
        return []
    root = MOST_SIZES - 1
    # The nearest m is the first with m + 1/2 above the root. Integer arithmetic, because the last
    # digit of a float power may differ between machines.
    sizes = range(1, largest + 1)
    return sorted(
        {
            sizes[bisect(sizes, 2**root * largest**power, key=lambda m: (2 * m + 1) ** root)]
            for power in range(MOST_SIZES)
        }
    )
