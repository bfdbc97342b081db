"""Child process that owns model and device and answers probes, and the fork server it comes from.

A process of its own can be killed with everything it holds when a probe runs out of memory, hangs
or crashes, and the next one starts clean. ``trials.child_process.forked_child`` starts this module
once, as the fork server; the fork server forks the children.
"""

import contextlib
import gc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeVar

import torch

# The last printed line explains how a child ended; warnings would stand in its place.
warnings.filterwarnings("ignore")

from trials.devices.cpu import CpuDevice
from trials.devices.device import Device, DeviceOutOfMemoryError, of_steps
from trials.devices.software import environment
from trials.devices.storages import storage_of
from trials.ranks.collective_counts import CollectiveCounter
from trials.ranks.rank import Rank, slowest
from trials.records.collectives import CollectiveCount
from trials.records.messages import ProbeReply, ProbeRequest, Setup, StepsRun
from trials.records.observation import (
    DeviceReading,
    Environment,
    Measurement,
    MemoryReading,
    Outcome,
    StopReason,
)
from trials.records.profile import Profile
from trials.records.timing_rule import TimingRule
from trials.training.drawn_run import run_drawn_lengths
from trials.training.finetune import (
    FineTuning,
    implied_counts,
    import_libraries,
    least_weight_bytes,
)
from trials.training.recipe_check import RecipeError, check_built
from trials.training.serving.fork_loop import Report, run_fork_server, serve
from trials.training.serving.message_pipe import MessagePipe, pipe_to_trial

MEMORY_STEPS = 3  # optimizer state exists after the first step; the third repeats the second
RANKS_MEMORY_STEPS = 5  # the memory of steps on several CPUs varies
MOST_TAKEN = 0.9  # of the memory limit, by steps that one with counted collectives may follow
S = TypeVar("S", bound=Setup)


def open_device(setup: Setup, rank: Rank | None = None) -> Device:
    """Open the device of a trial.

    Args:
        setup: the device, and its limit.
        rank: this process among others; absent where it is alone.

    Raises:
        DeviceError: the device is another one, or cannot be used.
    """
    cap, held = setup.memory_cap_bytes, setup.cell.recipe.generation_share or 0.0
    if setup.gpu.kind == "cpu":
        if rank is not None:
            rank.meet()
        return CpuDevice(
            setup.gpu,
            memory_cap_bytes=cap,
            held_share=held,
            threads=setup.threads,
            observed=contextlib.nullcontext if rank is None else rank.observed,
        )
    from trials.devices.cuda import CudaDevice  # noqa: PLC0415 - only where there is one

    if rank is None:
        return CudaDevice(setup.gpu, memory_cap_bytes=cap, held_share=held)
    # Memory of the links between ranks is not free.
    return CudaDevice(setup.gpu, memory_cap_bytes=cap, held_share=held, on_context=rank.meet)


def environment_of(device: Device, threads: int, rank: Rank | None = None) -> Environment:
    """Software and device of this process."""
    versions = device.versions | ({} if rank is None else rank.versions())
    own = environment(versions, device.name, device.allocator, threads)
    return own if rank is None else own.model_copy(update={"backend": rank.backend})


def _check_budget(setup: Setup, device: Device, shards: int) -> None:
    """Refuse a model whose weights alone exceed the budget of a CPU, which has memory for it."""
    if setup.gpu.kind != "cpu":
        return
    recipe = setup.cell.recipe
    least = least_weight_bytes(recipe, implied_counts(setup.cell, setup.model)) // shards
    if least > device.memory_limit_bytes:
        raise DeviceOutOfMemoryError(
            f"the weights alone take {least / 2**20:.0f} MiB of a budget of "
            f"{device.memory_limit_bytes / 2**20:.0f} MiB: the model was not built"
        )


