"""A replay of the caching allocator with segments at recorded addresses."""

from collections.abc import Sequence
from dataclasses import dataclass

from trials.simulation.allocator import LARGE_BASE, AllocatorPeaks, AllocatorState, replay_on


@dataclass(slots=True)
class _RecordedState(AllocatorState):
    addresses: Sequence[int] = ()
    taken_segments: int = 0

    def segment_address(self, size: int, *, is_large: bool) -> int:
        del size
        address = self.addresses[self.taken_segments]
        self.taken_segments += 1
        # Twice as far apart, so that segments in a row are no neighbours, in the same order.
        return 2 * address + (LARGE_BASE if is_large else 0)


def replay_at(
    storages: Sequence[int],
    sizes: Sequence[int],
    addresses: Sequence[int],
    *,
    capacity_bytes: int | None,
) -> AllocatorPeaks:
    """Replay a stream with its segments at these addresses, in the order CUDA made them."""
    return replay_on(_RecordedState(capacity_bytes, addresses=addresses), storages, sizes)
