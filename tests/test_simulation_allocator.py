"""The model of PyTorch's caching allocator: its documented rules, and no others."""

import random

import pytest
from builders.plain_allocator import PlainAllocator
from hypothesis import given, settings
from hypothesis import strategies as st

from trials.simulation.memory.allocator import replay
from trials.simulation.memory.blocks import MOST_BYTES, AllocatorPeaks
from trials.simulation.trace_cache import TraceError

KIB, MIB = 2**10, 2**20


def played(
    *events: tuple[int, int], capacity: int | None = None, expandable: bool = False
) -> AllocatorPeaks:
    """Replay storages that are allocated (name, bytes) and freed (name, less than zero)."""
    names, sizes = zip(*events, strict=True)
    return replay(names, sizes, capacity_bytes=capacity, expandable_segments=expandable)


@pytest.mark.parametrize(
    ("requested", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (2 * MIB, 2 * MIB, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB, 12 * MIB),  # what is left, under 1 MiB, stays with the block
        (19 * MIB + 1, 20 * MIB, 20 * MIB),
    ],
)
def test_a_block_is_rounded_and_its_segment_by_its_size(
    requested: int, block: int, segment: int
) -> None:
    """Blocks round to 512 bytes; segments are 2 MiB, 20 MiB, or the block rounded to 2 MiB."""
    peaks = played((0, requested))
    assert (peaks.peak_allocated_bytes, peaks.peak_reserved_bytes) == (block, segment)


def test_small_blocks_share_a_segment_and_large_ones_another() -> None:
    """Four blocks of 512 KiB share 2 MiB, ten of 2 MiB share 20 MiB."""
    assert played(*((n, 512 * KIB) for n in range(4))).peak_reserved_bytes == 2 * MIB
    assert played(*((n, 512 * KIB) for n in range(5))).peak_reserved_bytes == 4 * MIB
    assert played(*((n, 2 * MIB) for n in range(10))).peak_reserved_bytes == 20 * MIB
    assert played((0, MIB), (1, 2 * MIB)).peak_reserved_bytes == 22 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    """Of a free 12 and a free 30 MiB, 11 MiB takes the 12, so that 30 fits after it."""
    events = [(0, 30 * MIB), (1, 12 * MIB), (0, -1), (1, -1), (2, 11 * MIB), (3, 30 * MIB)]
    assert played(*events).peak_reserved_bytes == 42 * MIB


def test_a_remainder_of_more_than_a_mebibyte_is_split_off() -> None:
    """12 MiB out of 30 leave 18; 29.5 out of 30 leave nothing and count as 30."""
    reused = played((0, 30 * MIB), (0, -1), (1, 12 * MIB), (2, 18 * MIB))
    assert reused.peak_reserved_bytes == 30 * MIB
    whole = played((0, 30 * MIB), (0, -1), (1, 30 * MIB - 512 * KIB))
    assert whole.peak_allocated_bytes == 30 * MIB


def test_free_neighbours_are_merged_within_a_segment() -> None:
    """Three of 2 MiB freed in any order make room for one of 6; two segments stay two."""
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        events = [*((n, 2 * MIB) for n in range(10)), *((n, -1) for n in order), (10, 6 * MIB)]
        assert played(*events).peak_reserved_bytes == 20 * MIB
    apart = [(0, 10 * MIB), (1, 10 * MIB), (0, -1), (1, -1), (2, 20 * MIB)]
    assert played(*apart).peak_reserved_bytes == 40 * MIB


def test_at_the_limit_free_segments_are_released_once() -> None:
    """With 30 of 50 MiB cached, a request for 40 releases them and counts one retry."""
    peaks = played((0, 30 * MIB), (0, -1), (1, 40 * MIB), capacity=50 * MIB)
    assert peaks == AllocatorPeaks(40 * MIB, 40 * MIB, retries=1, failed_at=None)


def test_a_segment_partly_in_use_is_not_released() -> None:
    """2 MiB in use hold 20, so 40 of 50 do not fit; the failing event is reported."""
    events = [(0, 2 * MIB), (1, 12 * MIB), (1, -1), (2, 40 * MIB)]
    assert played(*events, capacity=50 * MIB).failed_at == 3


def test_expandable_segments_grow_by_what_is_missing() -> None:
    """With 30 MiB free at the end, 45 add a page of 20, not a segment of 46."""
    events = [(0, 30 * MIB), (0, -1), (1, 45 * MIB)]
    plain, grown = played(*events), played(*events, expandable=True)
    assert (plain.peak_reserved_bytes, grown.peak_reserved_bytes) == (76 * MIB, 60 * MIB)


def test_expandable_segments_release_free_pages() -> None:
    """100 MiB free before 2 in use are released, so that 105 fit after these in 150."""
    events = [(0, 100 * MIB), (1, 2 * MIB), (0, -1), (2, 90 * KIB), (3, 105 * MIB)]
    peaks = played(*events, capacity=150 * MIB, expandable=True)
    assert (peaks.retries, peaks.failed_at) == (1, None)


