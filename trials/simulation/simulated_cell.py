"""A cell on a simulated GPU: largest batch, memory and step time. No torch."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gpu_catalog.gpu import Gpu
from trials.records.built import ParameterCounts
from trials.records.cell import Cell
from trials.records.model import Model
from trials.records.observation import Outcome
from trials.simulation.clock.attention import by_flash2
from trials.simulation.clock.operators import Operators
from trials.simulation.length_traces import TraceSource
from trials.simulation.memory.blocks import AllocatorPeaks
from trials.simulation.memory.memory_replays import Replays
from trials.simulation.memory.stored_peaks import StoredPeaks
from trials.simulation.memory.streams import peaks_on_streams
from trials.simulation.recording import Held, Purpose
from trials.simulation.timing_model import EfficiencyConstants, SimulatedStepTime, step_time
from trials.simulation.trace_request import HOPPER, SMALLEST, Routing, TraceRequest
from trials.simulation.whole_step import Steps

GIB = 2**30
# CUDA's context and the libraries' code on the GPU: 0.5 to 2.1 GiB, constant for a software image
# and known by measurement alone. This is the figure of an image with PyTorch's own wheels.
CONTEXT_BYTES = 512 * 2**20
# cuBLAS allocates one workspace for the thread of the forward pass and one for that of the backward
# pass (PyTorch's CUDABlas.cpp: :4096:2:16:8, and 32 MiB from Hopper on).
CUBLAS_BYTES = 2 * (2 * 4096 + 8 * 16) * 1024
CUBLAS_HOPPER_BYTES = 2 * 32 * 2**20


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Device memory of the steps at one batch size.

    Attributes:
        allocated_bytes: most bytes of live storages at once, as PyTorch's allocator counts them.
        reserved_bytes: most bytes the allocator holds; absent without a replay.
        retries: times the allocator released its cache to continue.
    """

    allocated_bytes: int
    reserved_bytes: int | None
    retries: int
    outcome: Outcome


