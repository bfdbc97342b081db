"""The allocator's rules over plain lists of segments with linear search: slow and simple."""

from dataclasses import dataclass
from itertools import takewhile

from trials.simulation.memory.blocks import AllocatorPeaks

MIB = 2**20


@dataclass
class _Block:
    address: int
    size: int
    state: str  # "used", "free" or "unmapped"


@dataclass
class _Segment:
    small: bool
    blocks: list[_Block]


class PlainAllocator:
    """The caching allocator over lists of segments, searched from end to end."""

    def __init__(self, capacity: int | None, *, expandable: bool) -> None:
        self.capacity, self.expandable = capacity, expandable
        self.segments: list[_Segment] = []
        self.made = self.reserved = self.peak_reserved = self.retries = 0
        if expandable:
            for small in (True, False):
                self.segments.append(_Segment(small, [_Block(self.made, 10**15, "unmapped")]))
                self.made += 10**15

    def replay(self, names: list[int], sizes: list[int]) -> AllocatorPeaks:
        live: dict[int, _Block] = {}
        peak = 0
        for event, (name, size) in enumerate(zip(names, sizes, strict=True)):
            if size < 0:
                live.pop(name).state = "free"
                self.merge()
                continue
            block = self.allocated(-(-size // 512) * 512)
            if block is None:
                return AllocatorPeaks(peak, self.peak_reserved, self.retries, event)
            live[name] = block
            peak = max(peak, sum(block.size for block in live.values()))
        return AllocatorPeaks(peak, self.peak_reserved, self.retries, None)

    def allocated(self, rounded: int) -> _Block | None:
        small = rounded <= MIB
        segments = [segment for segment in self.segments if segment.small == small]
        candidates = [
            (block.size, block.address, self.room(segment, block), segment, block)
            for segment in segments
            for block in segment.blocks
            if block.state == "free" and block.size >= rounded
        ]
        candidates.sort(key=lambda candidate: candidate[:2])
        while self.expandable and len(candidates) > 1 and candidates[1][2] < candidates[0][2]:
            del candidates[0]
        place = candidates[0][3:] if candidates else self.fresh(rounded)
        if place is None:
            self.give_back()
            self.retries += 1
            place = self.fresh(rounded)
        if place is None:
            return None
        segment, block = place
        left = block.size - rounded
        if left > MIB or ((small or self.expandable) and left >= 512):
            rest = _Block(block.address + rounded, left, "free")
            segment.blocks.insert(segment.blocks.index(block) + 1, rest)
            block.size = rounded
        block.state = "used"
        return block

    @staticmethod
    def room(segment: _Segment, block: _Block) -> int:
        at = segment.blocks.index(block) + 1
        grows = at < len(segment.blocks) and segment.blocks[at].state == "unmapped"
        return block.size + (segment.blocks[at].size if grows else 0)

    def fresh(self, rounded: int) -> tuple[_Segment, _Block] | None:
        small = rounded <= MIB
        if self.expandable:
            return self.mapped(rounded, self.segments[0 if small else 1])
        own = -(-rounded // (2 * MIB)) * 2 * MIB
        need = 2 * MIB if small else 20 * MIB if rounded < 10 * MIB else own
        if not self.reserve(need):
            return None
        self.segments.append(_Segment(small, [_Block(self.made, need, "free")]))
        self.made += need
        return self.segments[-1], self.segments[-1].blocks[0]

    def mapped(self, rounded: int, segment: _Segment) -> tuple[_Segment, _Block] | None:
        """Map pages from the first place with room; pages stay mapped when a later one fails."""
        page = 2 * MIB if segment.small else 20 * MIB
        for at, block in enumerate(segment.blocks):
            run = list(takewhile(lambda part: part.state != "used", segment.blocks[at:]))
            if block.state != "used" and sum(part.size for part in run) >= rounded:
                break
        start = block.address
        while True:
            self.merge()
            block = next(part for part in segment.blocks if part.address == start)
            if block.state == "free" and block.size >= rounded:
                return segment, block
            at = segment.blocks.index(block)
            gap = segment.blocks[at + (block.state == "free")]
            missing = rounded - (block.size if block.state == "free" else 0)
            pages = -(-min(missing, gap.size) // page) * page
            if not self.reserve(
                pages
            ):  # A stretch of unmapped pages is reserved whole or not at all.
                return None
            new = _Block(gap.address, pages, "free")
            segment.blocks.insert(segment.blocks.index(gap), new)
            gap.address, gap.size = gap.address + pages, gap.size - pages
            if not gap.size:
                segment.blocks.remove(gap)

    def reserve(self, size: int) -> bool:
        if self.capacity is not None and self.reserved + size > self.capacity:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def give_back(self) -> None:
        if not self.expandable:
            used = [s for s in self.segments if any(b.state == "used" for b in s.blocks)]
            self.reserved = sum(b.size for s in used for b in s.blocks)
            self.segments = used
            return
        for base, segment in zip((0, 10**15), self.segments, strict=True):
            page = 2 * MIB if segment.small else 20 * MIB
            for block in [part for part in segment.blocks if part.state == "free"]:
                first = base - (base - block.address) // page * page
                last = base + (block.address + block.size - base) // page * page
                if first < last:
                    ends = [block.address, first, last, block.address + block.size]
                    states = ["free", "unmapped", "free"]
                    parts = [
                        _Block(start, end - start, state)
                        for start, end, state in zip(ends, ends[1:], states, strict=False)
                        if end > start
                    ]
                    at = segment.blocks.index(block)
                    segment.blocks[at : at + 1] = parts
                    self.reserved -= last - first
        self.merge()

    def merge(self) -> None:
        for segment in self.segments:
            kept: list[_Block] = []
            for block in segment.blocks:
                if kept and block.state != "used" and kept[-1].state == block.state:
                    kept[-1].size += block.size
                else:
                    kept.append(block)
            segment.blocks = kept