def test_a_remainder_of_a_mebibyte_is_not_split_off() -> None:
    """The large pool splits above 1 MiB, the small pool from 512 bytes."""
    assert played((0, 12 * MIB), (0, -1), (1, 11 * MIB)).peak_allocated_bytes == 12 * MIB
    just = played((0, 12 * MIB), (0, -1), (1, 11 * MIB - 512))
    assert just.peak_allocated_bytes == 12 * MIB
    small = [(0, MIB), (1, MIB), (0, -1), (2, MIB - 512), (3, 512)]
    assert played(*small).peak_reserved_bytes == 2 * MIB


def test_pools_do_not_lend_to_each_other() -> None:
    """With 20 MiB free in the large pool, 1 MiB still takes a small segment."""
    assert played((0, 20 * MIB), (0, -1), (1, MIB)).peak_reserved_bytes == 22 * MIB


def test_freed_blocks_are_reused() -> None:
    """A thousand blocks of one size, one after another, take one segment."""
    events = [(n, size) for n in range(1000) for size in (30 * MIB, -1)]
    assert played(*events) == AllocatorPeaks(30 * MIB, 30 * MIB, retries=0, failed_at=None)


def test_out_of_memory_ends_the_replay_after_one_retry() -> None:
    """The first event that does not fit is reported, with the peaks before it."""
    peaks = played((0, 30 * MIB), (1, 30 * MIB), (2, 1), capacity=50 * MIB)
    assert peaks == AllocatorPeaks(30 * MIB, 30 * MIB, retries=1, failed_at=1)


def test_free_segments_of_the_other_pool_are_released_too() -> None:
    """2 MiB of the small pool make room for 50 of the large one."""
    peaks = played((0, 1), (0, -1), (1, 50 * MIB), capacity=50 * MIB)
    assert peaks == AllocatorPeaks(50 * MIB, 50 * MIB, retries=1, failed_at=None)


def test_a_size_of_zero_changes_nothing() -> None:
    """Neither the memory nor the storage of that name changes."""
    assert played((0, 0)) == AllocatorPeaks(0, 0, retries=0, failed_at=None)
    assert played((0, MIB), (0, 0), (0, -1)).peak_allocated_bytes == MIB


@pytest.mark.parametrize(("first", "reserved"), [(0, 60 * MIB), (1, 40 * MIB)])
def test_of_equal_blocks_the_lower_address_is_taken(first: int, reserved: int) -> None:
    """Two segments have 18 MiB free; taking the one beside 2 free MiB leaves no 20."""
    places = [10 * 2**30, 20 * 2**30]
    addresses = [places[first], places[1 - first], 30 * 2**30]
    names = [0, 1, 2, 3, 1, 3, 0, 4, 5]
    sizes = [2 * MIB, 18 * MIB, 2 * MIB, 18 * MIB, -1, -1, -1, 20 * MIB, 18 * MIB]
    assert replay(names, sizes, capacity_bytes=None).peak_reserved_bytes == 40 * MIB
    names, sizes = [0, 1, 2, 3, 1, 3, 4, 0, 5], [*sizes[:6], 18 * MIB, -1, 20 * MIB]
    peaks = replay(names, sizes, capacity_bytes=None, addresses=addresses)
    assert peaks.peak_reserved_bytes == reserved


def test_segments_in_a_row_in_memory_are_not_merged() -> None:
    """Two segments of 10 MiB that CUDA placed side by side hold no block of 20."""
    names, sizes = [0, 1, 0, 1, 2], [10 * MIB, 10 * MIB, -1, -1, 20 * MIB]
    addresses = [2**40, 2**40 + 10 * MIB, 2**40 + 20 * MIB]
    assert (
        replay(names, sizes, capacity_bytes=None, addresses=addresses).peak_reserved_bytes
        == 40 * MIB
    )


def test_any_remainder_is_split_off_in_an_expandable_segment() -> None:
    """In the large pool, 20 MiB less 512 bytes take exactly that, not 20."""
    assert played((0, 20 * MIB - 512), expandable=True).peak_allocated_bytes == 20 * MIB - 512


def test_a_block_that_can_grow_is_not_the_best_fit() -> None:
    """12 MiB use 14 that cannot grow, not the last 12, so that 25 add only one page."""
    events = [(0, 14 * MIB), (1, 14 * MIB), (0, -1), (2, 12 * MIB), (3, 25 * MIB)]
    assert played(*events, expandable=True).peak_reserved_bytes == 60 * MIB
    events = [(0, 14 * MIB), (1, 14 * MIB), (0, -1), (2, 12 * MIB), (4, 12 * MIB)]
    assert played(*events, expandable=True).peak_reserved_bytes == 40 * MIB


