"""Observations: the record of a probe, its result and its machine. No torch here."""

import hashlib
from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field

from gpu_catalog.record import Record
from trials.recipes.fields import PositiveInt
from trials.records.built import Built, ParameterCounts
from trials.records.cell import Cell
from trials.records.collectives import CollectiveCount, CollectiveTime, Second, Whole

LOG_VERSION = 2
"""Version of the log's format, to be raised when earlier programs can no longer read it."""


class Outcome(StrEnum):
    """Outcome of a probe."""

    FITS = "FITS"
    """Whole optimizer steps ran within the device's memory."""
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    """The device's memory was exceeded."""
    THRASHING = "THRASHING"
    """The steps ran, but only after the allocator retried: too close to the limit for training."""
    HOST_OUT_OF_MEMORY = "HOST_OUT_OF_MEMORY"
    """The machine's own memory ran out, not the device's."""
    TIMED_OUT = "TIMED_OUT"
    """No answer within the time allowed: hung, or too slow to be of use."""
    FAILED = "FAILED"
    """Any other failure; no verdict on memory."""

    @property
    def is_verdict(self) -> bool:
        """Whether the outcome decides if the batch fits the device's memory.

        Only verdicts move the search: a host without memory, a hang or a crash gives none.
        """
        return self in VERDICTS


FITS = Outcome.FITS  # Python 3.11 calls a function to look a member up: slow in a long loop
MEMORY_MISSES = (Outcome.OUT_OF_MEMORY, Outcome.THRASHING)
"""Outcomes of a batch too large for the device's memory."""
VERDICTS = (FITS, *MEMORY_MISSES)


class Basis(StrEnum):
    """Basis of a probe: its own GPU, a larger one under a cap, or a simulation."""

    MEASURED = "measured"
    CAPPED = "capped"
    """A larger GPU ran it with the memory of the GPU in question: valid for the largest batch, not
    for times."""
    SIMULATED = "simulated"


MEASURED, CAPPED, SIMULATED = Basis.MEASURED, Basis.CAPPED, Basis.SIMULATED  # as above
Purpose = Literal["search", "boundary", "drawn", "ladder"]
StopReason = Literal["precise", "step cap", "time cap"]
Seconds = tuple[Second, ...]
Shorter = tuple[tuple[PositiveInt, Second], ...]
"""Pairs of tokens per example, ascending, and seconds of a step with such examples."""


class Environment(Record):
    """Software and hardware of a probe.

    Attributes:
        versions: package name and version, sorted by name; ``python`` is among them.
        device_name: name of the device by its driver.
        threads: CPU threads the step could use.
        allocator: settings of PyTorch's CUDA allocator (PYTORCH_CUDA_ALLOC_CONF); absent on a CPU,
            empty where none is set.
        host: name of the machine.
        node_id: id of the Ray node; absent outside a cluster.
        backend: library that moved tensors between several GPUs, ``nccl`` or ``gloo``; absent for
            one. NCCL's version is among ``versions``; gloo is part of PyTorch.
    """

    versions: tuple[tuple[str, str], ...]
    device_name: str
    threads: int
    allocator: str | None = None
    host: str
    node_id: str | None = None
    # Records of one GPU stay as they were before there were layouts.
    backend: Annotated[str | None, Field(exclude_if=lambda name: name is None)] = None

    @property
    @lru_cache(maxsize=1024)  # noqa: B019 - a log has many probes in few environments
    def stack(self) -> str:
        """Fingerprint shared by comparable measurements, without host and node.

        On a GPU it leaves out the host's threads too: one of them launches all kernels, and nodes
        with one kind of GPU differ in their number.
        """
        threads = self.threads if self.allocator is None else 0
        stack = (self.versions, self.device_name, threads, self.allocator)
        return hashlib.sha256(repr(stack).encode()).hexdigest()[:12]

    @property
    @lru_cache(maxsize=1024)  # noqa: B019 - as above
    def software(self) -> str:
        """Fingerprint of the stack without device and driver."""
        versions = tuple(version for version in self.versions if version[0] != "driver")
        anywhere = {"versions": versions, "device_name": "any", "threads": 0}
        return self.model_copy(update=anywhere).stack


