"""Peaks of storages that two CUDA streams allocate: the computation's, and that of copies."""

from dataclasses import dataclass, replace

import numpy as np

from trials.simulation.memory.blocks import AllocatorPeaks, in_blocks
from trials.simulation.recording import IntArray


@dataclass(frozen=True, slots=True)
class Moves:
    """Allocations and frees of storages.

    Attributes:
        names: (events,) storage of each event.
        sizes: (events,) its bytes, negative where it is freed.
        on_copy_stream: (events,) whether the stream of copies allocates it.
    """

    names: IntArray
    sizes: IntArray
    on_copy_stream: np.ndarray

    @property
    def peak_bytes(self) -> int:
        """Most bytes in use at once, with storages rounded up like the allocator's blocks."""
        return int(np.cumsum(in_blocks(self.sizes)).max(initial=0))


def load_replay() -> None:
    """Load numba and the compiled replay ahead of the first one."""
    from trials.simulation.memory.allocator import replay  # noqa: PLC0415 - takes a second

    replay([], [], capacity_bytes=None)


def peaks_on_streams(
    moves: Moves, held: IntArray, limit_bytes: int | None, *, expandable_segments: bool
) -> AllocatorPeaks:
    """Peaks of storages, whose blocks the allocator caches for each stream apart.

    Neither stream returns its cached blocks before a retry.

    Args:
        moves: allocations and frees.
        held: bytes of storages that are allocated before, and stay.
        limit_bytes: most bytes of all segments; None for no limit.
        expandable_segments: setting of the allocator.
    """
    from trials.simulation.memory.allocator import replay  # noqa: PLC0415 - as above

    names, sizes, apart = moves.names, moves.sizes, moves.on_copy_stream
    copies = replay(
        names[apart], sizes[apart], capacity_bytes=None, expandable_segments=expandable_segments
    ).peak_reserved_bytes
    first = int(names.max(initial=-1)) + 1
    peaks = replay(
        np.r_[first : first + len(held), names[~apart]],
        np.r_[held, sizes[~apart]],
        capacity_bytes=None if limit_bytes is None else max(limit_bytes - copies, 0),
        expandable_segments=expandable_segments,
    )
    if not copies:
        return peaks
    return replace(
        peaks,
        peak_allocated_bytes=moves.peak_bytes + int(in_blocks(held).sum()),
        peak_reserved_bytes=peaks.peak_reserved_bytes + copies,
    )
