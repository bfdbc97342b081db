"""Peaks of storages that several CUDA streams allocate, each from blocks of its own."""

from dataclasses import dataclass, replace

import numpy as np

from trials.simulation.memory.blocks import AllocatorPeaks, in_blocks, most_in_use
from trials.simulation.recording import COMPUTE_STREAM, IntArray


@dataclass(frozen=True, slots=True)
class Moves:
    """Allocations and frees of storages.

    Attributes:
        names: (events,) storage of each event.
        sizes: (events,) its bytes, negative where it is freed.
        streams: (events,) number of the stream that allocates it; 0 is the computation's.
    """

    names: IntArray
    sizes: IntArray
    streams: IntArray

    @property
    def peak_bytes(self) -> int:
        """Most bytes in use at once, with storages rounded up like the allocator's blocks."""
        return most_in_use(self.sizes)


def load_replay() -> None:
    """Load numba and the compiled replay ahead of the first one."""
    from trials.simulation.memory.allocator import replay  # noqa: PLC0415 - takes a second

    replay([], [], capacity_bytes=None)


def peaks_on_streams(
    moves: Moves, held: IntArray, limit_bytes: int | None, *, expandable_segments: bool
) -> AllocatorPeaks:
    """Peaks of storages, whose blocks the allocator caches for each stream apart.

    No stream returns its cached blocks before a retry.

    Args:
        moves: allocations and frees.
        held: bytes of storages that are allocated before, and stay.
        limit_bytes: most bytes of all segments; None for no limit.
        expandable_segments: setting of the allocator.

    Raises:
        TraceError: the storages are too large to replay.
    """
    from trials.simulation.memory.allocator import replay  # noqa: PLC0415 - as above

    names, sizes, streams = moves.names, moves.sizes, moves.streams
    others = sum(
        replay(
            names[streams == stream],
            sizes[streams == stream],
            capacity_bytes=None,
            expandable_segments=expandable_segments,
        ).peak_reserved_bytes
        for stream in np.unique(streams[streams != COMPUTE_STREAM])
    )
    first = int(names.max(initial=-1)) + 1
    own = streams == COMPUTE_STREAM
    peaks = replay(
        np.r_[first : first + len(held), names[own]],
        np.r_[held, sizes[own]],
        capacity_bytes=None if limit_bytes is None else max(limit_bytes - others, 0),
        expandable_segments=expandable_segments,
    )
    if not others:
        return peaks
    return replace(
        peaks,
        peak_allocated_bytes=moves.peak_bytes + int(in_blocks(held).sum()),
        peak_reserved_bytes=peaks.peak_reserved_bytes + others,
    )