class DeviceReading(Record):
    """NVML's readings of a GPU at one moment; readings that the GPU lacks are absent.

    Attributes:
        sm_clock_mhz: clock of the multiprocessors.
        memory_clock_mhz: clock of the memory.
        temperature_celsius: temperature of the chip.
        power_watts: power drawn by the board.
        throttle_reasons: reasons for lowered clocks by NVML's names; empty for none.
        used_memory_bytes: memory of the whole device in use by all processes.
    """

    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    temperature_celsius: int | None = None
    power_watts: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    used_memory_bytes: Whole | None = None


class MemoryReading(Record):
    """Memory during the steps in which it was measured.

    Attributes:
        peak_allocated_bytes: most bytes of live tensors at once.
        peak_reserved_bytes: most bytes the allocator held at once; absent on a CPU.
        allocator_retries: times the allocator emptied its cache to continue; absent on a CPU.
        overhead_bytes: device memory this process holds beyond the allocator (CUDA context,
            libraries); absent on a CPU or without NVML's reading.
        foreign_bytes: device memory other processes hold; absent as above.
    """

    peak_allocated_bytes: Whole
    peak_reserved_bytes: Whole | None = None
    allocator_retries: Whole | None = None
    overhead_bytes: Whole | None = None
    foreign_bytes: Whole | None = None


class RankReading(Record):
    """Raw measurements of one of several GPUs that train together.

    Attributes:
        rank: number of its process, from 0.
        node_id: id of its Ray node; absent outside a cluster.
        peak_allocated_bytes: most bytes of live tensors at once.
        peak_reserved_bytes: most bytes the allocator held at once; absent on a CPU.
        step_seconds: durations of its timed steps; those of a measurement are the slowest rank's.
        before: readings of its GPU before these steps; absent as in ``Measurement``.
        after: readings after them; absent as above.
    """

    rank: Annotated[int, Field(ge=0)]
    node_id: str | None = None
    peak_allocated_bytes: Whole
    peak_reserved_bytes: Whole | None = None
    step_seconds: Seconds = ()
    before: DeviceReading | None = None
    after: DeviceReading | None = None


class Measurement(Record):
    """Raw measurements of a probe whose steps ran; all other figures are derived from them.

    Attributes:
        memory_steps: number of whole optimizer steps in which memory was measured.
        memory: memory during these steps; absent where only times are known, as in a table.
        model_memory_bytes: memory of the model's weights and buffers alone; absent likewise.
        warmup_seconds: raw durations of the steps before timing, in order.
        step_seconds: raw durations of the timed steps, in order; empty for a probe of memory alone.
        stop_reason: reason why timing stopped; absent for a probe of memory alone.
        energy_joules: energy drawn by the GPU over the timed steps; absent without a counter.
        before: readings before the timed steps; absent for a probe of memory alone, or on a CPU.
        after: readings after them; absent as above.
        built: properties of the built model; absent when simulated, since no model was built.
        relative_error, relative_error_above: lower and upper half of the relative 90 % interval of
            a simulated step time; absent for measured steps.
        step_peak_bytes: most bytes of live tensors in each step, for drawn lengths on a device.
        shorter_step_seconds: simulated step times at this batch size with examples shorter than the
            cell's, by their tokens; empty when the job's lengths are not simulated.
        ranks: measurements of each of several GPUs.
        collectives: times of collectives in logs before ``LinkTimes``; else empty.
        parameters: parameter counts of a simulated model whose steps were timed; those of a built
            one are in ``built``.
        host_bytes: most bytes that simulated processes of a node keep on its host; None for none.
        step_collectives: collectives of one step like the timed ones, on each of several GPUs;
            empty where a probe timed none, or its GPU had no room to count them.
        exposed_seconds: part of a simulated step in which GPUs only wait for one another; absent
            for one GPU and for measured steps, which do not show it.
    """

    memory_steps: Whole
    memory: MemoryReading | None = None
    model_memory_bytes: Whole | None = None
    warmup_seconds: Seconds = ()
    step_seconds: Seconds = ()
    stop_reason: StopReason | None = None
    energy_joules: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    before: DeviceReading | None = None
    after: DeviceReading | None = None
    built: Built | None = None
    relative_error: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    relative_error_above: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    step_peak_bytes: tuple[Whole, ...] = ()
    shorter_step_seconds: Shorter = ()
    # As of ``Environment.backend``.
    ranks: Annotated[tuple[RankReading, ...], Field(exclude_if=lambda ranks: not ranks)] = ()
    collectives: Annotated[
        tuple[CollectiveTime, ...], Field(exclude_if=lambda times: not times)
    ] = ()
    parameters: Annotated[ParameterCounts | None, Field(exclude_if=lambda n: n is None)] = None
    host_bytes: Annotated[Whole | None, Field(exclude_if=lambda size: size is None)] = None
    step_collectives: Annotated[
        tuple[CollectiveCount, ...], Field(exclude_if=lambda counts: not counts)
    ] = ()
    exposed_seconds: Annotated[
        float | None, Field(ge=0, allow_inf_nan=False, exclude_if=lambda seconds: seconds is None)
    ] = None


