"""Prober of a simulated GPU: it answers a trial's probes as a child process does for a device."""

import hashlib
import os
import platform
import socket
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from gpu_catalog.gpu import Gpu
from trials.child_process.forked_child import ProbeEnd
from trials.recipes.fields import Optimizer
from trials.recipes.recipe import Recipe
from trials.records.built import ParameterCounts
from trials.records.messages import ProbeRequest
from trials.records.observation import Environment, Measurement, MemoryReading, Outcome
from trials.search import LikelyLargest
from trials.simulation.ranks.rank_timeline import collective_counts
from trials.simulation.recording import StructureError
from trials.simulation.simulated_cell import (
    CONTEXT_BYTES,
    GIB,
    MemoryUse,
    SimulatedCell,
    host_bytes,
    model_parameters,
)
from trials.simulation.timing_model import (
    EfficiencyConstants,
    NoSpeedError,
    SimulatedStepTime,
    host_link_bytes_per_second,
)
from trials.simulation.trace_cache import TraceError
from trials.simulation.trace_request import simulation_code, versions
from trials.simulation.varying_lengths import VaryingLengths

PAGED_BYTES: Mapping[Optimizer, int] = {"paged_adamw_8bit": 2, "paged_adamw_32bit": 8}
"""Bytes of both moments of a weight. No layout of several GPUs divides them."""
LEAST_PAGED_BYTES = 2**30  # less is copied in tens of milliseconds
STEPS = 2  # replayed steps: the first, which makes the optimizer's state, and a later one


def usable_bytes(gpu: Gpu, recipe: Recipe) -> int:
    """Bytes that PyTorch's allocator can have of a GPU for the steps of a recipe.

    These are the usable memory without the context and without the share of vLLM.
    """
    total = gpu.usable_memory_bytes
    if total is None:
        total = round((gpu.marketed_memory_gb or 0) * 1e9)
    return total - CONTEXT_BYTES - round((recipe.generation_share or 0.0) * total)


def paged_notes(cell: SimulatedCell, gpu: Gpu, batch_size: int) -> list[str]:
    """Copies of a paged optimizer's state, which steps leave out; empty where it has room.

    bitsandbytes keeps that state in managed memory. What has no room beside the memory that
    PyTorch's allocator reserves is on the host: an update copies it to the GPU and back.
    """
    each_bytes = PAGED_BYTES.get(cell.recipe.optimizer)
    counts = None if each_bytes is None else model_parameters(cell)
    if each_bytes is None or counts is None:
        return []
    state = each_bytes * counts.trainable
    reserved = cell.without_limit(batch_size, gpu).peak_reserved_bytes
    missing = state + reserved - usable_bytes(gpu, cell.recipe)
    if missing < LEAST_PAGED_BYTES or missing > state:  # a batch that does not fit has no step
        return []
    seconds = missing / host_link_bytes_per_second(gpu)
    text = (
        f"{cell.recipe.optimizer}: {missing / GIB:.1f} of the {state / GIB:.1f} GiB of its state "
        f"have no room on the GPU; the time to copy them from the host and back, at least "
        f"{seconds:.1f} s a step, is left out"
    )
    return [text]


