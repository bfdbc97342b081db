"""A model of PyTorch's caching allocator of CUDA memory: what a stream of storages makes it hold.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with its default settings, on one stream.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

MIN_BLOCK = 512  # kMinBlockSize: sizes are rounded up to it
SMALL = 2**20  # kSmallSize: up to here a block is of the small pool
SMALL_SEGMENT = 2 * 2**20  # kSmallBuffer
LARGE_SEGMENT = 20 * 2**20  # kLargeBuffer: a segment for blocks below kMinLargeAlloc
MIN_OWN_SEGMENT = 10 * 2**20  # kMinLargeAlloc: from here on a block has a segment of its own
ROUND_LARGE = 2 * 2**20  # kRoundLarge: and that is rounded up to it
BITS = 50  # of an address, in the keys that free blocks are sorted by
MASK = (1 << BITS) - 1
LARGE_BASE = 1 << (BITS - 1)  # addresses of the large pool start here


@dataclass(frozen=True, slots=True)
class AllocatorPeaks:
    """What a stream of storages came to.

    Attributes:
        peak_allocated_bytes: most bytes of blocks in use at once.
        peak_reserved_bytes: most bytes of segments held at once.
        retries: times that cached segments were given back to go on (num_alloc_retries).
        failed_at: the event that ran out of memory; None when all fitted.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    retries: int
    failed_at: int | None