class Observation(Record):
    """One probe of one cell.

    Attributes:
        cell: cell that was probed.
        purpose: ``search`` looks for the largest batch, ``boundary`` repeats that one in a fresh
            child with other tokens, ``drawn`` looks for the largest batch that survives batches of
            drawn lengths, ``ladder`` measures throughput.
        batch_size: examples per micro-batch of a GPU; per step where the recipe accumulates none.
        lengths: tokens per example of each micro-batch, where they are drawn; empty where every
            example has the length of the cell.
        repeat: 0 for the first visit of this batch size for this purpose, then 1, 2, …
        attempt: 1 for the first attempt; higher after one without a verdict, or on a slow node.
        outcome: outcome of the probe.
        detail: one line on the cause, for every outcome but FITS.
        basis: measured, capped or simulated.
        memory_limit_bytes: device memory that the probe could take.
        batch_limit: largest batch size that the search could try.
        seed: seed of the data, the weights and the ladder's order.
        measurement: of the steps that ran: for FITS and THRASHING; until the end of drawn lengths.
        environment: present when the child lived long enough to report it.
        started_at: UTC time in ISO 8601.
        seconds: wall time of the whole probe.
        log_version: version of the log's format since which such lines are as they are.
    """

    cell: Cell
    purpose: Purpose
    batch_size: Annotated[int, Field(ge=1, le=10**9)]
    lengths: tuple[PositiveInt, ...] = ()
    repeat: Whole = 0
    attempt: Whole = 1
    outcome: Outcome
    detail: str | None = None
    basis: Basis
    memory_limit_bytes: Whole
    batch_limit: Whole
    seed: Whole
    measurement: Measurement | None = None
    environment: Environment | None = None
    started_at: str
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    log_version: Annotated[int, Field(ge=1, le=LOG_VERSION)] = 1

    @property
    def key(self) -> str:
        """Unique key within a run."""
        return f"{self.cell.key}/{self.purpose}/b{self.batch_size}/r{self.repeat}/t{self.attempt}"

    @property
    def key_in_cell(self) -> tuple[object, ...]:
        """Unique key among the records of its cell, without the text of ``key``."""
        return self.purpose, self.batch_size, self.repeat, self.attempt

    @property
    def memory(self) -> MemoryReading | None:
        """Memory during its steps; None where none was measured."""
        return None if self.measurement is None else self.measurement.memory

    @property
    def micro_batches(self) -> int:
        """Micro-batches per optimizer step, on each GPU."""
        return self.cell.rank_recipe.micro_batches(self.batch_size)

    @property
    def examples_per_step(self) -> int:
        """Examples per optimizer step, of all GPUs."""
        return self.batch_size * self.micro_batches * self.cell.data_parallel_ranks

    @property
    def micro_batch_seconds(self) -> Seconds:
        """Seconds per micro-batch of each timed step, with its share of the update.

        These are the step times of laws, throughput and prices: so that a law is affine in the
        batch size whether micro-batches accumulate or not.
        """
        steps = () if self.measurement is None else self.measurement.step_seconds
        micro_batches = self.micro_batches if steps else 1
        return steps if micro_batches == 1 else tuple(s / micro_batches for s in steps)

    @property
    def is_drawn(self) -> bool:
        """Whether it ran drawn lengths; laws and searches are of the cell's length alone."""
        return self.purpose == "drawn"

    @property
    def is_timing(self) -> bool:
        """Whether it measured throughput."""
        return self.purpose == "ladder" and self.outcome is FITS


