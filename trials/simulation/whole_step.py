"""Steps of the whole model at any batch size, from traces at one to three batch sizes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from trials.recipes.parallel import Parallel
from trials.simulation.clock.operators import Operators
from trials.simulation.layer_expansion import NAMING, whole_model, whole_steps
from trials.simulation.memory.blocks import MOST_BYTES, in_blocks, most_in_use
from trials.simulation.memory.streams import Moves
from trials.simulation.ranks.buckets import held_with_buckets, synchronises, with_buckets
from trials.simulation.ranks.engine_steps import engine_steps, is_by_engine
from trials.simulation.recording import (
    STREAM,
    Column,
    FloatArray,
    Held,
    IntArray,
    Kind,
    Purpose,
    Recording,
    Stream,
    StructureError,
    TileColumn,
    tile_bytes,
)
from trials.simulation.trace_cache import StepTrace


class Steps:
    """Two steps of a whole model: the first, and one like all later ones.

    Sizes and work are polynomials of the batch size: of the first degree, or of the second where a
    mask has a row and a column for each token of the batch. So two or three traced batch sizes
    determine all others.

    Args:
        trace: traces at one to three batch sizes.
        micro_batches: forward and backward passes per step.
        parallel: layout of several GPUs; absent for one.

    Attributes:
        held: storages of the model itself, and buckets of its gradients.
        names: (events,) names of the storages allocated and freed.
        streams: (events,) number of the stream that allocates the storage of an event.
        parts: events of the micro-batches and the update of the first step, then of the second.
    """

    def __init__(
        self, trace: StepTrace, micro_batches: int = 1, parallel: Parallel | None = None
    ) -> None:
        self.held: Held = whole_model(trace.held, trace.copies)
        self._sizes = trace.batch_sizes
        self._peaks: dict[int, int] = {}
        # A third micro-batch is like the second.
        self._micro_batches = min(micro_batches, 2)
        self._trace, self._parallel = trace, parallel
        self._is_by_engine = is_by_engine(trace.recordings[0])
        if self._is_by_engine:
            streams = engine_steps(trace.recordings, self._micro_batches)
        else:
            alone = [_without_work(recording) for recording in trace.recordings]
            streams = whole_steps(alone, trace.copies, self._micro_batches)
        if self._is_ddp:
            self.held = held_with_buckets(self.held, streams[0])
        stream = streams[0]
        moves = stream.kinds <= Kind.FREED
        made = stream.kinds == Kind.MADE
        self.names: IntArray = stream.names[moves]
        self._signs = np.where(made[moves], 1, -1)
        ends = [*np.searchsorted(np.flatnonzero(moves), stream.parts_from), moves.sum()]
        self.parts = [slice(*part) for part in pairwise(ends)]
        self._purposes: IntArray = stream.purposes
        self._bytes = [
            _bytes_of_moves(s.names, s.numbers[s.rows, Column.BYTES], made, moves) for s in streams
        ]
        streams_used = np.zeros(len(self._purposes), np.int64)
        streams_used[stream.names[made]] = stream.numbers[stream.rows[made], STREAM]
        self.streams: IntArray = streams_used[self.names]
        tiled = made & (stream.numbers[:, TileColumn.ROW_BYTES] > 0)[stream.rows]
        self._tiles = [s.numbers[s.rows[tiled]] for s in streams]
        self._tile_moves = [np.flatnonzero(self.names == name) for name in stream.names[tiled]]

    @property
    def _is_ddp(self) -> bool:
        return self._parallel is not None and self._parallel.strategy == "ddp"

    @cached_property
    def _works(self) -> "_Works":
        """Operators of the second step; most GPUs that are too small ask for memory alone."""
        if self._is_by_engine:
            streams = engine_steps(self._trace.recordings, self._micro_batches)
        else:
            trace = self._trace
            streams = whole_steps(trace.recordings, trace.copies, self._micro_batches, first=1)
        if self._is_ddp:
            assert self._parallel is not None
            streams = [with_buckets(stream, self._parallel.gpus) for stream in streams]
        stream = streams[0]
        works = np.flatnonzero(stream.kinds > Kind.FREED)
        works = works[works >= stream.steady_from]
        operators, rows = _distinct(stream, works)
        numbers = [s.numbers[rows] for s in streams]
        *_, second_last, last, update = (0, 0, *np.searchsorted(works, stream.parts_from))
        if self._is_by_engine and self._micro_batches > 1:
            first, repeated = np.arange(second_last), np.arange(second_last, last)
        else:
            # A further micro-batch, which ddp does not synchronise.
            first, repeated = np.arange(last), np.arange(last, update)
            if self._is_ddp:
                synchronising = synchronises(operators.kinds, operators.names)
                repeated = repeated[~synchronising[operators.events[repeated]]]
        return _Works(operators, numbers, first, repeated, last)

    def storages(self, batch_size: int) -> tuple[IntArray, IntArray]:
        """Names of the storages allocated and freed, and their bytes, negative where freed."""
        return self.names, self.sizes(*self.numbers(batch_size))

    def moves(self, batch_size: int) -> Moves:
        """Allocations and frees of storages."""
        return Moves(*self.storages(batch_size), self.streams)

    def numbers(self, batch_size: int) -> tuple[FloatArray, FloatArray]:
        """Bytes of each event's storage, (events,), and (tiles, columns) by ``TileColumn``."""
        return self._at(batch_size, self._bytes), self._at(batch_size, self._tiles)

    def sizes(self, without_tiles: FloatArray, tiles: FloatArray) -> IntArray:
        """Bytes of each event's storage, (events,), negative where freed, by their numbers.

        Sizes beyond any that is replayed are cut to that one, so that they remain integers.
        """
        sizes = np.clip(np.rint(without_tiles), 0, MOST_BYTES).astype(np.int64)
        more = np.minimum(tile_bytes(np.rint(tiles)), MOST_BYTES).astype(np.int64)
        for moves, tile in zip(self._tile_moves, more, strict=True):
            sizes[moves] += tile
        return sizes * self._signs

    def operators(self, batch_size: int, micro_batches: int | None = None) -> Operators:
        """Operators of a step once the optimizer has its state.

        Args:
            batch_size: examples per micro-batch.
            micro_batches: at least as many as the steps have; None for just as many.
        """
        works = self._works
        numbers = np.maximum(self._at(batch_size, works.numbers), 0.0)
        events = works.operators.events
        rest = np.arange(works.last, len(events))
        more = [works.repeated] * ((micro_batches or self._micro_batches) - self._micro_batches)
        # Before the last one, with which ddp's collectives begin.
        at = np.concatenate([works.first, *more, rest])
        return replace(works.operators, numbers=numbers, order=events[at])

    def peak_bytes(self, batch_size: int) -> int:
        """Most bytes in use at once, with storages rounded up like the allocator's blocks."""
        if batch_size not in self._peaks:  # GPUs of one size ask for the same
            held = most_in_use(self.held.sizes)
            self._peaks[batch_size] = held + self.moves(batch_size).peak_bytes
        return self._peaks[batch_size]

    def at_peak(self, batch_size: int) -> dict[Purpose, int]:
        """Bytes of ``peak_bytes`` by purpose."""
        names, sizes = self.storages(batch_size)
        sizes = in_blocks(sizes)
        until = int(np.cumsum(sizes, dtype=np.float64).argmax()) + 1
        moved = np.bincount(
            self._purposes[names[:until]], weights=sizes[:until], minlength=len(Purpose)
        )
        held = np.bincount(
            self.held.purposes, weights=in_blocks(self.held.sizes), minlength=len(Purpose)
        )
        return {p: round(moved[p] + held[p]) for p in Purpose if round(moved[p] + held[p])}

    def _at(self, batch_size: int, numbers: list[FloatArray]) -> FloatArray:
        if batch_size == self._sizes[0]:
            return numbers[0]
        if len(numbers) == 1:
            raise StructureError(f"batch size {batch_size} was not traced")
        return interpolated(self._sizes, numbers, batch_size)


