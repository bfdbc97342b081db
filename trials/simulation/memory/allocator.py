"""Model of PyTorch's caching allocator for CUDA memory, replayed on a stream of storages.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with its default settings on one stream.
Names in parentheses below are the functions and constants of that file; ``compiled_replay`` has
their counterparts.

Given the order of segments in memory, the model is exact in sizes, pools, segments, best fit,
splits, merges, released segments and statistics. It simplifies three things:

- Among free blocks of one size the allocator takes the lowest address. CUDA chooses the addresses
  of segments; here an older segment has a lower address, so the peaks of a stream may differ.
- The whole capacity is available to this process. Under ``set_per_process_memory_fraction``
  PyTorch first limits an expandable segment to the size of an ordinary one (alloc_block), so it may
  retry or fail earlier than this model.
- The address space of an expandable segment is unlimited. PyTorch reserves 9/8 of the GPU's memory
  and starts another segment when that is used up.
"""

from collections.abc import Sequence

import numpy as np

from trials.simulation.memory.blocks import MOST_BYTES, AllocatorPeaks, most_in_use
from trials.simulation.memory.compiled_replay import (
    CAPACITY,
    COLUMNS,
    COUNTS,
    EXPANDABLE,
    LARGE_BASE,
    NONE,
    PEAK_RESERVED,
    RETRIES,
    SPARE,
    TOP,
    Memory,
    replay_events,
)
from trials.simulation.recording import IntArray
from trials.simulation.trace_cache import TraceError


def replay(
    storages: Sequence[int] | IntArray,
    sizes: Sequence[int] | IntArray,
    *,
    capacity_bytes: int | None,
    expandable_segments: bool = False,
    addresses: Sequence[int] = (),
) -> AllocatorPeaks:
    """Replay allocations and frees of storages, and return their memory statistics.

    The allocator rounds a size up to a multiple of 512 bytes (round_size). Blocks up to 1 MiB
    belong to the small pool, others to the large one (get_pool). It takes the smallest cached block
    of the pool that is large enough, and among equal ones the lowest in memory (get_free_block). It
    splits off the remainder if that is at least 512 bytes (small pool) or more than 1 MiB (large
    pool); otherwise the remainder counts as in use (should_split). It merges a freed block with the
    free neighbours in its segment (try_merge_blocks). If no cached block is large enough, it
    allocates a segment (alloc_block). If the capacity leaves no room, it releases all segments that
    are wholly free and tries once more (release_cached_blocks).

    With expandable segments (PYTORCH_CUDA_ALLOC_CONF) each pool is one segment with pages of 2 or
    20 MiB, and every remainder is split off. The allocator maps pages at the lowest address where
    adjacent free blocks and unmapped pages are large enough together (find_expandable_block), and
    only the missing ones (map_block). It unmaps wholly free pages only for a retry (unmap_block).
    For best fit, a block in front of unmapped pages counts with the size it could grow to.

    Args:
        storages: number of each event's storage, from 0.
        sizes: bytes of each event's storage where it is allocated, negative where it is freed. An
            event of size zero has no effect.
        capacity_bytes: most bytes of all segments together; None for no limit.
        expandable_segments: the setting of this name.
        addresses: address of each segment in the order of their allocation; by default each is
            above the older ones.

    Raises:
        TraceError: the storages are too large to replay.
        ValueError: a storage is freed that is not allocated, or the lengths differ.
    """
    names, moved = np.asarray(storages, np.int64), np.asarray(sizes, np.int64)
    if len(names) != len(moved):
        raise ValueError(f"{len(names)} storages have {len(moved)} sizes")
    if most_in_use(moved) > MOST_BYTES:
        raise TraceError(
            f"a step takes more memory than is simulated, {MOST_BYTES:.1e} bytes: give a smaller "
            "model, batch size or length"
        )
    # An allocation makes at most two blocks. The system provides only pages that are written.
    rows = 2 * len(names) + 4
    counts = np.zeros(COUNTS, np.int64)
    counts[TOP + 1] = LARGE_BASE
    counts[SPARE] = NONE
    counts[CAPACITY] = NONE if capacity_bytes is None else capacity_bytes
    counts[EXPANDABLE] = expandable_segments
    memory = Memory(
        blocks=np.empty((rows, COLUMNS), np.int64),
        pools=np.empty((2, rows), np.int64),
        counts=counts,
        addresses=np.asarray(addresses, np.int64),
    )
    peak, failed_at, unknown = replay_events(names, moved, memory)
    if unknown != NONE:
        raise ValueError(f"event {unknown} frees storage {names[unknown]}, which is not allocated")
    return AllocatorPeaks(
        peak_allocated_bytes=peak,
        peak_reserved_bytes=int(counts[PEAK_RESERVED]),
        retries=int(counts[RETRIES]),
        failed_at=None if failed_at == NONE else failed_at,
    )
