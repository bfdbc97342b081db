"""Times of the collectives of several ranks, which show how fast their links are."""

import time
from collections.abc import Callable, Iterator
from typing import get_args

import torch
import torch.distributed as dist

from gpu_catalog.links.within_nodes import CollectiveName
from trials.ranks.rank import Rank
from trials.records.collectives import CollectiveTime

LEAST_BYTES, MOST_BYTES = 2**20, 2**30
SECONDS = {"cuda": 10.0, "cpu": 0.3}
"""Time for all collectives, by the type of the ranks' device."""
GROWTH = 2  # of a buffer, from one size to the next
MOST_REPEATS = 200


def collective_times(rank: Rank, most_bytes: int) -> tuple[CollectiveTime, ...]:
    """Time every collective at growing sizes. All ranks call it, and get the same times.

    Sizes that would take longer than ``SECONDS`` are left out.

    Args:
        rank: this process among the others.
        most_bytes: largest buffer that there is memory for.
    """
    sizes: list[int] = []
    while (size := LEAST_BYTES * GROWTH ** len(sizes)) <= min(MOST_BYTES, most_bytes):
        sizes.append(size)
    collectives: tuple[CollectiveName, ...] = get_args(CollectiveName)
    return tuple(
        CollectiveTime(collective=name, buffer_bytes=size, seconds=took)
        for name in collectives
        for size, took in _times(rank, name, sizes, SECONDS[rank.device.type] / len(collectives))
    )


def _times(
    rank: Rank, name: CollectiveName, sizes: list[int], seconds: float
) -> Iterator[tuple[int, float]]:
    """Sizes and times of one collective, as long as the next size fits into the time."""
    end = time.monotonic() + seconds
    for size in sizes:
        run = _collective(rank, name, size)
        rank.seconds_of(run)  # the first one opens connections
        once = rank.seconds_of(run)
        repeats = int(min(max(seconds / len(sizes) / once, 1), MOST_REPEATS))
        yield size, rank.seconds_of(run, repeats)
        left = rank.largest(time.monotonic() - end)
        if GROWTH * once > -left:
            return


def _collective(rank: Rank, name: CollectiveName, size: int) -> Callable[[], object]:
    ranks = rank.parallel.gpus
    part = torch.zeros(size // 4 // ranks, device=rank.device)
    whole = part.new_zeros(ranks * len(part))
    if name == "all-gather":
        return lambda: dist.all_gather_into_tensor(whole, part)
    if name == "reduce-scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole)
    return lambda: dist.all_reduce(whole)