@dataclass(frozen=True, slots=True)
class _Works:
    """Operators of a step.

    Attributes:
        operators: those of all its micro-batches and the update.
        numbers: their numbers at each traced batch size.
        first, repeated: events before the last micro-batch, and those of each further one.
        last: first event of the last micro-batch.
    """

    operators: Operators
    numbers: list[FloatArray]
    first: IntArray
    repeated: IntArray
    last: int


def _without_work(recording: Recording) -> Recording:
    """Recording without operators, but for the first event of each segment, which orders them."""
    kept = np.isin(recording.kinds, [*NAMING, Kind.ADDED_ON_HOST])
    kept[np.unique(recording.segments, return_index=True)[1]] = True
    columns = ("kinds", "names", "segments", "numbers")
    return replace(recording, **{name: getattr(recording, name)[kept] for name in columns})


def interpolated(points: Sequence[int], numbers: Sequence[FloatArray], at: int) -> FloatArray:
    """Value at a point of the polynomials through numbers at other points (Lagrange's formula)."""
    total = np.zeros_like(numbers[0])
    for point, value in zip(points, numbers, strict=True):
        others = [other for other in points if other != point]
        total += value * math.prod((at - other) / (point - other) for other in others)
    return total


def _distinct(stream: Stream, events: IntArray) -> tuple[Operators, IntArray]:
    """Operators of these events, with those of all repeated layers once, and the row of each."""
    kinds, names, rows = (column[events] for column in (stream.kinds, stream.names, stream.rows))
    shape = int(kinds.max(initial=0)) + 1, int(names.max(initial=0)) + 1
    keys = (rows * shape[0] + kinds) * shape[1] + names
    _, first, order = np.unique(keys, return_index=True, return_inverse=True)
    own = rows[first]
    return Operators(kinds[first], names[first], stream.numbers[own], order), own


def _bytes_of_moves(
    names: IntArray, numbers: FloatArray, made: np.ndarray, moves: np.ndarray
) -> FloatArray:
    """Bytes of each event's storage, (events,), for allocations and frees alike."""
    by_name = np.zeros(int(names[moves].max(initial=-1)) + 1)
    by_name[names[made]] = numbers[made]
    sizes: FloatArray = by_name[names[moves]]
    return sizes
