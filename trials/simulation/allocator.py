"""A model of PyTorch's caching allocator of CUDA memory: what a stream of storages makes it hold.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with its default settings, on one stream;
each is named below as it is there.

Exact, given the order of segments in memory: sizes, pools, segments, best fit, splits, merges, what
is given back, and the statistics. Simplified:

- Where free blocks of one size lie in several segments, the lowest address is taken. CUDA chooses
  the addresses of segments; here an older segment lies lower, so peaks of a stream may differ.
- The capacity is the memory of a GPU that nothing else takes from. Under
  ``set_per_process_memory_fraction`` expandable segments are first held to as much as a segment of
  their own would take (alloc_block), so they may retry or fail earlier than here.
- The address space of an expandable segment has no end; PyTorch reserves 9/8 of the GPU's memory
  and makes another segment where that is used up.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

MIN_BLOCK = 512  # kMinBlockSize: sizes are rounded up to it
SMALL = 2**20  # kSmallSize: up to here a block is of the small pool
SMALL_SEGMENT = 2 * 2**20  # kSmallBuffer
LARGE_SEGMENT = 20 * 2**20  # kLargeBuffer: a segment for blocks below kMinLargeAlloc
MIN_OWN_SEGMENT = 10 * 2**20  # kMinLargeAlloc: from here on a block has a segment of its own
ROUND_LARGE = 2 * 2**20  # kRoundLarge: and that is rounded up to it
BITS = 64  # of an address, in the keys that free blocks are sorted by
MASK = (1 << BITS) - 1
LARGE_BASE = LARGE_SEGMENT << 36  # addresses of the large pool start here, at a page of it
ENDLESS = 1 << 100  # bytes of address space at the end of an expandable segment


@dataclass(frozen=True, slots=True)
class AllocatorPeaks:
    """What a stream of storages came to.

    Attributes:
        peak_allocated_bytes: most bytes of blocks in use at once.
        peak_reserved_bytes: most bytes of segments held at once.
        retries: times that cached segments were given back to go on (num_alloc_retries).
        failed_at: index of the event that ran out of memory; None when all fitted.
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


def replay(
    storages: Sequence[int],
    sizes: Sequence[int],
    *,
    capacity_bytes: int | None,
    expandable_segments: bool = False,
) -> AllocatorPeaks:
    """Replays storages that come and go.

    Sizes are rounded up to 512 bytes (round_size). Up to 1 MiB they are of the small pool, others
    of the large one (get_pool). A block is the smallest cached one of its pool that is large
    enough, of those the first in memory (get_free_block); what is left of it is split off if at
    least 512 bytes (small pool) or more than 1 MiB (large pool) remain, and counts as in use
    otherwise (should_split). A block let go is merged with the free neighbours of its segment
    (try_merge_blocks). Where no cached block will do, a segment is taken (alloc_block); where there
    is no room for it, all that are wholly free are given back and it is tried once more
    (release_cached_blocks).

    With expandable segments (PYTORCH_CUDA_ALLOC_CONF) each pool is one segment of pages of 2 or
    20 MiB, and any remainder is split off. Pages are mapped at the lowest address where free blocks
    and unmapped pages make enough room together (find_expandable_block), and only what is missing
    (map_block). Whole free pages are given back, and only to try once more (unmap_block). Best fit
    takes a block before unmapped pages for as large as it could grow.

    Args:
        storages: the storage each event is of.
        sizes: its bytes where it comes, less than zero where it goes; nothing happens at zero.
        capacity_bytes: of all segments; None without limit.
        expandable_segments: as the setting of this name.

    Raises:
        ValueError: a storage goes that is not there.
    """
    return _replay(storages, sizes, _Memory(capacity_bytes, expandable=expandable_segments))