class SimulatedProber:
    """A prober of one cell whose GPU is simulated.

    Args:
        cell: simulated cell; probers of several GPUs may share it.
        gpu: catalog row of its GPU.
        constants: efficiency constants of the stack.
        shorter: cells with shorter examples, by their tokens; timed probes time these too.
        varying: runs of the cell on drawn lengths; absent where none are requested.
    """

    def __init__(
        self,
        cell: SimulatedCell,
        gpu: Gpu,
        constants: EfficiencyConstants,
        shorter: Mapping[int, SimulatedCell] | None = None,
        varying: VaryingLengths | None = None,
    ) -> None:
        self._cell = cell
        self._shorter = shorter or {}
        self._varying = varying
        self._gpu = gpu
        self._constants = constants
        self._limit = usable_bytes(gpu, cell.recipe)

    def likely_largest(self, batch_limit: int) -> LikelyLargest | None:
        """Largest batch size that fits, for few replays; None when none does or without a trace."""
        try:
            largest = self._cell.largest_batch(self._gpu, self._limit, batch_limit)
            return LikelyLargest(largest) if largest else None
        except (TraceError, StructureError):
            return None  # every probe reports the reason

    def probe(self, request: ProbeRequest, *, fresh: bool = False) -> ProbeEnd:
        """Simulate one probe."""
        del fresh  # every replay starts afresh
        try:
            if request.lengths:
                return self._drawn(request.batch_size)
            if request.timing is None:
                use = self._cell.memory(request.batch_size, self._gpu, self._limit)
            else:  # the search has found that it fits
                use = self._cell.in_use(request.batch_size, self._gpu, self._limit)
            return self._end(request, use)
        except (TraceError, NoSpeedError, StructureError) as error:
            return ProbeEnd(Outcome.FAILED, str(error), final=True)

    def _drawn(self, batch_size: int) -> ProbeEnd:
        """Simulate runs of drawn lengths; the request has those of one of them."""
        assert self._varying is not None  # made for the trial's own lengths
        run = self._varying.most(batch_size, self._gpu, self._limit)
        missed = run.failed_at is not None
        use = MemoryUse(
            allocated_bytes=run.peak_allocated_bytes,
            reserved_bytes=run.peak_reserved_bytes,
            retries=run.retries,
            outcome=Outcome.OUT_OF_MEMORY if missed else Outcome.FITS,
        )
        return self._end(ProbeRequest(batch_size=batch_size, timing=None), use)

    def _end(self, request: ProbeRequest, use: MemoryUse) -> ProbeEnd:
        timed = request.timing is not None
        times: dict[str, Any] = {}
        if timed and use.outcome is Outcome.FITS:
            step = self._step(self._cell, request.batch_size)
            below, above = self._constants.relative_errors(step)
            shorter = tuple(self._shorter_seconds(request.batch_size))
            times = {
                "step_seconds": (step.seconds,),
                "relative_error": below,
                "relative_error_above": above,
                "shorter_step_seconds": shorter,
                "parameters": self._parameters,
            }
            if self._cell.request.cell.ranks > 1:
                times |= {
                    "step_collectives": collective_counts(step.collectives),
                    "exposed_seconds": max(0.0, step.exposed_seconds),
                }
        measurement = Measurement(
            memory_steps=STEPS,
            memory=MemoryReading(
                peak_allocated_bytes=use.allocated_bytes,
                peak_reserved_bytes=use.reserved_bytes,
                allocator_retries=use.retries,
                overhead_bytes=CONTEXT_BYTES,
            ),
            model_memory_bytes=int(self._cell.held.sizes.sum()),
            host_bytes=host_bytes(self._cell, request.batch_size, self._limit),
            **times,
        )
        missed = use.outcome is Outcome.OUT_OF_MEMORY
        return ProbeEnd(
            outcome=use.outcome,
            detail=None if use.outcome is Outcome.FITS else self._detail(use),
            measurement=None if missed else measurement,
            environment=self._environment(),
            memory_limit_bytes=self._limit,
        )

    @cached_property
    def _parameters(self) -> ParameterCounts | None:
        return model_parameters(self._cell)

    def _shorter_seconds(self, batch_size: int) -> Iterator[tuple[int, float]]:
        for tokens, cell in sorted(self._shorter.items()):
            yield tokens, self._step(cell, batch_size).seconds

    def _step(self, cell: SimulatedCell, batch_size: int) -> SimulatedStepTime:
        timed = cell if self._varying is None else self._varying.timed(cell, batch_size)
        return timed.step_time(batch_size, self._gpu, self._constants)

    def _detail(self, use: MemoryUse) -> str:
        limit = f"{self._limit / GIB:.2f} GiB that {self._gpu.key} has for PyTorch"
        if use.outcome is Outcome.THRASHING:
            return f"the allocator retried {use.retries} times within the {limit}"
        return f"{use.allocated_bytes / GIB:.2f} GiB in use, and more requested, of the {limit}"

    def _environment(self) -> Environment:
        constants = hashlib.sha256(self._constants.model_dump_json().encode()).hexdigest()[:8]
        return Environment(
            versions=tuple(
                sorted(
                    [
                        *versions(),
                        ("python", platform.python_version()),
                        ("constants", constants),
                        ("simulation", simulation_code()),
                    ]
                )
            ),
            device_name=f"{self._gpu.key}, simulated",
            threads=len(os.sched_getaffinity(0)),
            allocator="",
            host=socket.gethostname(),
        )
