"""Memory on real data: whether runs of steps on examples of varying length survive."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from threading import Semaphore

import numpy as np

from gpu_catalog.gpu import Gpu
from trials.drawn_lengths import DrawnBatch, next_size
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell
from trials.simulation.memory.blocks import AllocatorPeaks
from trials.simulation.memory.stored_peaks import StoredPeaks
from trials.simulation.memory.streams import peaks_on_streams
from trials.simulation.run_of_steps import RunOfSteps
from trials.simulation.simulated_cell import SimulatedCell, library_bytes, like
from trials.simulation.trace_cache import StepTrace
from trials.simulation.trace_request import TraceRequest
from trials.thread_pool import thread_pool

AT_ONCE = Semaphore(len(os.sched_getaffinity(0)))
"""Replays of all threads: the events of one take tens of MB."""
RUNS = 20
"""Runs of a batch size; it survives an epoch if at least 95 % of them do."""
MOST_FAILED = RUNS // 20
Drawn = Callable[[int, int], Sequence[DrawnBatch]]
"""Micro-batches of a run, for a batch size and a seed."""
SHORTEST = 16  # tokens; a trace of fewer may take other kernels


def shorter_traces(cell: Cell) -> tuple[int, ...]:
    """Tokens of the examples whose traces determine all lengths, beside a cell's; none if too few.

    Sizes are affine in the length, but for masks of padded batches and attention scores, which
    FlashAttention-2 does not hold: they need a third length. Steps by DeepSpeed's engine are not
    put together from those of several lengths.
    """
    if cell.parallel is not None and cell.parallel.zero_stage is not None:
        return ()
    holds_squares = cell.recipe.attention != "flash_attention_2"
    lengths = (cell.seq_len // 2, cell.seq_len // 4)[: 1 + holds_squares]
    return () if lengths[-1] < SHORTEST else lengths


def masks_padding(recipe: Recipe) -> bool:
    """Whether steps on padded batches are simulated with a mask.

    With FlashAttention-2 transformers drops the padding instead, which is not simulated.
    """
    return recipe.attention != "flash_attention_2" and not recipe.packing


@dataclass(frozen=True, slots=True)
class RunsMemory:
    """Memory of runs in unlimited memory.

    Attributes:
        runs: peaks of each run, ascending by the most bytes that the allocator holds.
    """

    runs: tuple[AllocatorPeaks, ...]

    def quantile(self, part: float) -> float:
        """Quantile of the reserved bytes, for a part from 0 to 1."""
        return float(np.quantile([run.peak_reserved_bytes for run in self.runs], part))


class VaryingLengths:
    """Runs of a cell on examples of varying length.

    Args:
        cell: cell of the longest examples.
        drawn: draws the lengths of a run.
    """

    def __init__(self, cell: SimulatedCell, drawn: Drawn) -> None:
        self._recipe = cell.recipe
        lengths = shorter_traces(cell.request.cell)
        self._cells = [cell, *(like(cell, tokens=tokens) for tokens in lengths)]
        tokens = (cell.request.cell.seq_len, *lengths) if masks_padding(cell.recipe) else ()
        self._padded = [like(cell, tokens=length, padded=True) for length in tokens]
        self._drawn = drawn
        self._stored = StoredPeaks(cell.traces.folder)
        self._expandable_segments = cell.expandable_segments
        self._runs: dict[tuple[bool, int], RunOfSteps] = {}
        self.is_padded = cache(self._is_padded)
        self._twin = cache(partial(like, padded=True))
        self._unlimited = cache(self._without_limit)
        self._limited = cache(self._within)

    @property
    def cell(self) -> SimulatedCell:
        """Cell of the longest examples."""
        return self._cells[0]

    def _is_padded(self, batch_size: int) -> bool:
        """Whether most batches are padded and have a mask."""
        batches = self._drawn(batch_size, 0) if self._padded else ()
        return 2 * sum(batch.is_padded for batch in batches) > len(batches)

    def timed(self, cell: SimulatedCell, batch_size: int) -> SimulatedCell:
        """Cell of any length whose steps take the time of most batches of this size."""
        return self._twin(cell) if self.is_padded(batch_size) else cell

    def requests(self, *, alone: bool = False) -> list[TraceRequest]:
        """Traces that the runs need; with ``alone``, also those of a batch of one example."""
        cells = (*self._cells, *self._padded)
        return [request for cell in cells for request in cell.requests(alone=alone)]

    def largest(self, gpu: Gpu, limit_bytes: int, sizes: Sequence[int]) -> int:
        """Largest of ascending batch sizes that survives; 0 where none does.

        Raises:
            TraceError, StructureError: as in ``memory``.
        """
        survived: dict[int, bool] = {}
        while (size := next_size(sizes, survived)) is not None:
            survived[size] = self.survives(size, gpu, limit_bytes)
        return max((size for size, survives in survived.items() if survives), default=0)

    def memory(self, batch_size: int, gpu: Gpu) -> RunsMemory:
        """Memory of runs of a batch size in unlimited memory.

        Raises:
            TraceError: the cell cannot be traced.
            StructureError: steps of other lengths have another structure.
        """
        peaks = self._unlimited(batch_size, library_bytes(gpu))
        return RunsMemory(tuple(sorted(peaks, key=lambda run: run.peak_reserved_bytes)))

    def survives(self, batch_size: int, gpu: Gpu, limit_bytes: int) -> bool:
        """Whether at least 95 % of the runs end without running out of memory.

        Raises:
            TraceError, StructureError: as in ``memory``.
        """
        return self.most(batch_size, gpu, limit_bytes).failed_at is None

    def most(self, batch_size: int, gpu: Gpu, limit_bytes: int) -> AllocatorPeaks:
        """Peaks of the run that 95 % of the runs do not exceed; it fails if more of them do.

        The allocator may release its cache and try again, as PyTorch's does.

        Raises:
            TraceError, StructureError: as in ``memory``.
        """
        unlimited = self.memory(batch_size, gpu).runs[-1 - MOST_FAILED]
        if unlimited.peak_reserved_bytes <= limit_bytes:
            return unlimited
        return self._limited(batch_size, library_bytes(gpu), limit_bytes)[-1 - MOST_FAILED]

    def _without_limit(self, batch_size: int, library: int) -> Sequence[AllocatorPeaks]:
        """Peaks of the runs in unlimited memory, by seed."""
        return self._replays(batch_size, library, None, range(RUNS))

    def _within(self, batch_size: int, library: int, limit_bytes: int) -> list[AllocatorPeaks]:
        """Peaks of the runs within a limit; those that fail come last."""
        unlimited = self._unlimited(batch_size, library)
        over = [n for n, run in enumerate(unlimited) if run.peak_reserved_bytes > limit_bytes]
        peaks = [run for run in unlimited if run.peak_reserved_bytes <= limit_bytes]
        peaks += self._replays(batch_size, library, limit_bytes, over)
        return sorted(peaks, key=lambda run: (run.failed_at is not None, run.peak_reserved_bytes))

    def _replays(
        self, batch_size: int, library: int, limit_bytes: int | None, seeds: Iterable[int]
    ) -> Sequence[AllocatorPeaks]:
        expandable = self._expandable_segments
        micro_batches = min(self._recipe.micro_batches(batch_size), 2)
        plain, padded = self._traces(batch_size)
        drawn = [tuple(self._drawn(batch_size, seed)) for seed in seeds]

        def replayed() -> tuple[AllocatorPeaks, ...]:
            run = self._run(batch_size, micro_batches)
            held = np.r_[library // 2, library // 2, run.held.sizes]

            def peaks(batches: Sequence[DrawnBatch]) -> AllocatorPeaks:
                with AT_ONCE:
                    moves = run.moves(batch_size, batches)
                    return peaks_on_streams(
                        moves, held, limit_bytes, expandable_segments=expandable
                    )

            with thread_pool() as threads:  # the replay releases the interpreter's lock
                return tuple(threads.map(peaks, drawn))

        digests = [
            [(tokens, trace.digest) for tokens, trace in traces.items()]
            for traces in (plain, padded)
        ]
        content = ("runs", digests, micro_batches, batch_size, library, limit_bytes, expandable)
        return self._stored.get((*content, drawn), replayed)

    def _run(self, batch_size: int, micro_batches: int) -> RunOfSteps:
        key = (batch_size == 1, micro_batches)
        if key not in self._runs:
            plain, padded = self._traces(batch_size)
            self._runs[key] = RunOfSteps(plain, micro_batches, padded)
        return self._runs[key]

    def _traces(self, batch_size: int) -> tuple[dict[int, StepTrace], dict[int, StepTrace]]:
        """Traces of a batch size by tokens per example: without padding, and with a mask."""
        plain, padded = (
            {c.request.cell.seq_len: c.traces.get(c.request_of(batch_size)) for c in at_lengths}
            for at_lengths in (self._cells, self._padded)
        )
        return plain, padded
