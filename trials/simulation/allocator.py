"""Model of PyTorch's caching allocator for CUDA memory, replayed on a stream of storages.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with its default settings on one stream.
Names in parentheses below are the functions and constants of that file.

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

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

MIN_BLOCK = 512  # kMinBlockSize: block sizes are multiples of it
SMALL = 2**20  # kSmallSize: largest block of the small pool
SMALL_SEGMENT = 2 * 2**20  # kSmallBuffer
LARGE_SEGMENT = 20 * 2**20  # kLargeBuffer: segment for large blocks below kMinLargeAlloc
MIN_OWN_SEGMENT = 10 * 2**20  # kMinLargeAlloc: smallest block with a segment of its own
ROUND_LARGE = 2 * 2**20  # kRoundLarge: such a segment is a multiple of it
BITS = 64  # width of an address in a pool's keys (size << BITS | address)
MASK = (1 << BITS) - 1
LARGE_BASE = LARGE_SEGMENT << 36  # first address of the large pool, aligned to its pages
ENDLESS = 1 << 100  # bytes of unmapped address space at the end of an expandable segment


@dataclass(frozen=True, slots=True)
class AllocatorPeaks:
    """Memory statistics of a replayed stream.

    Attributes:
        peak_allocated_bytes: most bytes of blocks in use at once.
        peak_reserved_bytes: most bytes of segments held at once.
        retries: times that the allocator released cached segments to continue (num_alloc_retries).
        failed_at: index of the event that ran out of memory; None when all storages fitted.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    retries: int
    failed_at: int | None


