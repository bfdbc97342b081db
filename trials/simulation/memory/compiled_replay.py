"""The allocator's rules, compiled by numba.

A step has up to a million events, and a search replays many steps. numba compiles functions on
arrays: a block is a row of ``Memory.blocks``, and a reference to a block is the number of its row.
All functions are in one file, because numba's cache on disk notices no change of another one; of
other files there is nothing but ``MIN_BLOCK``, which never changes.
Names in parentheses are the functions and constants of c10/cuda/CUDACachingAllocator.cpp.
"""

from typing import NamedTuple

import numpy as np

from trials.simulation.memory.blocks import MIN_BLOCK
from trials.simulation.ranks.compilation import compiled
from trials.simulation.recording import IntArray

SMALL = 2**20  # kSmallSize: largest block of the small pool
SMALL_SEGMENT = 2 * 2**20  # kSmallBuffer
LARGE_SEGMENT = 20 * 2**20  # kLargeBuffer: segment for large blocks below kMinLargeAlloc
MIN_OWN_SEGMENT = 10 * 2**20  # kMinLargeAlloc: smallest block with a segment of its own
ROUND_LARGE = 2 * 2**20  # kRoundLarge: such a segment is a multiple of it
LARGE_BASE = LARGE_SEGMENT << 36  # first address of the large pool, aligned to its pages
ENDLESS = 2**58  # bytes of unmapped address space at the end of an expandable segment
NONE = -1  # no block, no limit, no event


# Columns of Memory.blocks.
COLUMNS = 5
START, SIZE, BEFORE, AFTER, STATE = range(COLUMNS)  # BEFORE, AFTER: neighbours in the segment
# States of a block. An expandable segment has address space without pages.
FREE, USED, UNMAPPED = range(3)

# Indices of Memory.counts. Of the first two, that of the large pool is the next number.
COUNTS = 12
FREE_BLOCKS = 0  # blocks in the pool
TOP = 2  # first unused address
ROWS = 4  # rows of Memory.blocks that were ever in use
SPARE = 5  # first of them that holds no block now; AFTER is the next one
CAPACITY = 6  # most bytes of all segments together
EXPANDABLE = 7  # whether each pool is one expandable segment
RESERVED, PEAK_RESERVED = 8, 9  # bytes of all segments or mapped pages
RETRIES = 10  # times that cached segments were released for another attempt
SEGMENTS = 11  # segments made so far


class Memory(NamedTuple):
    """State of an allocator.

    Attributes:
        blocks: (rows, columns) blocks, by ``START`` to ``STATE``.
        pools: (2, rows) free blocks of the small and of the large pool, the largest first, and of
            equal ones the highest address: most moves are among small blocks, so at the end.
        counts: (numbers,) by ``FREE_BLOCKS`` to ``SEGMENTS``.
        addresses: (segments,) address of each segment in the order of their allocation; empty
            where each is above the older ones.
    """

    blocks: IntArray
    pools: IntArray
    counts: IntArray
    addresses: IntArray


