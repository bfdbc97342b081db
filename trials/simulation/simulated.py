"""A cell on a GPU that nobody has here: what fits, how much memory, how long a step. No torch."""

from dataclasses import dataclass

from gpu_catalog.gpu import Gpu
from trials.models.model import Model
from trials.observation import Outcome
from trials.search import Reading, drive, search_largest_batch
from trials.simulation.allocator import AllocatorPeaks, replay
from trials.simulation.clock import Constants, StepTime, step_time
from trials.simulation.events import Held, Operators, Purpose
from trials.simulation.request import SMALLEST, Routing, TraceRequest
from trials.simulation.steps import Steps
from trials.simulation.traces import Traces
from trials.workload import Cell

GIB = 2**30
# CUDA's context and the libraries' code on the card: 0.5 to 2.1 GiB, constant for a software image
# and only to be known by measuring it. This is what an image of PyTorch's own wheels takes.
CONTEXT_BYTES = 512 * 2**20
# cuBLAS takes its workspace once for the thread of the forward pass and once for the backward one
# (PyTorch's CUDABlas.cpp: :4096:2:16:8, and 32 MiB from Hopper on).
CUBLAS_BYTES = 2 * (2 * 4096 + 8 * 16) * 1024
CUBLAS_HOPPER_BYTES = 2 * 32 * 2**20
HOPPER = 9.0


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Device memory of the steps at one batch size.

    Attributes:
        allocated_bytes: most bytes of live storages at once, as PyTorch's allocator counts them.
        reserved_bytes: most bytes it holds; absent where it was not replayed.
        retries: times it had to give back what it cached.
        outcome: how steps end under the limit.
    """

    allocated_bytes: int
    reserved_bytes: int | None
    retries: int
    outcome: Outcome


class SimulatedCell:
    """A cell's steps at any batch size, on any GPU.

    Args:
        cell: what is fine-tuned.
        model: the model of its name.
        traces: where traces come from.
        routing: the experts' shares; absent for the same to each.
        expandable_segments: a setting of PyTorch's allocator.
    """

    def __init__(
        self,
        cell: Cell,
        model: Model,
        traces: Traces,
        routing: Routing | None = None,
        *,
        expandable_segments: bool = False,
    ) -> None:
        self._expandable_segments = expandable_segments
        self._request = TraceRequest(cell=cell, model=model, routing=routing or Routing())
        self._traces = traces
        self._steps: dict[str, Steps] = {}
        self._unlimited: dict[tuple[int, int], AllocatorPeaks] = {}

    def requests(self, *, alone: bool = False) -> list[TraceRequest]:
        """What must be traced for it; ``alone``: for a batch of one query, too."""
        one = self._request.model_copy(update={"batch_size": 1})
        return [self._request, one] if alone else [self._request]

    @property
    def held(self) -> Held:
        """What the model holds throughout."""
        return self._of(self._request).held

    def memory(self, batch_size: int, gpu: Gpu, limit_bytes: int) -> MemoryUse:
        """The memory of steps of so many queries.

        Args:
            batch_size: queries per step.
            gpu: whose libraries hold memory.
            limit_bytes: the GPU's usable memory, less the context.

        Raises:
            TraceError: the cell cannot be traced.
        """
        use = self.in_use(batch_size, gpu, limit_bytes)
        known = self._known(batch_size, gpu, limit_bytes)
        if use.outcome is Outcome.OUT_OF_MEMORY or known is True:
            return use
        if known is None:
            peaks = self.without_limit(batch_size, gpu)
            # What never reaches the limit does the same under it.
            known = peaks.peak_reserved_bytes <= limit_bytes
        if not known:
            peaks = self._replayed(batch_size, library_bytes(gpu), limit_bytes)
        missed = peaks.failed_at is not None
        outcome = Outcome.THRASHING if peaks.retries else Outcome.FITS
        return MemoryUse(
            allocated_bytes=peaks.peak_allocated_bytes,
            reserved_bytes=peaks.peak_reserved_bytes,
            retries=peaks.retries,
            outcome=Outcome.OUT_OF_MEMORY if missed else outcome,
        )

    def in_use(self, batch_size: int, gpu: Gpu, limit_bytes: int) -> MemoryUse:
        """What is in use at once, without a replay; where that is too much, no cache can help.

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
        """What steps of so many queries hold where there is no end of memory."""
        library = library_bytes(gpu)
        key = (batch_size, library)
        if key not in self._unlimited:
            self._unlimited[key] = self._replayed(batch_size, library, None)
        return self._unlimited[key]

    def fits(self, batch_size: int, gpu: Gpu, limit_bytes: int) -> bool:
        """Whether steps of so many queries stay below a limit without a retry.

        Raises:
            TraceError: the cell cannot be traced.
        """
        known = self._known(batch_size, gpu, limit_bytes)
        if known is not None:
            return known
        return self.without_limit(batch_size, gpu).peak_reserved_bytes <= limit_bytes

    def cached_beyond(self, batch_size: int, gpu: Gpu) -> int:
        """What is held beyond what is in use, by the replay nearest to so many queries."""
        library = library_bytes(gpu)
        held = {b: p.peak_reserved_bytes for (b, of), p in self._unlimited.items() if of == library}
        if not held:
            return 0
        near = min(held, key=lambda b: abs(b - batch_size))
        return held[near] - self.peak_bytes(near, gpu)

    def _known(self, batch_size: int, gpu: Gpu, limit_bytes: int) -> bool | None:
        """Whether they do by what was replayed, for other GPUs too: what fits, fits in any smaller.

        None where nothing was replayed that tells.
        """
        library = library_bytes(gpu)
        held = [
            (b, p.peak_reserved_bytes) for (b, of), p in self._unlimited.items() if of == library
        ]
        exact = [size <= limit_bytes for b, size in held if b == batch_size]
        if exact:
            return None  # its peaks are there to be told
        if any(b > batch_size and size <= limit_bytes for b, size in held):
            return True
        return False if any(b < batch_size and size > limit_bytes for b, size in held) else None

    def peak_bytes(self, batch_size: int, gpu: Gpu) -> int:
        """Most bytes in use at once: what no cache can do without."""
        return self._steps_of(batch_size).peak_bytes(batch_size) + library_bytes(gpu)

    def step_time(self, batch_size: int, gpu: Gpu, constants: Constants) -> StepTime:
        """The time of a step of so many queries.

        Raises:
            NoSpeedError: the GPU's rates are not known.
            TraceError: the cell cannot be traced.
        """
        return step_time(self.operators(batch_size), gpu, constants)

    def operators(self, batch_size: int) -> Operators:
        """What a steady step of so many queries runs.

        Raises:
            TraceError: the cell cannot be traced.
        """
        return self._steps_of(batch_size).operators(batch_size)

    def at_peak(self, batch_size: int, gpu: Gpu) -> dict[Purpose, int]:
        """Bytes at the peak, by what they are for."""
        library = {Purpose.LIBRARY: library_bytes(gpu)}
        return self._steps_of(batch_size).at_peak(batch_size) | library

    def _steps_of(self, batch_size: int) -> Steps:
        request = self._request
        if batch_size < request.batch_sizes[0] and batch_size == 1:
            request = request.model_copy(update={"batch_size": 1})
        return self._of(request)

    def _of(self, request: TraceRequest) -> Steps:
        if request.key not in self._steps:
            self._steps[request.key] = Steps(self._traces.get(request))
        return self._steps[request.key]

    def _replayed(self, batch_size: int, library: int, limit: int | None) -> AllocatorPeaks:
        steps = self._steps_of(batch_size)
        names, sizes = steps.storages(batch_size)
        held = [library // 2, library // 2, *steps.held.sizes.tolist()]
        first = int(names.max(initial=-1)) + 1
        return replay(
            [*range(first, first + len(held)), *names.tolist()],
            [*held, *sizes.tolist()],
            capacity_bytes=limit,
            expandable_segments=self._expandable_segments,
        )


def largest_batch_of(cell: SimulatedCell, gpu: Gpu, limit_bytes: int, batch_limit: int) -> int:
    """The largest batch that fits, as ``trials.search`` finds it, for few replays.

    What is in use at once bounds the search from above in no time; the replays that remain confirm
    that b fits and b + 1 does not. 0 when not even one query fits.

    Raises:
        TraceError: the cell cannot be traced.
    """
    fits: dict[int, Reading] = {}

    def probe(batch_size: int) -> Reading:
        if batch_size not in fits:
            peak = cell.peak_bytes(max(batch_size, SMALLEST), gpu)
            if batch_size < SMALLEST and peak <= limit_bytes:
                # Traced by itself only where it is the answer.
                return Reading(fits=True, peak_memory_bytes=peak)
            # Segments are what runs into the limit, not what of them is in use.
            is_fit = peak <= limit_bytes and cell.fits(batch_size, gpu, limit_bytes)
            taken = peak + cell.cached_beyond(batch_size, gpu)
            fits[batch_size] = Reading(fits=is_fit, peak_memory_bytes=taken)
        return fits[batch_size]

    largest = drive(search_largest_batch(limit=batch_limit, memory_limit_bytes=limit_bytes), probe)
    if largest == 1 and cell.without_limit(1, gpu).peak_reserved_bytes > limit_bytes:
        return 0
    return largest


def library_bytes(gpu: Gpu) -> int:
    """What cuBLAS takes of PyTorch's allocator."""
    capability = None if gpu.compute_capability is None else float(gpu.compute_capability)
    return CUBLAS_HOPPER_BYTES if capability is not None and capability >= HOPPER else CUBLAS_BYTES