@dataclass(slots=True)
class _Memory:
    """Blocks that are free, and the segments or pages they are of.

    A free block is in three places: ``pools`` (size << BITS | address, sorted) for small and large,
    ``free_sizes`` by address, ``free_ends`` by the address after it.
    """

    capacity: int | None
    expandable: bool = False
    pools: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    free_sizes: dict[int, int] = field(default_factory=dict)
    free_ends: dict[int, int] = field(default_factory=dict)
    segments: dict[int, int] = field(default_factory=dict)  # size, by address; if not expandable
    unmapped: dict[int, int] = field(default_factory=dict)  # size, by address; if expandable
    tops: list[int] = field(default_factory=lambda: [0, LARGE_BASE])
    reserved: int = 0
    peak_reserved: int = 0
    retries: int = 0

    def __post_init__(self) -> None:
        if self.expandable:
            self.unmapped.update(dict.fromkeys(self.tops, ENDLESS))

    def taken(self, rounded: int) -> tuple[int, int] | None:
        """Address and size of a block that no cached one serves (malloc); None if out of memory."""
        taken = self._alloc_block(rounded)
        if taken is None:
            self._release_cached_blocks()
            self.retries += 1
            taken = self._alloc_block(rounded)
        return taken

    def best_expandable(self, pool: list[int], at: int) -> int:
        """Which block from ``at`` on to use: one that can grow is as large as it can become."""
        while at + 1 < len(pool) and self._grown(pool[at + 1]) < self._grown(pool[at]):
            at += 1
        return at

    def _grown(self, key: int) -> int:
        size = key >> BITS
        return size + self.unmapped.get((key & MASK) + size, 0)

    def _alloc_block(self, rounded: int) -> tuple[int, int] | None:
        is_large = rounded > SMALL
        if self.expandable:
            return self._try_allocate_expandable_block(rounded, is_large=is_large)
        size = segment_bytes(rounded)
        if not self._reserve(size):
            return None
        address = self.segment_address(size, is_large=is_large)
        self.segments[address] = size
        return address, size

    def segment_address(self, size: int, *, is_large: bool) -> int:
        """Where a new segment goes: above the older ones, next to none of them."""
        address = self.tops[is_large]
        self.tops[is_large] += size + MIN_BLOCK
        return address

    def _reserve(self, size: int) -> bool:
        if self.capacity is not None and self.reserved + size > self.capacity:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _try_allocate_expandable_block(
        self, size: int, *, is_large: bool
    ) -> tuple[int, int] | None:
        address = self._find_expandable_block(size, is_large=is_large)
        while (found := self.free_sizes.get(address, 0)) < size:
            if not self._map_block(address + found, size - found, is_large=is_large):
                return None  # What was mapped on the way stays, as free blocks.
        self._unlist(address)
        return address, found

    def _find_expandable_block(self, size: int, *, is_large: bool) -> int:
        """The lowest address with enough room, of unmapped pages and free blocks in a row."""
        gaps = sorted(gap for gap in self.unmapped if (gap >= LARGE_BASE) == is_large)
        starts = (self.free_ends.get(gap, gap) for gap in gaps)
        return next(start for start in starts if self._has_space(start, size))

    def _has_space(self, start: int, size: int) -> bool:
        end = start
        while end - start < size:
            more = self.free_sizes.get(end) or self.unmapped.get(end)
            if more is None:
                return False
            end += more
        return True

    def _map_block(self, gap: int, wanted: int, *, is_large: bool) -> bool:
        page = LARGE_SEGMENT if is_large else SMALL_SEGMENT
        there = self.unmapped[gap]
        mapped = -(-min(wanted, there) // page) * page
        if not self._reserve(mapped):
            return False
        del self.unmapped[gap]
        if there == ENDLESS:
            self.unmapped[gap + mapped] = ENDLESS
        elif mapped < there:
            self.unmapped[gap + mapped] = there - mapped
        address, end = self.free_ends.get(gap, gap), gap + mapped
        if address < gap:
            self._unlist(address)
        if end in self.free_sizes:
            end += self._unlist(end)
        self._list(address, end - address)
        return True

    def _release_cached_blocks(self) -> None:
        for pool in self.pools:
            for key in list(pool):
                address, size = key & MASK, key >> BITS
                if self.expandable:
                    self._unmap_block(address, size)
                elif self.segments.get(address) == size:
                    del self.segments[address]
                    self._unlist(address)
                    self.reserved -= size
        # Unmapped pages in a row are one (try_merge_blocks).
        merged: dict[int, int] = {}
        last = -1
        for address in sorted(self.unmapped):
            size = self.unmapped[address]
            if last in merged and last + merged[last] == address:
                merged[last] = ENDLESS if size == ENDLESS else merged[last] + size
            else:
                last = address
                merged[address] = size
        self.unmapped = merged

    def _unmap_block(self, address: int, size: int) -> None:
        page = LARGE_SEGMENT if address >= LARGE_BASE else SMALL_SEGMENT
        end = address + size
        first, last = -(-address // page) * page, end // page * page
        if first >= last:
            return
        self._unlist(address)
        if address < first:
            self._list(address, first - address)
        if last < end:
            self._list(last, end - last)
        self.unmapped[first] = last - first
        self.reserved -= last - first

    def _list(self, address: int, size: int) -> None:
        insort(self.pools[address >= LARGE_BASE], size << BITS | address)
        self.free_sizes[address] = size
        self.free_ends[address + size] = address

    def _unlist(self, address: int) -> int:
        """The size of the free block that is none any more."""
        size = self.free_sizes.pop(address)
        del self.free_ends[address + size]
        pool = self.pools[address >= LARGE_BASE]
        del pool[bisect_left(pool, size << BITS | address)]
        return size


def _replay(  # noqa: C901, PLR0915 - one loop over very many events, next to nothing called in it
    storages: Sequence[int], sizes: Sequence[int], memory: _Memory
) -> AllocatorPeaks:
    small, large = memory.pools
    free_sizes, free_ends = memory.free_sizes, memory.free_ends
    expandable = memory.expandable
    least_left = MIN_BLOCK - 1 if expandable else SMALL  # what is more is split off a large block
    blocks: dict[int, tuple[int, int]] = {}  # address and size, by storage
    allocated = peak_allocated = 0
    failed_at = None
    asked = np.asarray(sizes, np.int64)
    whole = np.where(asked > 0, -(-asked // MIN_BLOCK) * MIN_BLOCK, asked)
    for event, (storage, rounded) in enumerate(zip(storages, whole.tolist(), strict=True)):
        if rounded > 0:
            pool = large if rounded > SMALL else small
            at = bisect_left(pool, rounded << BITS)
            if at < len(pool):
                if expandable:
                    at = memory.best_expandable(pool, at)
                key = pool.pop(at)
                address, found = key & MASK, key >> BITS
                del free_sizes[address], free_ends[address + found]
            else:
                taken = memory.taken(rounded)
                if taken is None:
                    failed_at = event
                    break
                address, found = taken
            left = found - rounded
            if left > least_left or (left and pool is small):
                rest = address + rounded
                insort(pool, left << BITS | rest)
                free_sizes[rest] = left
                free_ends[rest + left] = rest
                found = rounded
            blocks[storage] = (address, found)
            allocated += found
            if allocated > peak_allocated:  # noqa: PLR1730 - max costs nearly a tenth of the loop
                peak_allocated = allocated
        elif rounded < 0:
            if storage not in blocks:
                raise ValueError(f"storage {storage} goes at event {event} and is not there")
            address, found = blocks.pop(storage)
            allocated -= found
            pool = large if address >= LARGE_BASE else small
            after = address + found
            if after in free_sizes:
                following = free_sizes.pop(after)
                del pool[bisect_left(pool, following << BITS | after)]
                del free_ends[after + following]
                found += following
            if address in free_ends:
                before = free_ends.pop(address)
                preceding = free_sizes.pop(before)
                del pool[bisect_left(pool, preceding << BITS | before)]
                address = before
                found += preceding
            insort(pool, found << BITS | address)
            free_sizes[address] = found
            free_ends[address + found] = address
    return AllocatorPeaks(peak_allocated, memory.peak_reserved, memory.retries, failed_at)