def segment_bytes(rounded: int) -> int:
    """The segment taken for a block that no cached one serves (get_allocation_size)."""
    if rounded <= SMALL:
        return SMALL_SEGMENT
    if rounded < MIN_OWN_SEGMENT:
        return LARGE_SEGMENT
    return -(-rounded // ROUND_LARGE) * ROUND_LARGE


def replay(  # noqa: C901, PLR0912, PLR0915 - one loop over very many events, nothing called in it
    storages: Sequence[int],
    sizes: Sequence[int],
    *,
    capacity_bytes: int | None,
    expandable_segments: bool = False,
) -> AllocatorPeaks:
    """Replays storages that come and go.

    A block is the smallest cached one that is large enough, of those the first in memory; what is
    left of it is split off if at least 512 bytes (small pool) or more than 1 MiB (large pool)
    remain (should_split). A block let go is merged with free neighbours of its segment. Where no
    segment can be had any more, all that are wholly free are given back, once.

    With expandable segments (PYTORCH_CUDA_ALLOC_CONF) each pool is one segment that grows by pages
    of 2 or 20 MiB, remainders of 512 bytes are split off, and free pages are given back.
    Simplified: what was given back is not mapped again in its old place, but at the end.

    Args:
        storages: the storage each event is of.
        sizes: its bytes where it comes, less than zero where it goes.
        capacity_bytes: of all segments; None without limit.
        expandable_segments: as the setting of this name.

    Raises:
        ValueError: a storage goes that is not there.
    """
    pools: tuple[list[int], list[int]] = ([], [])  # free blocks: size << BITS | address, sorted
    free_sizes: dict[int, int] = {}  # by address
    free_ends: dict[int, int] = {}  # address, by the one after the block
    segments: dict[int, int] = {}  # size, by address
    blocks: dict[int, tuple[int, int]] = {}  # address and size, by storage
    tops = [0, LARGE_BASE]
    allocated = reserved = peak_allocated = peak_reserved = retries = 0
    for event, (storage, size) in enumerate(zip(storages, sizes, strict=True)):
        if size > 0:
            rounded = -(-size // MIN_BLOCK) * MIN_BLOCK
            is_large = rounded > SMALL
            pool = pools[is_large]
            at = bisect_left(pool, rounded << BITS)
            if at < len(pool):
                key = pool.pop(at)
                address, found = key & MASK, key >> BITS
                del free_sizes[address], free_ends[address + found]
            elif expandable_segments:
                page = LARGE_SEGMENT if is_large else SMALL_SEGMENT
                end = tops[is_large]
                missing = rounded - _trailing(end, free_sizes, free_ends)
                if (
                    capacity_bytes is not None
                    and reserved + -(-missing // page) * page > capacity_bytes
                ):
                    retries += 1
                    reserved -= _release_pages(pools, free_sizes, free_ends)
                    missing = rounded - _trailing(end, free_sizes, free_ends)
                    if reserved + -(-missing // page) * page > capacity_bytes:
                        return AllocatorPeaks(peak_allocated, peak_reserved, retries, event)
                grown = -(-missing // page) * page
                address = free_ends.pop(end, end)
                if address < end:
                    del pool[bisect_left(pool, free_sizes.pop(address) << BITS | address)]
                tops[is_large] = end + grown
                found = end + grown - address
                reserved += grown
                peak_reserved = max(peak_reserved, reserved)
            else:
                found = segment_bytes(rounded)
                if capacity_bytes is not None and reserved + found > capacity_bytes:
                    retries += 1
                    reserved -= _release(pools, free_sizes, free_ends, segments)
                    if reserved + found > capacity_bytes:
                        return AllocatorPeaks(peak_allocated, peak_reserved, retries, event)
                address = tops[is_large]
                tops[is_large] += found + MIN_BLOCK  # so that no two segments are neighbours
                segments[address] = found
                reserved += found
                peak_reserved = max(peak_reserved, reserved)
            left = found - rounded
            if left > SMALL or (left and (expandable_segments or not is_large)):
                rest = address + rounded
                insort(pool, left << BITS | rest)
                free_sizes[rest] = left
                free_ends[rest + left] = rest
                found = rounded
            blocks[storage] = (address, found)
            allocated += found
            if allocated > peak_allocated:  # noqa: PLR1730 - a call would cost a tenth of the time
                peak_allocated = allocated
        elif size < 0:
            try:
                address, found = blocks.pop(storage)
            except KeyError:
                raise ValueError(
                    f"storage {storage} goes at event {event} and is not there"
                ) from None
            allocated -= found
            pool = pools[address >= LARGE_BASE]
            after = address + found
            following = free_sizes.pop(after, None)
            if following is not None:
                del pool[bisect_left(pool, following << BITS | after)]
                del free_ends[after + following]
                found += following
            before = free_ends.pop(address, None)
            if before is not None:
                preceding = free_sizes.pop(before)
                del pool[bisect_left(pool, preceding << BITS | before)]
                address = before
                found += preceding
            insort(pool, found << BITS | address)
            free_sizes[address] = found
            free_ends[address + found] = address
    return AllocatorPeaks(peak_allocated, peak_reserved, retries, None)


def _release(
    pools: tuple[list[int], list[int]],
    free_sizes: dict[int, int],
    free_ends: dict[int, int],
    segments: dict[int, int],
) -> int:
    """Gives back every segment that is wholly free (release_cached_blocks); the bytes of them."""
    given_back = 0
    for pool in pools:
        kept = []
        for key in pool:
            address, size = key & MASK, key >> BITS
            if segments.get(address) == size:
                del segments[address], free_sizes[address], free_ends[address + size]
                given_back += size
            else:
                kept.append(key)
        pool[:] = kept
    return given_back


def _trailing(end: int, free_sizes: dict[int, int], free_ends: dict[int, int]) -> int:
    """Free bytes at the end of a growing segment."""
    return free_sizes[free_ends[end]] if end in free_ends else 0


def _release_pages(
    pools: tuple[list[int], list[int]], free_sizes: dict[int, int], free_ends: dict[int, int]
) -> int:
    """Gives back every page that is wholly free; the bytes of them."""
    given_back = 0
    for pool, page, base in zip(
        pools, (SMALL_SEGMENT, LARGE_SEGMENT), (0, LARGE_BASE), strict=True
    ):
        kept = []
        for key in pool:
            address, size = key & MASK, key >> BITS
            first = base + -(-(address - base) // page) * page
            last = base + (address + size - base) // page * page
            if last <= first:
                kept.append(key)
                continue
            given_back += last - first
            del free_sizes[address], free_ends[address + size]
            for start, end in ((address, first), (last, address + size)):
                if end > start:
                    kept.append((end - start) << BITS | start)
                    free_sizes[start], free_ends[end] = end - start, start
        pool[:] = sorted(kept)
    return given_back