def segment_bytes(rounded: int) -> int:
    """Size of the segment for a block that no cached block serves (get_allocation_size)."""
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
        storages: identifier of each event's storage.
        sizes: bytes of each event's storage where it is allocated, negative where it is freed. An
            event of size zero has no effect.
        capacity_bytes: most bytes of all segments together; None for no limit.
        expandable_segments: the setting of this name.

    Raises:
        ValueError: a storage is freed that is not allocated.
    """
    return replay_on(AllocatorState(capacity_bytes, expandable_segments), storages, sizes)


@dataclass(slots=True)
class AllocatorState:
    """Free blocks, and the segments or pages that hold them.

    Each free block is in three indexes, so that a search and both merges take logarithmic or
    constant time: its pool, its start and its end.

    Attributes:
        capacity: most bytes of all segments together; None for no limit.
        expandable: whether each pool is one expandable segment.
        pools: ``size << BITS | address`` of the free blocks, sorted; the small pool, the large
            pool.
        free_sizes: size of each free block, by its address.
        free_ends: address of each free block, by the address after its end.
        segments: size of each segment, by its address; empty if expandable.
        unmapped: size of each run of unmapped pages, by its address; empty unless expandable.
        tops: first unused address of the small and the large pool.
        reserved: bytes of all segments or mapped pages.
        peak_reserved: most bytes of them at once.
        retries: times that cached segments were released for another attempt.
    """

    capacity: int | None
    expandable: bool = False
    pools: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    free_sizes: dict[int, int] = field(default_factory=dict)
    free_ends: dict[int, int] = field(default_factory=dict)
    segments: dict[int, int] = field(default_factory=dict)
    unmapped: dict[int, int] = field(default_factory=dict)
    tops: list[int] = field(default_factory=lambda: [0, LARGE_BASE])
    reserved: int = 0
    peak_reserved: int = 0
    retries: int = 0

    def __post_init__(self) -> None:
        if self.expandable:
            self.unmapped.update(dict.fromkeys(self.tops, ENDLESS))

    def new_block(self, rounded: int) -> tuple[int, int] | None:
        """Address and size of a new block, with one retry (malloc); None when out of memory."""
        block = self._alloc_block(rounded)
        if block is None:
            self._release_cached_blocks()
            self.retries += 1
            block = self._alloc_block(rounded)
        return block

    def best_expandable(self, pool: list[int], at: int) -> int:
        """Index in ``pool``, from ``at`` on, of the best fit by the size a block can grow to."""
        while at + 1 < len(pool) and self._grown_size(pool[at + 1]) < self._grown_size(pool[at]):
            at += 1
        return at

    def _grown_size(self, key: int) -> int:
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
        """Address of a new segment: above the older ones, adjacent to none of them."""
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
        while (free := self.free_sizes.get(address, 0)) < size:
            if not self._map_block(address + free, size - free, is_large=is_large):
                return None  # Pages mapped by earlier passes remain, as free blocks.
        self._remove_free(address)
        return address, free

    def _find_expandable_block(self, size: int, *, is_large: bool) -> int:
        """Lowest address where adjacent free blocks and unmapped pages hold ``size`` bytes."""
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
        available = self.unmapped[gap]
        mapped = -(-min(wanted, available) // page) * page
        if not self._reserve(mapped):
            return False
        del self.unmapped[gap]
        if available == ENDLESS:
            self.unmapped[gap + mapped] = ENDLESS
        elif mapped < available:
            self.unmapped[gap + mapped] = available - mapped
        address, end = self.free_ends.get(gap, gap), gap + mapped
        if address < gap:
            self._remove_free(address)
        if end in self.free_sizes:
            end += self._remove_free(end)
        self._add_free(address, end - address)
        return True

    def _release_cached_blocks(self) -> None:
        for pool in self.pools:
            for key in list(pool):
                address, size = key & MASK, key >> BITS
                if self.expandable:
                    self._unmap_block(address, size)
                elif self.segments.get(address) == size:
                    del self.segments[address]
                    self._remove_free(address)
                    self.reserved -= size
        # Adjacent runs of unmapped pages become one (try_merge_blocks).
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
        self._remove_free(address)
        if address < first:
            self._add_free(address, first - address)
        if last < end:
            self._add_free(last, end - last)
        self.unmapped[first] = last - first
        self.reserved -= last - first

    def _add_free(self, address: int, size: int) -> None:
        insort(self.pools[address >= LARGE_BASE], size << BITS | address)
        self.free_sizes[address] = size
        self.free_ends[address + size] = address

    def _remove_free(self, address: int) -> int:
        """Remove the free block at this address from all indexes, and return its size."""
        size = self.free_sizes.pop(address)
        del self.free_ends[address + size]
        pool = self.pools[address >= LARGE_BASE]
        del pool[bisect_left(pool, size << BITS | address)]
        return size


def _rounded(sizes: Sequence[int]) -> list[int]:
    """Allocations rounded up to whole blocks (round_size); frees, which are negative, unchanged."""
    column = np.asarray(sizes, np.int64)
    whole: list[int] = np.where(column > 0, -(-column // MIN_BLOCK) * MIN_BLOCK, column).tolist()
    return whole


def replay_on(  # noqa: C901, PLR0915 - inlined: calls in this loop would dominate a simulation
    state: AllocatorState, storages: Sequence[int], sizes: Sequence[int]
) -> AllocatorPeaks:
    """Replay events on an allocator's state; arguments and errors are those of ``replay``."""
    small, large = state.pools
    free_sizes, free_ends = state.free_sizes, state.free_ends
    expandable = state.expandable
    most_kept = MIN_BLOCK - 1 if expandable else SMALL  # a large block keeps no larger remainder
    blocks: dict[int, tuple[int, int]] = {}  # address and size, by storage
    allocated = peak_allocated = 0
    failed_at = None
    for event, (storage, rounded) in enumerate(zip(storages, _rounded(sizes), strict=True)):
        if rounded > 0:
            pool = large if rounded > SMALL else small
            # The first key at or above this one: the best fit, and of equal sizes the lowest
            # address.
            at = bisect_left(pool, rounded << BITS)
            if at < len(pool):
                if expandable:
                    at = state.best_expandable(pool, at)
                key = pool.pop(at)
                address, size = key & MASK, key >> BITS
                del free_sizes[address], free_ends[address + size]
            else:
                block = state.new_block(rounded)
                if block is None:
                    failed_at = event
                    break
                address, size = block
            remainder = size - rounded
            if remainder > most_kept or (remainder and pool is small):
                rest = address + rounded
                insort(pool, remainder << BITS | rest)
                free_sizes[rest] = remainder
                free_ends[rest + remainder] = rest
                size = rounded
            blocks[storage] = (address, size)
            allocated += size
            if allocated > peak_allocated:  # noqa: PLR1730 - max costs nearly a tenth of the loop
                peak_allocated = allocated
        elif rounded < 0:
            if storage not in blocks:
                raise ValueError(f"event {event} frees storage {storage}, which is not allocated")
            address, size = blocks.pop(storage)
            allocated -= size
            pool = large if address >= LARGE_BASE else small
            after = address + size
            if after in free_sizes:
                following = free_sizes.pop(after)
                del pool[bisect_left(pool, following << BITS | after)]
                del free_ends[after + following]
                size += following
            if address in free_ends:
                before = free_ends.pop(address)
                preceding = free_sizes.pop(before)
                del pool[bisect_left(pool, preceding << BITS | before)]
                address = before
                size += preceding
            insort(pool, size << BITS | address)
            free_sizes[address] = size
            free_ends[address + size] = address
    return AllocatorPeaks(peak_allocated, state.peak_reserved, state.retries, failed_at)
