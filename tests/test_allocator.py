"""The model of PyTorch's caching allocator: its documented rules, and no others."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trials.simulation.allocator import AllocatorPeaks, replay

KIB, MIB = 2**10, 2**20


def played(*events: tuple[int, int], capacity: int | None = None) -> AllocatorPeaks:
    """Storages that come (name, bytes) and go (name, less than zero)."""
    names, sizes = zip(*events, strict=True)
    return replay(names, sizes, capacity_bytes=capacity)


@pytest.mark.parametrize(
    ("asked", "block", "segment"),
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
    asked: int, block: int, segment: int
) -> None:
    """512 bytes, then pools of 2 and 20 MiB segments, then segments of their own by 2 MiB."""
    peaks = played((0, asked))
    assert (peaks.peak_allocated_bytes, peaks.peak_reserved_bytes) == (block, segment)


def test_small_blocks_share_a_segment_and_large_ones_another() -> None:
    """Four of 512 KiB in 2 MiB, ten of 2 MiB in 20."""
    assert played(*((n, 512 * KIB) for n in range(4))).peak_reserved_bytes == 2 * MIB
    assert played(*((n, 512 * KIB) for n in range(5))).peak_reserved_bytes == 4 * MIB
    assert played(*((n, 2 * MIB) for n in range(10))).peak_reserved_bytes == 20 * MIB
    assert played((0, MIB), (1, 2 * MIB)).peak_reserved_bytes == 22 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    """Of a free 12 and a free 30 MiB, 11 MiB takes the 12, so that 30 fits after it."""
    events = [(0, 30 * MIB), (1, 12 * MIB), (0, -1), (1, -1), (2, 11 * MIB), (3, 30 * MIB)]
    assert played(*events).peak_reserved_bytes == 42 * MIB


def test_a_remainder_of_more_than_a_mebibyte_is_split_off() -> None:
    """12 MiB out of 30 leave 18; 29.5 out of 30 leave nothing, and count whole."""
    reused = played((0, 30 * MIB), (0, -1), (1, 12 * MIB), (2, 18 * MIB))
    assert reused.peak_reserved_bytes == 30 * MIB
    whole = played((0, 30 * MIB), (0, -1), (1, 30 * MIB - 512 * KIB))
    assert whole.peak_allocated_bytes == 30 * MIB


def test_free_neighbours_are_merged_within_a_segment() -> None:
    """Three of 2 MiB let go in any order make room for one of 6; two segments stay two."""
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        events = [*((n, 2 * MIB) for n in range(10)), *((n, -1) for n in order), (10, 6 * MIB)]
        assert played(*events).peak_reserved_bytes == 20 * MIB
    apart = [(0, 10 * MIB), (1, 10 * MIB), (0, -1), (1, -1), (2, 20 * MIB)]
    assert played(*apart).peak_reserved_bytes == 40 * MIB


def test_at_the_limit_free_segments_are_given_back_once() -> None:
    """30 MiB free and 40 asked for, of 50: given back, and counted."""
    peaks = played((0, 30 * MIB), (0, -1), (1, 40 * MIB), capacity=50 * MIB)
    assert peaks == AllocatorPeaks(40 * MIB, 40 * MIB, retries=1, failed_at=None)


def test_a_segment_in_part_in_use_is_not_given_back() -> None:
    """2 MiB of 20 in use hold all 20: 40 of 50 cannot be had, and it is told where."""
    events = [(0, 2 * MIB), (1, 12 * MIB), (1, -1), (2, 40 * MIB)]
    assert played(*events, capacity=50 * MIB).failed_at == 3


def test_expandable_segments_grow_by_what_is_missing() -> None:
    """30 MiB free at the end and 45 asked for: a page of 20 is added, no segment of 46."""
    events = [(0, 30 * MIB), (0, -1), (1, 45 * MIB)]
    names, sizes = zip(*events, strict=True)
    plain = replay(names, sizes, capacity_bytes=None)
    grown = replay(names, sizes, capacity_bytes=None, expandable_segments=True)
    assert (plain.peak_reserved_bytes, grown.peak_reserved_bytes) == (76 * MIB, 60 * MIB)


def test_expandable_segments_give_back_free_pages() -> None:
    """100 MiB free before 2 in use: 80 of them are given back where 20 more are asked of 130."""
    events = [(0, 100 * MIB), (1, 2 * MIB), (0, -1), (2, 90 * KIB), (3, 105 * MIB)]
    names, sizes = zip(*events, strict=True)
    peaks = replay(names, sizes, capacity_bytes=150 * MIB, expandable_segments=True)
    assert (peaks.retries, peaks.failed_at) == (1, None)


def test_what_is_not_there_cannot_go() -> None:
    """It names the storage."""
    with pytest.raises(ValueError, match="storage 7"):
        played((0, 1), (7, -1))


@dataclass
class _Block:
    address: int
    size: int
    name: int | None


def plainly(names: list[int], sizes: list[int], capacity: int | None) -> AllocatorPeaks:
    """The same rules over lists of segments, looked through from end to end."""
    segments: list[tuple[bool, list[_Block]]] = []
    live: dict[int, _Block] = {}
    made = reserved = peak = peak_reserved = retries = 0
    for event, (name, size) in enumerate(zip(names, sizes, strict=True)):
        if size < 0:
            live.pop(name).name = None
            for _, blocks in segments:
                for one, other in zip(list(blocks), blocks[1:], strict=False):
                    if one.name is None and other.name is None and one in blocks:
                        other.address, other.size = one.address, one.size + other.size
                        blocks.remove(one)
            continue
        rounded = -(-size // 512) * 512
        small = rounded <= MIB
        free = [
            (block.size, block.address, block, blocks)
            for kind, blocks in segments
            for block in blocks
            if kind == small and block.name is None and block.size >= rounded
        ]
        if not free:
            need = (
                2 * MIB
                if small
                else 20 * MIB
                if rounded < 10 * MIB
                else -(-rounded // (2 * MIB)) * 2 * MIB
            )
            if capacity is not None and reserved + need > capacity:
                retries += 1
                kept = [s for s in segments if any(b.name is not None for b in s[1])]
                reserved = sum(b.size for _, blocks in kept for b in blocks)
                segments = kept
                if reserved + need > capacity:
                    return AllocatorPeaks(peak, peak_reserved, retries, event)
            block = _Block(made, need, None)
            made += need + 512
            reserved += need
            peak_reserved = max(peak_reserved, reserved)
            segments.append((small, [block]))
            free = [(need, block.address, block, segments[-1][1])]
        _, _, block, blocks = min(free, key=lambda each: each[:2])
        left = block.size - rounded
        if left > MIB or (small and left >= 512):
            blocks.insert(blocks.index(block) + 1, _Block(block.address + rounded, left, None))
            block.size = rounded
        block.name = name
        live[name] = block
        peak = max(peak, sum(b.size for b in live.values()))
    return AllocatorPeaks(peak, peak_reserved, retries, None)


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Storages of every size that come and go in any order."""
    names, sizes, live = [], [], []
    for name in range(draw(st.integers(1, 40))):
        if live and draw(st.booleans()):
            gone = live.pop(draw(st.integers(0, len(live) - 1)))
            names.append(gone)
            sizes.append(-1)
        power = draw(st.integers(0, 25))
        names.append(name)
        sizes.append(draw(st.integers(2**power, 2 ** (power + 1))))
        live.append(name)
    return names, sizes


@settings(max_examples=300, deadline=None)
@given(streams(), st.none() | st.integers(2, 200))
def test_it_does_what_the_rules_say_of_any_stream(
    stream: tuple[list[int], list[int]], capacity_mib: int | None
) -> None:
    """The fast replay and the plain one agree on every peak, retry and failure."""
    names, sizes = stream
    capacity = None if capacity_mib is None else capacity_mib * MIB
    assert replay(names, sizes, capacity_bytes=capacity) == plainly(names, sizes, capacity)
