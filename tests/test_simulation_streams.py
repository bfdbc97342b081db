"""Blocks that PyTorch's allocator caches for each stream apart."""

import numpy as np
import pytest

from trials.simulation.memory.allocator import replay
from trials.simulation.memory.blocks import AllocatorPeaks
from trials.simulation.memory.streams import Moves, peaks_on_streams
from trials.simulation.recording import COMPUTE_STREAM

MIB = 2**20
GATHERING = COMPUTE_STREAM + 2
REDUCING = COMPUTE_STREAM + 3
Event = tuple[int, int, int]
"""Name of a storage, its bytes, negative where it is freed, and the stream that allocates it."""


def moves(*events: Event) -> Moves:
    """Allocations and frees, as a step has them."""
    names, sizes, streams = np.array(events, np.int64).T
    return Moves(names, sizes, streams)


def peaks(
    *events: Event, held: tuple[int, ...] = (), limit: int | None = None, expandable: bool = False
) -> AllocatorPeaks:
    """Peaks of these events beside storages that stay."""
    kept = np.array(held, np.int64)
    return peaks_on_streams(moves(*events), kept, limit, expandable_segments=expandable)


def one_after_another(first: int, second: int) -> tuple[Event, ...]:
    """Two storages of 20 MiB, the second made by its stream once the first is freed."""
    size = 20 * MIB
    return (0, size, first), (0, -size, first), (1, size, second), (1, -size, second)


def test_a_stream_takes_what_it_has_freed_itself_and_nothing_of_others() -> None:
    """At no time are more than 20 MiB in use; of three streams each caches as many."""
    same = peaks(*one_after_another(GATHERING, GATHERING))
    assert (same.peak_allocated_bytes, same.peak_reserved_bytes) == (20 * MIB, 20 * MIB)
    for other in (COMPUTE_STREAM, REDUCING):
        apart = peaks(*one_after_another(GATHERING, other))
        assert (apart.peak_allocated_bytes, apart.peak_reserved_bytes) == (20 * MIB, 40 * MIB)
    every = (*one_after_another(GATHERING, REDUCING), (2, 20 * MIB, COMPUTE_STREAM))
    assert peaks(*every).peak_reserved_bytes == 60 * MIB


def test_storages_that_stay_are_those_of_the_computation() -> None:
    """What is in use is counted over all streams, in blocks, at one time."""
    gathered = ((0, 5 * MIB, GATHERING), (1, 3 * MIB, COMPUTE_STREAM), (0, -5 * MIB, GATHERING))
    apart = peaks(*gathered, held=(30 * MIB, 1))
    assert apart.peak_allocated_bytes == 38 * MIB + 512
    # 30 for what stays, 2 for its smallest block, 20 for each stream's own large blocks.
    assert apart.peak_reserved_bytes == 72 * MIB


@pytest.mark.parametrize(("limit", "fits"), [(40 * MIB, True), (40 * MIB - 1, False)])
def test_cached_blocks_of_another_stream_leave_no_room(limit: int, *, fits: bool) -> None:
    """The computation may reserve what the others leave; on one stream half of it is enough."""
    apart = peaks(*one_after_another(GATHERING, COMPUTE_STREAM), limit=limit)
    assert (apart.failed_at is None) == fits
    alone = peaks(*one_after_another(COMPUTE_STREAM, COMPUTE_STREAM), limit=20 * MIB)
    assert (alone.failed_at, alone.retries) == (None, 0)


def test_streams_have_expandable_segments_of_their_own() -> None:
    """Of pages of 20 MiB, 25 MiB take two in each stream."""
    events = ((0, 25 * MIB, GATHERING), (1, 25 * MIB, COMPUTE_STREAM))
    assert peaks(*events, expandable=True).peak_reserved_bytes == 80 * MIB
    assert peaks(*events).peak_reserved_bytes == 52 * MIB


@pytest.mark.parametrize("limit", [None, 24 * MIB])
def test_one_stream_is_replayed_as_it_is(limit: int | None) -> None:
    """Retries and the storage that does not fit are those of the plain replay."""
    events = (*one_after_another(COMPUTE_STREAM, COMPUTE_STREAM), (2, 24 * MIB, COMPUTE_STREAM))
    names, sizes, _ = np.array(events, np.int64).T
    assert peaks(*events, limit=limit) == replay(names, sizes, capacity_bytes=limit)
    assert moves(*events).peak_bytes == 24 * MIB