def test_released_pages_are_mapped_again_in_place() -> None:
    """Two holes of 20 MiB and the part between become 55, and finally all 100 are whole."""
    events = [
        *((n, 20 * MIB) for n in range(5)),
        *((1, -1), (3, -1), (5, 30 * MIB)),  # retry: the holes are given back; 30 are at the end
        *((5, -1), (2, -1), (6, 55 * MIB)),  # retry: 60 in a row are unmapped from 20 on
        *((0, -1), (4, -1), (6, -1), (7, 100 * MIB)),  # no retry
    ]
    peaks = played(*events, capacity=100 * MIB, expandable=True)
    assert peaks == AllocatorPeaks(100 * MIB, 100 * MIB, retries=2, failed_at=None)


@pytest.mark.parametrize("expandable", [False, True])
def test_more_than_is_replayed_is_an_error_at_once(*, expandable: bool) -> None:
    """Sums of such sizes overflow, and then the search among the blocks never ended."""
    with pytest.raises(TraceError, match="a step takes more memory than is simulated"):
        played(*((n, 2**62) for n in range(9)), expandable=expandable)
    most = played(*((n, MOST_BYTES // 8) for n in range(8)), expandable=expandable)
    assert most.peak_allocated_bytes == MOST_BYTES


def test_freeing_an_unknown_storage_is_an_error() -> None:
    """The error names the storage."""
    with pytest.raises(ValueError, match="storage 7"):
        played((0, 1), (7, -1))


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Draw storages of every size that are allocated and freed in any order."""
    names, sizes, live = [], [], []
    for name in range(draw(st.integers(1, 40))):
        for _ in range(draw(st.integers(0, 2))):
            if live:
                names.append(live.pop(draw(st.integers(0, len(live) - 1))))
                sizes.append(-1)
        power = draw(st.integers(0, 25))
        names.append(name)
        sizes.append(draw(st.integers(2**power, 2 ** (power + 1))))
        live.append(name)
    return names, sizes


@settings(max_examples=250)
@given(stream=streams(), capacity_mib=st.none() | st.integers(2, 200), expandable=st.booleans())
def test_the_replay_follows_the_rules_on_any_stream(
    *, stream: tuple[list[int], list[int]], capacity_mib: int | None, expandable: bool
) -> None:
    """The fast replay and the plain one agree on every peak, retry and failure."""
    names, sizes = stream
    capacity = None if capacity_mib is None else capacity_mib * MIB
    peaks = replay(names, sizes, capacity_bytes=capacity, expandable_segments=expandable)
    assert peaks == PlainAllocator(capacity, expandable=expandable).replay(names, sizes)


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_long_streams_at_the_limit_are_replayed_alike(seed: int, *, expandable: bool) -> None:
    """Hundreds of live storages, full memory and many retries do not occur in short streams."""
    draw = random.Random(seed)
    names, sizes, live = [], [], dict[int, int]()
    for name in range(1500):
        while live and (draw.random() < 0.4 or sum(live.values()) > 400 * MIB):
            gone = draw.choice(list(live))
            del live[gone]
            names.append(gone)
            sizes.append(-1)
        live[name] = round(2 ** draw.uniform(0, 26))
        names.append(name)
        sizes.append(live[name])
    held = replay(names, sizes, capacity_bytes=None, expandable_segments=expandable)
    capacity = held.peak_reserved_bytes * (99 - 2 * seed) // 100
    peaks = replay(names, sizes, capacity_bytes=capacity, expandable_segments=expandable)
    assert peaks == PlainAllocator(capacity, expandable=expandable).replay(names, sizes)
    assert peaks.retries > 0


@settings(max_examples=80)
@given(stream=streams(), expandable=st.booleans())
def test_allocated_is_at_most_reserved_and_a_larger_memory_changes_nothing(
    *, stream: tuple[list[int], list[int]], expandable: bool
) -> None:
    """A stream that never reaches the limit does the same without one."""
    names, sizes = stream
    peaks = replay(names, sizes, capacity_bytes=None, expandable_segments=expandable)
    assert peaks.peak_allocated_bytes <= peaks.peak_reserved_bytes
    assert (peaks.retries, peaks.failed_at) == (0, None)
    held = peaks.peak_reserved_bytes
    for capacity in (held, held + 1, 2 * held):
        assert peaks == replay(
            names, sizes, capacity_bytes=capacity, expandable_segments=expandable
        )


@settings(max_examples=80)
@given(stream=streams(), expandable=st.booleans())
def test_freed_memory_is_whole_again(
    *, stream: tuple[list[int], list[int]], expandable: bool
) -> None:
    """After every storage is freed, one block may take all the memory."""
    names, sizes = stream
    held = replay(names, sizes, capacity_bytes=None, expandable_segments=expandable)
    capacity = -(-held.peak_reserved_bytes // (20 * MIB)) * 20 * MIB
    gone = {name for name, size in zip(names, sizes, strict=True) if size < 0}
    left = [name for name in names if name not in gone]
    names = [*names, *left, -1]
    sizes = [*sizes, *[-1 for _ in left], capacity]
    peaks = replay(names, sizes, capacity_bytes=capacity, expandable_segments=expandable)
    assert (peaks.failed_at, peaks.peak_allocated_bytes) == (None, capacity)