def without_superseded(observations: Iterable[Observation]) -> list[Observation]:
    """Drop timed probes that a later attempt on another node replaced, their node being slow."""
    every = list(observations)
    last: dict[tuple[Cell, int, int], int] = {}  # attempt at a visit that was timed again
    for o in every:
        if o.attempt > 1 and o.is_timing:
            visit = o.cell, o.batch_size, o.repeat
            last[visit] = max(o.attempt, last.get(visit, 0))

    def is_replaced(o: Observation) -> bool:
        return o.is_timing and o.attempt < last.get((o.cell, o.batch_size, o.repeat), 0)

    return [o for o in every if not is_replaced(o)] if last else every


def largest_batch(observations: Sequence[Observation]) -> tuple[int, Observation | None] | None:
    """Largest batch size of one cell that is safe for training, and the miss above it.

    It is the largest size that fitted, below every size that ever missed, or the whole effective
    batch if that always fitted. ``(0, miss)`` means that one example does not fit.

    Returns:
        The size and the miss one above it (None at the batch limit); None during the search.
    """
    verdicts = [o for o in observations if o.outcome.is_verdict and not o.is_drawn]
    limit = max((o.batch_limit for o in verdicts), default=0)
    whole = verdicts[0].cell.rank_recipe.whole_batch(limit) if verdicts else None
    whole_fits = fits_always(verdicts, whole)
    if whole is not None and whole_fits:
        return whole, None
    misses = [o for o in verdicts if o.outcome is not FITS]
    lowest_miss = min(misses, key=lambda o: o.batch_size, default=None)
    fits = [
        o.batch_size
        for o in verdicts
        if o.outcome is FITS and (lowest_miss is None or o.batch_size < lowest_miss.batch_size)
    ]
    largest = max(fits, default=0)
    if lowest_miss is not None and lowest_miss.batch_size == largest + 1:
        return (largest, lowest_miss) if whole is None or whole_fits is not None else None
    return (largest, None) if fits and largest == limit else None


def surviving_batch(observations: Iterable[Observation]) -> int | None:
    """Largest batch size of one cell that survives drawn lengths; 0 where none does.

    It is None where no drawn lengths were run.
    """
    drawn = [o for o in observations if o.is_drawn and o.outcome.is_verdict]
    misses = [o.batch_size for o in drawn if o.outcome is not FITS]
    fits = [o.batch_size for o in drawn if o.outcome is FITS]
    below = (size for size in fits if not misses or size < min(misses))
    return max(below, default=0) if drawn else None


def trainable_batch(
    observations: Sequence[Observation],
) -> tuple[int, Observation | None] | None:
    """``largest_batch``, or the largest that survives drawn lengths where that is smaller."""
    largest, surviving = largest_batch(observations), surviving_batch(observations)
    drawn = (o for o in observations if o.is_drawn and o.outcome.is_verdict)
    misses = (o for o in drawn if o.outcome is not FITS)
    miss = min(misses, key=lambda o: o.batch_size, default=None)
    if largest is None or surviving is None or miss is None or surviving >= largest[0]:
        return largest
    return surviving, miss


def fits_always(observations: Iterable[Observation], batch_size: int | None) -> bool | None:
    """Whether every verdict on a batch size is that it fits; None without a verdict."""
    of_size = (o.outcome for o in observations if o.batch_size == batch_size and not o.is_drawn)
    verdicts = {outcome for outcome in of_size if outcome.is_verdict}
    return verdicts == {Outcome.FITS} if verdicts else None
