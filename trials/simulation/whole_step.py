"""Steps of the whole model at any batch size, from traces at one to three batch sizes."""

import math

import numpy as np

from trials.simulation.layer_expansion import whole_model, whole_step
from trials.simulation.recording import (
    COPY_STREAM,
    Column,
    FloatArray,
    Held,
    IntArray,
    Kind,
    Operators,
    Purpose,
    StructureError,
    TileColumn,
    tile_bytes,
)
from trials.simulation.trace_cache import StepTrace

UNIT = 512  # the allocator's smallest block; sizes are multiples of it


class Steps:
    """Two steps of a whole model: the first, and one like all later ones.

    Sizes and work are polynomials of the batch size: of the first degree, or of the second where a
    mask has a row and a column for each token of the batch. So two or three traced batch sizes
    determine all others.

    Args:
        trace: traces at one to three batch sizes.
        micro_batches: forward and backward passes per step.

    Attributes:
        held: storages of the model itself.
        on_copy_stream: (events,) whether the stream of copies allocates the storage of an event.
    """

    def __init__(self, trace: StepTrace, micro_batches: int = 1) -> None:
        self.held: Held = whole_model(trace.held, trace.copies)
        self._sizes = trace.batch_sizes
        # A third micro-batch is like the second.
        self._micro_batches = min(micro_batches, 2)
        streams = [
            whole_step(recording, trace.copies, self._micro_batches)
            for recording in trace.recordings
        ]
        stream = streams[0]
        moves = stream.kinds <= Kind.FREED
        made = stream.kinds == Kind.MADE
        self._names: IntArray = stream.names[moves]
        self._signs = np.where(made[moves], 1, -1)
        self._segments: IntArray = stream.segments[moves]
        self._purposes: IntArray = stream.purposes
        self._bytes = [
            _bytes_of_moves(s.names, s.numbers[:, Column.BYTES], made, moves) for s in streams
        ]
        streams_used = np.zeros(len(self._purposes), np.bool_)
        streams_used[stream.names[made]] = stream.numbers[made, COPY_STREAM] > 0
        self.on_copy_stream = streams_used[self._names]
        tiled = made & (stream.numbers[:, TileColumn.ROW_BYTES] > 0)
        self._tiles = [s.numbers[tiled] for s in streams]
        self._tile_moves = [np.flatnonzero(self._names == name) for name in stream.names[tiled]]
        works = np.flatnonzero(~moves)
        works = works[works >= stream.steady_from]
        self._works = Operators(
            kinds=stream.kinds[works],
            names=stream.names[works],
            numbers=stream.numbers[works],
            segments=stream.segments[works],
        )
        self._numbers = [s.numbers[works] for s in streams]
        self._last = slice(*np.searchsorted(works, (stream.last_from, stream.update_from)))

    def storages(self, batch_size: int) -> tuple[IntArray, IntArray]:
        """Names of the storages allocated and freed, and their bytes, negative where freed."""
        size = np.maximum(np.rint(self._at(batch_size, self._bytes)), 0).astype(np.int64)
        tiles = tile_bytes(np.rint(self._at(batch_size, self._tiles))).astype(np.int64)
        for moves, tile in zip(self._tile_moves, tiles, strict=True):
            size[moves] += tile
        return self._names, size * self._signs

    def operators(self, batch_size: int, micro_batches: int | None = None) -> Operators:
        """Operators of a step once the optimizer has its state.

        Args:
            batch_size: examples per micro-batch.
            micro_batches: at least as many as the steps have; None for just as many.
        """
        numbers = np.maximum(self._at(batch_size, self._numbers), 0.0)
        works, last = self._works, self._last
        at = np.arange(len(numbers))
        more = [at[last]] * ((micro_batches or self._micro_batches) - self._micro_batches)
        at = np.concatenate([at[: last.stop], *more, at[last.stop :]])
        return Operators(works.kinds[at], works.names[at], numbers[at], works.segments[at])

    def peak_bytes(self, batch_size: int) -> int:
        """Most bytes in use at once, with storages rounded up like the allocator's blocks."""
        _, sizes = self.storages(batch_size)
        held = _in_blocks(self.held.sizes)
        return int(held.sum() + np.cumsum(_in_blocks(sizes)).max(initial=0))

    def at_peak(self, batch_size: int) -> dict[Purpose, int]:
        """Bytes of ``peak_bytes`` by purpose."""
        names, sizes = self.storages(batch_size)
        sizes = _in_blocks(sizes)
        until = int(np.cumsum(sizes).argmax()) + 1
        moved = np.bincount(
            self._purposes[names[:until]], weights=sizes[:until], minlength=len(Purpose)
        )
        held = np.bincount(
            self.held.purposes, weights=_in_blocks(self.held.sizes), minlength=len(Purpose)
        )
        return {p: round(moved[p] + held[p]) for p in Purpose if round(moved[p] + held[p])}

    def _at(self, batch_size: int, numbers: list[FloatArray]) -> FloatArray:
        if batch_size == self._sizes[0]:
            return numbers[0]
        if len(numbers) == 1:
            raise StructureError(f"batch size {batch_size} was not traced")
        total = np.zeros_like(numbers[0])
        for size, traced in zip(self._sizes, numbers, strict=True):  # Lagrange's formula
            others = [other for other in self._sizes if other != size]
            total += traced * math.prod((batch_size - other) / (size - other) for other in others)
        return total


def _in_blocks(sizes: IntArray) -> IntArray:
    """Sizes rounded up to the allocator's blocks; negative ones by their magnitude."""
    rounded: IntArray = np.sign(sizes) * (-(-np.abs(sizes) // UNIT) * UNIT)
    return rounded


def _bytes_of_moves(
    names: IntArray, numbers: FloatArray, made: np.ndarray, moves: np.ndarray
) -> FloatArray:
    """Bytes of each event's storage, (events,), for allocations and frees alike."""
    by_name = np.zeros(int(names[moves].max(initial=-1)) + 1)
    by_name[names[made]] = numbers[made]
    sizes: FloatArray = by_name[names[moves]]
    return sizes
