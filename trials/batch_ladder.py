"""The batch sizes at which throughput is measured: few, spread for the fit, in a fair order."""

from dataclasses import dataclass
from itertools import count, pairwise
from random import Random

MOST_SIZES = 6
"""Distinct batch sizes at most. The laws fitted to them have two parameters, affine in the batch
size or in its logarithm. Two sizes fix those, and four more tell the laws apart and leave something
over when one is held out. Every size costs a timed run; a seventh is better spent on a second
visit, which tells how far the same size differs from itself."""


@dataclass(frozen=True, slots=True)
class LadderStep:
    """One visit of one batch size.

    Attributes:
        batch_size: examples per step.
        repeat: 0 for the first visit, 1 for an anchor's second.
    """

    batch_size: int
    repeat: int


def batch_ladder(largest: int, *, seed_text: str) -> list[LadderStep]:
    """The visits to make, in order, for a device on which ``largest`` is the largest batch.

    The sizes run geometrically from 1 to the largest (``_geometric_sizes``). Two anchors, the
    largest and the middle one, are visited twice: what differs between the visits is not the batch
    size. The order is random, so a device that slows down as it warms does not look like a batch
    size that does; and a repeat does not follow its first visit where another could stand between.

    Args:
        largest: the largest batch size that fits; 0, when none does, has no steps.
        seed_text: what the order is drawn from. The same text gives the same order everywhere.
    """
    if largest < 0:
        raise ValueError(f"batch_ladder got largest {largest}: a batch size is 0 (none) or more")
    sizes = _geometric_sizes(largest)
    if len(sizes) <= 1:
        return [LadderStep(size, repeat) for size in sizes for repeat in (0, 1)]
    # The largest stands here twice in a row, so the order is drawn at least once; with two sizes or
    # more there is one without such neighbours, so the drawing ends.
    visits = [*sizes, sizes[-1], sizes[(len(sizes) - 1) // 2]]
    random = Random(seed_text)
    while any(size == following for size, following in pairwise(visits)):
        # Sorted by random(), the one stream that Python promises never to change; shuffle's may.
        visits.sort(key=lambda _: random.random())
    return [LadderStep(size, visits[:at].count(size)) for at, size in enumerate(visits)]


def _geometric_sizes(largest: int) -> list[int]:
    """Whole numbers nearest to ``largest ** (i / 5)`` for i from 0 to 5, without doubles.

    Equal steps in the logarithm are what a logarithmic law is fitted to best, and the two ends are
    what an affine one is. Few sizes are large, where a step takes longest.
    """
    if largest == 0:
        return []
    root = MOST_SIZES - 1
    # The nearest m is the first with m + 1/2 above the root. In whole numbers: a float's last digit
    # may differ between machines.
    return sorted(
        {
            next(m for m in count(1) if (2 * m + 1) ** root > 2**root * largest**power)
            for power in range(MOST_SIZES)
        }
    )