@compiled
def replay_events(storages: IntArray, sizes: IntArray, memory: Memory) -> tuple[int, int, int]:
    """Most bytes in use, the event that ran out of memory, and one that frees nothing, or NONE."""
    if memory.counts[EXPANDABLE]:
        for is_large in range(2):  # rows 0 and 2 are the lower ends of the two segments
            base = memory.counts[TOP + is_large]
            end = _new_block(memory, base, 0, NONE, NONE)
            memory.blocks[_new_block(memory, base, ENDLESS, end, NONE), STATE] = UNMAPPED
    of_storage = np.full(storages.max() + 1 if len(storages) else 0, NONE, np.int64)
    allocated = peak = 0
    for event in range(len(storages)):
        size, storage = sizes[event], storages[event]
        if size > 0:
            block = _allocate(-(-size // MIN_BLOCK) * MIN_BLOCK, memory)
            if block == NONE:
                return peak, event, NONE
            of_storage[storage] = block
            allocated += memory.blocks[block, SIZE]
            peak = max(peak, allocated)
        elif size < 0:
            block = of_storage[storage]
            if block == NONE:
                return peak, NONE, event
            of_storage[storage] = NONE
            allocated -= memory.blocks[block, SIZE]
            _free(block, memory)
    return peak, NONE, NONE


@compiled
def _allocate(rounded: int, memory: Memory) -> int:
    """Block for a rounded size, with one retry (malloc); NONE when out of memory."""
    counts = memory.counts
    is_large = 1 if rounded > SMALL else 0
    at = _count_from(is_large, rounded, 0, memory) - 1
    if at >= 0:
        if counts[EXPANDABLE]:
            at = _best_expandable(at, is_large, memory)
        block = memory.pools[is_large, at]
        _remove_at(at, is_large, memory)
    else:
        block = _alloc_block(rounded, is_large, memory)
        if block == NONE:
            _release_cached_blocks(memory)
            counts[RETRIES] += 1
            block = _alloc_block(rounded, is_large, memory)
        if block == NONE:
            return NONE
    remainder = memory.blocks[block, SIZE] - rounded
    # A large block of an ordinary segment keeps a remainder of up to 1 MiB.
    if remainder > (SMALL if is_large and not counts[EXPANDABLE] else 0):
        _add_free(_split(block, rounded, memory), memory)
    return block  # type: ignore[no-any-return] # an element of an array


@compiled
def _free(block: int, memory: Memory) -> None:
    """Merge a block with its free neighbours (free_block), and add it to its pool."""
    blocks = memory.blocks
    for neighbour in (blocks[block, AFTER], blocks[block, BEFORE]):
        if neighbour != NONE and blocks[neighbour, STATE] == FREE:
            _remove_free(neighbour, memory)
            _absorb(block, neighbour, memory)
    _add_free(block, memory)


@compiled
def _alloc_block(rounded: int, is_large: int, memory: Memory) -> int:
    """Block of a new segment, or of new pages, in no pool; NONE beyond the capacity."""
    counts = memory.counts
    if counts[EXPANDABLE]:
        return _try_allocate_expandable_block(rounded, is_large, memory)
    size = _segment_bytes(rounded)
    if not _reserve(size, memory):
        return NONE
    address = counts[TOP + is_large]
    counts[TOP + is_large] += size + MIN_BLOCK
    if len(memory.addresses):
        address = memory.addresses[counts[SEGMENTS]] + (LARGE_BASE if is_large else 0)
    counts[SEGMENTS] += 1
    return _new_block(memory, address, size, NONE, NONE)


@compiled
def _segment_bytes(rounded: int) -> int:
    """Size of the segment for a block that no cached block serves (get_allocation_size)."""
    if rounded <= SMALL:
        return SMALL_SEGMENT
    if rounded < MIN_OWN_SEGMENT:
        return LARGE_SEGMENT
    return -(-rounded // ROUND_LARGE) * ROUND_LARGE


@compiled
def _reserve(size: int, memory: Memory) -> bool:
    counts = memory.counts
    if counts[CAPACITY] != NONE and counts[RESERVED] + size > counts[CAPACITY]:
        return False
    counts[RESERVED] += size
    counts[PEAK_RESERVED] = max(counts[PEAK_RESERVED], counts[RESERVED])
    return True


@compiled
def _try_allocate_expandable_block(size: int, is_large: int, memory: Memory) -> int:
    blocks = memory.blocks
    block = _find_expandable_block(size, is_large, memory)
    while blocks[block, STATE] != FREE or blocks[block, SIZE] < size:
        gap, has = block, 0
        if blocks[block, STATE] == FREE:
            gap, has = blocks[block, AFTER], blocks[block, SIZE]
        if not _map_block(gap, size - has, is_large, memory):
            return NONE  # Pages mapped by earlier passes remain, as free blocks.
        block = gap
    _remove_free(block, memory)
    return block


@compiled
def _find_expandable_block(size: int, is_large: int, memory: Memory) -> int:
    """First of adjacent free and unmapped blocks, at the lowest address, with ``size`` bytes."""
    blocks = memory.blocks
    first = block = 2 * is_large
    available = 0
    has_unmapped = False
    while not has_unmapped or available < size:
        block = blocks[block, AFTER]
        if blocks[block, STATE] == USED:
            available, has_unmapped = 0, False
            continue
        if available == 0:
            first = block
        available += blocks[block, SIZE]
        has_unmapped = has_unmapped or blocks[block, STATE] == UNMAPPED
    return first


@compiled
def _map_block(gap: int, wanted: int, is_large: int, memory: Memory) -> bool:
    """Map the first pages of an unmapped block, which merges with its free neighbours."""
    page = LARGE_SEGMENT if is_large else SMALL_SEGMENT
    mapped = -(-min(wanted, memory.blocks[gap, SIZE]) // page) * page
    if not _reserve(mapped, memory):
        return False
    if mapped < memory.blocks[gap, SIZE]:
        memory.blocks[_split(gap, mapped, memory), STATE] = UNMAPPED
    _free(gap, memory)
    return True


@compiled
def _best_expandable(at: int, is_large: int, memory: Memory) -> int:
    """Index in a pool, from ``at`` down, of the best fit by the size a block can grow to."""
    pool = memory.pools[is_large]
    while at > 0 and _grown_size(pool[at - 1], memory) < _grown_size(pool[at], memory):
        at -= 1
    return at


@compiled
def _grown_size(block: int, memory: Memory) -> int:
    blocks = memory.blocks
    size, after = blocks[block, SIZE], blocks[block, AFTER]
    if after != NONE and blocks[after, STATE] == UNMAPPED:
        size += blocks[after, SIZE]
    return size  # type: ignore[no-any-return] # an element of an array


@compiled
def _release_cached_blocks(memory: Memory) -> None:
    blocks, counts = memory.blocks, memory.counts
    for is_large in range(2):
        for block in memory.pools[is_large, : counts[FREE_BLOCKS + is_large]][::-1].copy():
            if counts[EXPANDABLE]:
                _unmap_block(block, is_large, memory)
            elif blocks[block, BEFORE] == NONE and blocks[block, AFTER] == NONE:
                _remove_free(block, memory)
                counts[RESERVED] -= blocks[block, SIZE]
                _forget(block, memory)


@compiled
def _unmap_block(block: int, is_large: int, memory: Memory) -> None:
    """Unmap the pages of a free block that hold nothing else."""
    blocks = memory.blocks
    page = LARGE_SEGMENT if is_large else SMALL_SEGMENT
    start, end = blocks[block, START], blocks[block, START] + blocks[block, SIZE]
    first, last = -(-start // page) * page, end // page * page
    if first >= last:
        return
    _remove_free(block, memory)
    memory.counts[RESERVED] -= last - first
    if last < end:
        _add_free(_split(block, last - start, memory), memory)
    pages = block
    if start < first:
        pages = _split(block, first - start, memory)
        _add_free(block, memory)
    blocks[pages, STATE] = UNMAPPED
    # Adjacent unmapped blocks become one (try_merge_blocks).
    for neighbour in (blocks[pages, BEFORE], blocks[pages, AFTER]):
        if neighbour != NONE and blocks[neighbour, STATE] == UNMAPPED:
            _absorb(pages, neighbour, memory)


@compiled
def _new_block(memory: Memory, start: int, size: int, before: int, after: int) -> int:
    """Add a block between two neighbours, which is in no pool."""
    blocks, counts = memory.blocks, memory.counts
    block = counts[SPARE]
    if block == NONE:
        block = counts[ROWS]
        counts[ROWS] += 1
    else:
        counts[SPARE] = blocks[block, AFTER]
    blocks[block, START], blocks[block, SIZE] = start, size
    blocks[block, BEFORE], blocks[block, AFTER] = before, after
    blocks[block, STATE] = USED
    if before != NONE:
        blocks[before, AFTER] = block
    if after != NONE:
        blocks[after, BEFORE] = block
    return block  # type: ignore[no-any-return] # an element of an array


@compiled
def _forget(block: int, memory: Memory) -> None:
    """Remove a block without neighbours, which is in no pool."""
    memory.blocks[block, AFTER] = memory.counts[SPARE]
    memory.counts[SPARE] = block


@compiled
def _split(block: int, size: int, memory: Memory) -> int:
    """Keep the first ``size`` bytes of a block; the others become a block in no pool."""
    blocks = memory.blocks
    start, rest = blocks[block, START] + size, blocks[block, SIZE] - size
    blocks[block, SIZE] = size
    return _new_block(memory, start, rest, block, blocks[block, AFTER])


@compiled
def _absorb(block: int, neighbour: int, memory: Memory) -> None:
    """Merge a neighbour, which is in no pool, into a block, which is in none either."""
    blocks = memory.blocks
    blocks[block, START] = min(blocks[block, START], blocks[neighbour, START])
    blocks[block, SIZE] += blocks[neighbour, SIZE]
    before, after = blocks[neighbour, BEFORE], blocks[neighbour, AFTER]
    if before != NONE:
        blocks[before, AFTER] = after
    if after != NONE:
        blocks[after, BEFORE] = before
    _forget(neighbour, memory)


@compiled
def _count_from(is_large: int, size: int, start: int, memory: Memory) -> int:
    """Number of blocks in a pool from a size on, and of equal ones from an address on."""
    blocks, pool = memory.blocks, memory.pools[is_large]
    low, high = 0, memory.counts[FREE_BLOCKS + is_large]
    while low < high:
        middle = (low + high) // 2
        block = pool[middle]
        is_larger = blocks[block, SIZE] > size
        if is_larger or (blocks[block, SIZE] == size and blocks[block, START] >= start):
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _add_free(block: int, memory: Memory) -> None:
    """Add a block to its pool."""
    blocks, counts = memory.blocks, memory.counts
    is_large = 1 if blocks[block, START] >= LARGE_BASE else 0
    at = _count_from(is_large, blocks[block, SIZE], blocks[block, START], memory)
    pool, count = memory.pools[is_large], counts[FREE_BLOCKS + is_large]
    # Indices without a sign cannot count from the end, so that numba moves several at once.
    for later in range(np.uint64(count), np.uint64(at), -1):
        pool[later] = pool[later - np.uint64(1)]
    pool[at] = block
    counts[FREE_BLOCKS + is_large] = count + 1
    blocks[block, STATE] = FREE


@compiled
def _remove_free(block: int, memory: Memory) -> None:
    """Remove a block from its pool."""
    blocks = memory.blocks
    is_large = 1 if blocks[block, START] >= LARGE_BASE else 0
    count = _count_from(is_large, blocks[block, SIZE], blocks[block, START], memory)
    _remove_at(count - 1, is_large, memory)


@compiled
def _remove_at(at: int, is_large: int, memory: Memory) -> None:
    """Remove the block at an index from its pool."""
    pool, counts = memory.pools[is_large], memory.counts
    memory.blocks[pool[at], STATE] = USED
    counts[FREE_BLOCKS + is_large] -= 1
    for later in range(np.uint64(at), np.uint64(counts[FREE_BLOCKS + is_large])):  # as above
        pool[later] = pool[later + np.uint64(1)]