@dataclass(frozen=True, slots=True)
class Timed:
    """Durations of steps in seconds, with the energy and device readings around them."""

    warmup_seconds: tuple[float, ...] = ()
    step_seconds: tuple[float, ...] = ()
    stop_reason: StopReason | None = None
    energy_joules: float | None = None
    before: DeviceReading | None = None
    after: DeviceReading | None = None


class Worker:
    """A model under its recipe, ready for probes.

    Args:
        setup: model and device.
        rank: this process among others that train the model, which all get the same requests;
            absent where it is alone. The cell of ``setup`` is that of one rank.

    Attributes:
        device: device that holds the model.
        tuning: the model with its optimizer.

    Raises:
        DeviceOutOfMemoryError: the weights alone exceed a CPU's budget.
        RecipeError: the built model is not what the recipe implies.
    """

    def __init__(self, setup: Setup, rank: Rank | None = None) -> None:
        self.device = open_device(setup, rank)
        _check_budget(setup, self.device, 1 if rank is None else rank.shards)
        self._rank = rank
        self._threads = setup.threads
        self._recipe = setup.cell.recipe
        self.tuning = FineTuning(
            setup.cell, setup.model, device=self.device.torch_device, seed=setup.seed, rank=rank
        )
        self._built = self.tuning.built()
        on_host = rank is not None and rank.parallel.updates_on_host
        check_built(setup.cell, self._built, self.tuning.implied(), is_offloaded=on_host)

    def environment(self) -> Environment:
        """Software and device of this process."""
        return environment_of(self.device, self._threads, self._rank)

    def probe(self, request: ProbeRequest, report: Report = lambda _: None) -> ProbeReply:
        """Run whole optimizer steps at a batch size: memory first, then time if requested.

        Args:
            request: batch size to try.
            report: called after each step of drawn lengths.
        """
        tuning = self.tuning
        if request.lengths:
            return self._drawn(request, report)
        if request.profile is not None and self._recipe.compile is not None:
            raise RecipeError(
                f"compile {self._recipe.compile}: a profile attributes operators, and compiled "
                "code has none: leave compile out"
            )
        tuning.start_over()
        self.device.settle()
        tokens = tuning.tokens(request.batch_size, request.draw)
        step = partial(
            tuning.step, tokens, micro_batches=self._recipe.micro_batches(request.batch_size)
        )
        steps = MEMORY_STEPS if self._rank is None else RANKS_MEMORY_STEPS
        memory = self._memory(step, steps, [*tuning.tensors(), tokens])
        retries = int(slowest(self._rank)(memory.allocator_retries or 0))
        timed, counts = Timed(), tuple[CollectiveCount, ...]()
        if request.timing is not None and not retries:
            counts = self._counted_collectives(step, memory)
            timed = self._timed(step, request.timing)
        measurement = Measurement(
            memory_steps=steps,
            memory=memory,
            model_memory_bytes=self._model_memory_bytes(),
            built=self._built,
            step_collectives=counts,
            **asdict(timed),
        )
        if retries:
            return ProbeReply(
                batch_size=request.batch_size,
                outcome=Outcome.THRASHING,
                detail=f"the allocator emptied its cache {retries} times in {steps} steps",
                measurement=measurement,
            )
        return ProbeReply(
            batch_size=request.batch_size,
            outcome=Outcome.FITS,
            measurement=measurement,
            profile=self._profile(request, tokens[: request.batch_size * tuning.sequences]),
        )

    def _counted_collectives(
        self, step: Callable[[], object], memory: MemoryReading
    ) -> tuple[CollectiveCount, ...]:
        """Collectives of one more step; none where a GPU has little room beside its steps.

        Under a dispatch mode autograd adds two gradients in a third tensor, so that the step may
        take more memory than those that are measured: that of the largest weight, say.
        """
        if self._rank is None:
            return ()
        needed = memory.peak_reserved_bytes or 0  # none on a CPU, which enforces no limit here
        if needed:
            needed += max(storage_of(tensor).nbytes() for tensor in self.tuning.tensors())
        if self._rank.largest(needed / self.device.memory_limit_bytes) > MOST_TAKEN:
            return ()
        counter = CollectiveCounter()
        with counter:
            step()
        return counter.sums.counts()

    def _memory(
        self, step: Callable[[], object], steps: int, live: list[torch.Tensor]
    ) -> MemoryReading:
        if self._rank is None:
            return self.device.measure_memory(step, steps=steps, already_live=live)

        def after_collection() -> None:
            # Hooks of shards leave reference cycles, which hold memory until they are collected.
            gc.collect()
            step()

        readings: list[MemoryReading] = []
        memory = self.device.measure_memory(
            after_collection,
            steps=steps,
            already_live=live,
            after_step=readings.append,
        )
        # The first step makes DDP's wrapper, which copies weights to compare them among the ranks.
        peaks = [reading.peak_allocated_bytes for reading in readings[1:]]
        # A thread of gloo now and then holds a buffer for longer than its collective takes.
        peak = max(peaks) if self._rank.backend == "nccl" else min(peaks)
        return memory.model_copy(update={"peak_allocated_bytes": peak})

    def _model_memory_bytes(self) -> int:
        storages = {s.data_ptr(): s for s in map(storage_of, self.tuning.tensors())}
        return sum(storage.nbytes() for storage in storages.values())

    def _drawn(self, request: ProbeRequest, report: Report) -> ProbeReply:
        """Step through drawn lengths. The allocator may retry, as in training."""
        self.tuning.start_over()
        measured: list[Measurement] = []

        def note(readings: Sequence[MemoryReading]) -> None:
            measurement = Measurement(
                memory_steps=len(readings),
                memory=of_steps(readings),
                model_memory_bytes=self._model_memory_bytes(),
                built=self._built,
                step_peak_bytes=tuple(r.peak_allocated_bytes for r in readings),
            )
            measured.append(measurement)
            report(StepsRun(batch_size=request.batch_size, measured=measurement))

        run_drawn_lengths(
            self.tuning,
            self.device,
            request,
            self._recipe.micro_batches(request.batch_size),
            note,
        )
        return ProbeReply(
            batch_size=request.batch_size, outcome=Outcome.FITS, measurement=measured[-1]
        )

    def _profile(self, request: ProbeRequest, tokens: torch.Tensor) -> Profile | None:
        if request.profile is None:
            return None
        from trials.training.profiling.profiler import (  # noqa: PLC0415 - takes a second; few probes need it
            profiled,
        )

        return profiled(self.tuning, self.device, tokens, request.profile)

    def _timed(self, step: Callable[[], object], rule: TimingRule) -> Timed:
        device, of_all = self.device, slowest(self._rank)
        # All ranks stop after the same step, by the times of the slowest; each reports its own.
        warmup, warmup_of_all = list[float](), list[float]()
        while not rule.is_warm(warmup_of_all):
            warmup.append(device.step_seconds(step))
            warmup_of_all.append(of_all(warmup[-1]))
        before, joules_before = device.reading(), device.energy_joules()
        seconds, seconds_of_all = list[float](), list[float]()
        while (reason := rule.stop_reason(seconds_of_all)) is None:
            seconds.append(device.step_seconds(step))
            seconds_of_all.append(of_all(seconds[-1]))
        joules_after, after = device.energy_joules(), device.reading()
        energy = None
        if joules_before is not None and joules_after is not None:
            energy = joules_after - joules_before
        return Timed(tuple(warmup), tuple(seconds), reason, energy, before, after)


def serve_forks(
    pipe: MessagePipe, setup_type: type[S], run_child: Callable[[S, MessagePipe], None]
) -> None:
    """Run a fork server whose children train; arguments as of ``run_fork_server``."""
    run_fork_server(pipe, setup_type, run_child, import_libraries)


if __name__ == "__main__":
    serve_forks(pipe_to_trial(), Setup, partial(serve, make_worker=Worker))
