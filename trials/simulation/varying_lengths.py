"""Memory on real data: whether runs of steps on examples of varying length survive."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np

from gpu_catalog.gpu import Gpu
from trials.simulation.memory.allocator import AllocatorPeaks
from trials.simulation.memory.streams import peaks_on_streams
from trials.simulation.run_of_steps import RunOfSteps
from trials.simulation.simulated_cell import SimulatedCell, library_bytes, like
from trials.simulation.trace_request import TraceRequest

RUNS = 20
"""Runs of a batch size; it survives an epoch if at least 95 % of them do."""
MICRO_BATCHES = 48
"""Micro-batches of a run. In most cells the reserved memory grows little after half of them."""
MOST_FAILED = RUNS // 20

Drawn = Callable[[int, int], Sequence[int]]
"""Tokens per example of each micro-batch of a run, for a batch size and a seed."""


@dataclass(frozen=True, slots=True)
class RunsMemory:
    """Memory of runs in unlimited memory.

    Attributes:
        reserved_bytes: (runs,) most bytes that the allocator holds in each run, ascending.
    """

    reserved_bytes: tuple[int, ...]

    def quantile(self, part: float) -> float:
        """Quantile of the reserved bytes, for a part from 0 to 1."""
        return float(np.quantile(self.reserved_bytes, part))


class VaryingLengths:
    """Runs of a cell on examples of varying length.

    Args:
        cell: cell of the longest examples.
        lengths: tokens of shorter examples; their traces and the cell's determine all lengths.
        drawn: draws the lengths of a run.
    """

    def __init__(self, cell: SimulatedCell, lengths: Sequence[int], drawn: Drawn) -> None:
        self._recipe = cell.recipe
        self._cells = [cell, *(like(cell, tokens=tokens) for tokens in lengths)]
        self._drawn = drawn
        self._expandable_segments = cell.expandable_segments
        self._runs: dict[tuple[bool, int], RunOfSteps] = {}
        self._unlimited = cache(self._without_limit)
        self._survivals: dict[tuple[int, int, int], bool] = {}

    @property
    def cell(self) -> SimulatedCell:
        """Cell of the longest examples."""
        return self._cells[0]

    def requests(self, *, alone: bool = False) -> list[TraceRequest]:
        """Traces that the runs need; with ``alone``, also those of a batch of one example."""
        return [request for cell in self._cells for request in cell.requests(alone=alone)]

    def largest(self, gpu: Gpu, limit_bytes: int, sizes: Sequence[int]) -> int:
        """Largest of ascending batch sizes that survives; 0 where none does.

        Raises:
            TraceError, StructureError: as in ``memory``.
        """
        if sizes and self.survives(sizes[-1], gpu, limit_bytes):
            return sizes[-1]
        count = bisect_left(sizes, 1, key=lambda n: not self.survives(n, gpu, limit_bytes))
        return sizes[count - 1] if count else 0

    def memory(self, batch_size: int, gpu: Gpu) -> RunsMemory:
        """Memory of runs of a batch size in unlimited memory.

        Raises:
            TraceError: the cell cannot be traced.
            StructureError: steps of other lengths have another structure.
        """
        return self._unlimited(batch_size, library_bytes(gpu))

    def survives(self, batch_size: int, gpu: Gpu, limit_bytes: int) -> bool:
        """Whether at least 95 % of the runs end without running out of memory.

        The allocator may release its cache and try again, as PyTorch's does.

        Raises:
            TraceError, StructureError: as in ``memory``.
        """
        library = library_bytes(gpu)
        if self.memory(batch_size, gpu).quantile(1 - MOST_FAILED / RUNS) <= limit_bytes:
            return True
        key = (batch_size, library, limit_bytes)
        if key not in self._survivals:
            failed = 0
            for peaks in self._replays(batch_size, library, limit_bytes):
                failed += peaks.failed_at is not None
            self._survivals[key] = failed <= MOST_FAILED
        return self._survivals[key]

    def _without_limit(self, batch_size: int, library: int) -> RunsMemory:
        peaks = self._replays(batch_size, library, None)
        return RunsMemory(tuple(sorted(p.peak_reserved_bytes for p in peaks)))

    def _replays(
        self, batch_size: int, library: int, limit_bytes: int | None
    ) -> list[AllocatorPeaks]:
        run = self._run(batch_size)
        held = np.r_[library // 2, library // 2, run.held.sizes]

        def replayed(seed: int) -> AllocatorPeaks:
            moves = run.moves(batch_size, self._drawn(batch_size, seed))
            return peaks_on_streams(
                moves, held, limit_bytes, expandable_segments=self._expandable_segments
            )

        with ThreadPoolExecutor() as threads:  # the replay releases the interpreter's lock
            return list(threads.map(replayed, range(RUNS)))

    def _run(self, batch_size: int) -> RunOfSteps:
        micro_batches = min(self._recipe.micro_batches(batch_size), 2)
        key = (batch_size == 1, micro_batches)
        if key not in self._runs:
            traces = {
                cell.request.cell.seq_len: cell.traces.get(cell.request_of(batch_size))
                for cell in self._cells
            }
            self._runs[key] = RunOfSteps(traces, micro_batches)
        return self._runs[key]