class SimulatedCell:
    """Simulated steps of a cell at any batch size, on any GPU.

    Args:
        cell: cell to simulate.
        model: the model of its name.
        traces: source of traces.
        routing: the experts' shares of tokens; absent for equal shares.
        expandable_segments: setting of PyTorch's allocator.

    Attributes:
        request: trace of the cell, at two or three batch sizes.
    """

    def __init__(
        self,
        cell: Cell,
        model: Model,
        traces: TraceSource,
        routing: Routing | None = None,
        *,
        expandable_segments: bool = False,
    ) -> None:
        self.expandable_segments = expandable_segments
        self.recipe, self._layout = cell.rank_recipe, cell.parallel
        self.request = TraceRequest(cell=cell, model=model, routing=routing or Routing())
        self.traces = traces
        self._stored = StoredPeaks(traces.folder)
        self._steps: dict[tuple[int | None, int], Steps] = {}
        # By bytes that libraries hold, and whether gradients are accumulated.
        self._replays: dict[tuple[int, bool], Replays] = {}
        self._held_anywhere: dict[bool, dict[int, int]] = {True: {}, False: {}}
        self._step_times: dict[tuple[int, str, EfficiencyConstants], SimulatedStepTime] = {}

    def requests(self, *, alone: bool = False) -> list[TraceRequest]:
        """Traces that the cell needs; with ``alone``, also that of a batch of one example."""
        one = self.request.model_copy(update={"batch_size": 1})
        return [self.request, one] if alone else [self.request]

    def request_of(self, batch_size: int) -> TraceRequest:
        """Trace that steps of this batch size need."""
        request = self.request
        if batch_size < request.batch_sizes[0] and batch_size == 1:
            return request.model_copy(update={"batch_size": 1})
        return request

    @property
    def held(self) -> Held:
        """Storages of the model itself, which it holds throughout."""
        return self._steps_of(self.request.batch_sizes[0]).held

    def memory(self, batch_size: int, gpu: Gpu, limit_bytes: int) -> MemoryUse:
        """Memory of steps of a batch size.

        Args:
            batch_size: examples per step.
            gpu: GPU whose libraries hold memory.
            limit_bytes: usable memory of the GPU without the context.

        Raises:
            TraceError: the cell cannot be traced.
        """
        use = self.in_use(batch_size, gpu, limit_bytes)
        replays = self._replays_of(gpu, batch_size)
        # A replay of a larger batch may imply that this one fits; its own replay has more detail.
        is_implied = replays.fits(batch_size, limit_bytes) and not replays.has(batch_size)
        if use.outcome is Outcome.OUT_OF_MEMORY or is_implied:
            return use
        return _use_of(replays.within(batch_size, limit_bytes))

    def in_use(self, batch_size: int, gpu: Gpu, limit_bytes: int) -> MemoryUse:
        """Memory in use at the peak, without a replay: a lower bound of the memory held.

        Raises:
            TraceError: the cell cannot be traced.
        """
        peak = self.peak_bytes(batch_size, gpu)
        fits = peak <= limit_bytes
        return MemoryUse(
            allocated_bytes=peak,
            reserved_bytes=None,
            retries=0 if fits else 1,
            outcome=Outcome.FITS if fits else Outcome.OUT_OF_MEMORY,
        )

    def without_limit(self, batch_size: int, gpu: Gpu) -> AllocatorPeaks:
        """Peaks of steps of a batch size in unlimited memory."""
        return self._replays_of(gpu, batch_size).without_limit(batch_size)

    def largest_batch(self, gpu: Gpu, limit_bytes: int, batch_limit: int) -> int:
        """Largest batch size that fits without a retry; 0 when one example does not fit.

        Args:
            gpu: GPU whose libraries hold memory.
            limit_bytes: usable memory of the GPU without the context.
            batch_limit: largest batch size to try.

        Raises:
            TraceError: the cell cannot be traced.
        """
        whole = self.recipe.whole_batch(batch_limit)
        if whole is not None:
            if self._fits(whole, gpu, limit_bytes):
                return whole
            batch_limit = whole - 1
        largest = self._replays_of(gpu, SMALLEST).largest(limit_bytes, batch_limit)
        if largest >= SMALLEST:
            return largest
        # A batch of one example has a trace of its own, made only where it decides.
        return int(self.without_limit(1, gpu).peak_reserved_bytes <= limit_bytes)

    def roughly_largest(self, gpu: Gpu, limit_bytes: float, batch_limit: int, unknown: int) -> int:
        """Estimate the largest batch size by the line through all replays.

        Args:
            gpu: GPU whose libraries hold memory.
            limit_bytes: memory limit.
            batch_limit: largest batch size to try.
            unknown: result where no line is defined.
        """
        whole = self.recipe.whole_batch(batch_limit)
        if whole is not None and self._fits(whole, gpu, int(limit_bytes)):
            return whole
        return self._replays_of(gpu, SMALLEST).guess(limit_bytes, unknown)

    def _fits(self, batch_size: int, gpu: Gpu, limit_bytes: int) -> bool:
        return self.memory(batch_size, gpu, limit_bytes).outcome is Outcome.FITS

    def _replays_of(self, gpu: Gpu, batch_size: int) -> Replays:
        """Replays of all batch sizes that accumulate as this one does."""
        library, accumulates = library_bytes(gpu), self.recipe.micro_batches(batch_size) > 1
        key = (library, accumulates)
        if key not in self._replays:
            self._replays[key] = Replays(
                lambda batch_size, limit: self._replayed(batch_size, library, limit),
                lambda batch_size: self.peak_bytes(batch_size, gpu),
                self._held_anywhere[accumulates],
            )
        return self._replays[key]

    def peak_bytes(self, batch_size: int, gpu: Gpu) -> int:
        """Most bytes in use at once."""
        return self._steps_of(batch_size).peak_bytes(batch_size) + library_bytes(gpu)

    def step_time(
        self, batch_size: int, gpu: Gpu, constants: EfficiencyConstants
    ) -> SimulatedStepTime:
        """Simulate the duration of a step of a batch size.

        Raises:
            NoSpeedError: the catalog lacks a rate of the GPU.
            TraceError: the cell cannot be traced.
        """
        key = (batch_size, gpu.key, constants)
        if key not in self._step_times:
            self._step_times[key] = _step_time(
                lambda n: step_time(self.operators(batch_size, n), gpu, constants, self._layout),
                self.recipe.micro_batches(batch_size),
            )
        return self._step_times[key]

    def operators(self, batch_size: int, micro_batches: int | None = None) -> Operators:
        """Operators of a step with these or the recipe's micro-batches, after the first step.

        Raises:
            TraceError: the cell cannot be traced.
        """
        count = micro_batches or self.recipe.micro_batches(batch_size)
        operators = self._steps_of(batch_size).operators(batch_size, count)
        return by_flash2(operators) if self.recipe.attention == "flash_attention_2" else operators

    def at_peak(self, batch_size: int, gpu: Gpu) -> dict[Purpose, int]:
        """Bytes at the peak by purpose."""
        library = {Purpose.LIBRARY: library_bytes(gpu)}
        return self._steps_of(batch_size).at_peak(batch_size) | library

    def _steps_of(self, batch_size: int) -> Steps:
        request, micro_batches = self.request_of(batch_size), self._micro_batches(batch_size)
        key = (request.batch_size, micro_batches)
        if key not in self._steps:
            self._steps[key] = Steps(self.traces.get(request), micro_batches, self._layout)
        return self._steps[key]

    def _micro_batches(self, batch_size: int) -> int:
        """Micro-batches of a simulated step: a third is like the second."""
        return min(self.recipe.micro_batches(batch_size), 2)

    def _replayed(self, batch_size: int, library: int, limit: int | None) -> AllocatorPeaks:
        trace, expandable = self.traces.get(self.request_of(batch_size)), self.expandable_segments
        count = self._micro_batches(batch_size)

        def replayed() -> tuple[AllocatorPeaks]:
            steps = self._steps_of(batch_size)
            held = np.r_[library // 2, library // 2, steps.held.sizes]
            moves = steps.moves(batch_size)
            return (peaks_on_streams(moves, held, limit, expandable_segments=expandable),)

        step = (trace.digest, repr(self._layout and self._layout.on_one_node), count, batch_size)
        content = ("steps", *step, library, limit, expandable)
        return self._stored.get(content, replayed)[0]


def _use_of(peaks: AllocatorPeaks) -> MemoryUse:
    missed = peaks.failed_at is not None
    outcome = Outcome.THRASHING if peaks.retries else Outcome.FITS
    return MemoryUse(
        allocated_bytes=peaks.peak_allocated_bytes,
        reserved_bytes=peaks.peak_reserved_bytes,
        retries=peaks.retries,
        outcome=Outcome.OUT_OF_MEMORY if missed else outcome,
    )


def _step_time(timed: Callable[[int], SimulatedStepTime], micro_batches: int) -> SimulatedStepTime:
    """Time of a step with many micro-batches, by the times of steps with two and three."""
    few = min(micro_batches, 3)
    step = timed(few)
    further = micro_batches - few
    if not further:
        return step
    before = timed(few - 1)
    return SimulatedStepTime(
        seconds=step.seconds + further * (step.seconds - before.seconds),
        busy_seconds=step.busy_seconds + further * (step.busy_seconds - before.busy_seconds),
        exposed_seconds=step.exposed_seconds
        + further * (step.exposed_seconds - before.exposed_seconds),
        is_of_gpu=step.is_of_gpu,
        collectives=step.collectives + further * (step.collectives - before.collectives),
    )


def like(
    cell: SimulatedCell,
    *,
    tokens: int | None = None,
    expandable_segments: bool | None = None,
    padded: bool = False,
) -> SimulatedCell:
    """Simulated cell with examples of another length, padded or not, or under another setting."""
    request, setting = cell.request, cell.expandable_segments
    seq_len = request.cell.seq_len if tokens is None else tokens
    made = SimulatedCell(
        request.cell.model_copy(update={"seq_len": seq_len}),
        request.model,
        cell.traces,
        request.routing,
        expandable_segments=setting if expandable_segments is None else expandable_segments,
    )
    made.request = made.request.model_copy(update={"padded": padded})
    return made


def model_parameters(cell: SimulatedCell) -> ParameterCounts | None:
    """Parameter counts of the whole model of a cell; None where its trace has none.

    Raises:
        TraceError: the cell cannot be traced.
    """
    return cell.traces.get(cell.request).parameters


def host_gib(cell: SimulatedCell, batch_size: int, limit_bytes: int) -> float | None:
    """Memory that the processes of a node keep on its host; None for none, as ``host_bytes``."""
    size = host_bytes(cell, batch_size, limit_bytes)
    return None if size is None else size / GIB


def host_bytes(cell: SimulatedCell, batch_size: int, limit_bytes: int) -> int | None:
    """Most bytes of tensors that the processes of a node keep on its host; None for none there.

    Stages 1 and 2 of ZeRO put trained weights one behind another. Where the GPU has no room for
    such a copy, each process makes it on the host, beside the weights.

    Args:
        cell: simulated cell.
        batch_size: examples per step.
        limit_bytes: usable memory of the GPU without the context.

    Raises:
        TraceError: the cell cannot be traced.
    """
    layout = cell.request.cell.parallel
    if layout is None or layout.offload is None:
        return None
    of_each = cell.traces.get(cell.request_of(batch_size)).host_bytes
    if not of_each:
        return None
    which = min(cell.recipe.micro_batches(batch_size), len(of_each)) - 1
    weights, size = int(cell.held.sizes.sum()), of_each[which]
    is_flattened = layout.zero_stage in {1, 2} and cell.recipe.method == "full"
    if is_flattened and 2 * weights > limit_bytes:
        size = max(size, 2 * weights)
    return size * layout.gpus_per_node


def library_bytes(gpu: Gpu) -> int:
    """Bytes of cuBLAS' workspaces in PyTorch's allocator."""
    capability = None if gpu.compute_capability is None else float(gpu.compute_capability)
    return CUBLAS_HOPPER_BYTES if capability is not None and capability >= HOPPER else CUBLAS_BYTES
