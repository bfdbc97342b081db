"""Sizes of the allocator's blocks, and the memory statistics of a replay. No numba."""

from dataclasses import dataclass

import numpy as np

from trials.simulation.recording import IntArray

# kMinBlockSize of c10/cuda/CUDACachingAllocator.cpp: block sizes are multiples of it.
MIN_BLOCK = 512
MOST_BYTES = 2**56
"""Most bytes in use that are replayed, a hundred thousand times what any GPU has. Addresses of a
replay are int64: far more would overflow them, and a search among the blocks then never ends."""


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


def in_blocks(sizes: IntArray) -> IntArray:
    """Sizes rounded up to the allocator's blocks; negative ones by their magnitude."""
    # With two's complement, clearing the low bits rounds down: a negative size grows in magnitude.
    rounded: IntArray = (sizes + (MIN_BLOCK - 1) * (sizes > 0)) & -MIN_BLOCK
    return rounded


def most_in_use(sizes: IntArray) -> int:
    """Most bytes in blocks at once, by the sizes of allocations, negative ones of frees.

    The sum is one of floats, which does not overflow, and is exact up to 2**62 bytes: all sizes are
    multiples of 512.
    """
    return int(np.cumsum(in_blocks(sizes), dtype=np.float64).max(initial=0.0))
