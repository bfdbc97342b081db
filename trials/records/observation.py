"""The record of one probe: what was asked, what happened, and on which machine. No torch here."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal, Protocol, TypeVar

from pydantic import Field

from gpu_catalog.record import Record
from trials.records.cell import Cell
from trials.records.recipe import PositiveInt


class Outcome(StrEnum):
    """How a probe ended."""

    FITS = "FITS"
    """Whole optimizer steps ran within the device's memory."""
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    """The device's memory was exceeded."""
    THRASHING = "THRASHING"
    """The steps ran, but only because the allocator retried: too close to the limit to train at."""
    HOST_OUT_OF_MEMORY = "HOST_OUT_OF_MEMORY"
    """The machine's own memory ran out, not the device's."""
    TIMED_OUT = "TIMED_OUT"
    """No answer within the time allowed: hung, or too slow to be of use."""
    FAILED = "FAILED"
    """Anything else. It says nothing about memory."""

    @property
    def is_verdict(self) -> bool:
        """Whether this tells if the batch fits the device's memory: only so it moves the search.

        A host without memory, a hang or a crash says nothing of the device.
        """
        return self in (Outcome.FITS, Outcome.OUT_OF_MEMORY, Outcome.THRASHING)


MEMORY_MISSES = (Outcome.OUT_OF_MEMORY, Outcome.THRASHING)
"""Outcomes that say a batch is too large for the device's memory."""


class Basis(StrEnum):
    """Which device ran the probe: the one it speaks of, a larger one under a cap, or none."""

    MEASURED = "measured"
    CAPPED = "capped"
    """A larger GPU ran it, held to the memory of the one it speaks of: true of the largest batch,
    and of nothing else."""
    SIMULATED = "simulated"


Purpose = Literal["search", "boundary", "ladder"]
StopReason = Literal["precise", "step cap", "time cap"]
Second = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = tuple[Second, ...]
Shorter = tuple[tuple[PositiveInt, Second], ...]
"""Tokens per example, ascending, and seconds of a step of such examples."""


class Environment(Record):
    """The software and hardware a probe ran on.

    Attributes:
        versions: package name and version, sorted by name; ``python`` is among them.
        device_name: what the device calls itself.
        threads: CPU threads the step could use.
        allocator: settings of PyTorch's CUDA allocator (PYTORCH_CUDA_ALLOC_CONF); absent on a CPU,
            empty where none is set.
        host: the machine's name.
        node_id: the Ray node's id; absent outside a cluster.
    """

    versions: tuple[tuple[str, str], ...]
    device_name: str
    threads: int
    allocator: str | None = None
    host: str
    node_id: str | None = None

    @property
    def stack(self) -> str:
        """Fingerprint of what makes measurements comparable. Host and node are not part of it.

        Nor are the threads of a GPU's host: one of them launches what the GPU runs, and nodes of
        one GPU differ in how many there are.
        """
        threads = self.threads if self.allocator is None else 0
        text = repr((self.versions, self.device_name, threads, self.allocator))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def software(self) -> str:
        """Fingerprint of what is the same on any device: the stack less device and driver."""
        versions = tuple(version for version in self.versions if version[0] != "driver")
        anywhere = {"versions": versions, "device_name": "any", "threads": 0}
        return self.model_copy(update=anywhere).stack


class ParameterCounts(Record):
    """Parameters of a model under a recipe, in logical elements (a 4-bit weight counts once)."""

    total: int
    trainable: int
    four_bit: int


class Built(Record):
    """What was found in the model as built, and seen while it ran one step.

    It is held against the recipe before anything is measured: a recipe that silently did something
    else is an error.

    Attributes:
        parameters: the counts.
        dtypes: dtypes of parameters, sorted, those of the 4-bit ones left out.
        adapters: LoRA layers.
        attention: the kernel the model's layers dispatch to; absent without attention.
        experts: how experts are computed; absent without experts.
        mamba: how the selective scan is computed; absent without Mamba layers.
        checkpointed_layers: decoder layers that were run twice in a step.
        layers: decoder layers.
        optimizer: class of the optimizer, with its module.
        kernels: names of the operators that tell the recipe's kernels, as seen in a step, sorted.
    """

    parameters: ParameterCounts
    dtypes: tuple[str, ...]
    adapters: int
    attention: str | None
    experts: str | None
    mamba: str | None
    checkpointed_layers: int
    layers: int
    optimizer: str
    kernels: tuple[str, ...]


class DeviceReading(Record):
    """What NVML said of the GPU at one moment; what it does not say of this GPU is absent.

    Attributes:
        sm_clock_mhz: clock of the multiprocessors.
        memory_clock_mhz: clock of the memory.
        temperature_celsius: of the chip.
        power_watts: drawn by the board.
        throttle_reasons: why the clocks are held down, in NVML's words; empty when they are not.
        used_memory_bytes: of the whole device, by every process.
    """

    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    temperature_celsius: int | None = None
    power_watts: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    used_memory_bytes: int | None = None


class MemoryReading(Record):
    """Memory over the steps in which it was counted.

    Attributes:
        peak_allocated_bytes: most bytes of live tensors at once.
        peak_reserved_bytes: most bytes the allocator held at once; absent on a CPU.
        allocator_retries: times the allocator had to empty its cache to go on; absent on a CPU.
        overhead_bytes: device memory this process holds beyond the allocator (CUDA context,
            libraries); absent on a CPU or where NVML does not tell.
        foreign_bytes: device memory other processes hold; absent as above.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int | None = None
    allocator_retries: int | None = None
    overhead_bytes: int | None = None
    foreign_bytes: int | None = None


class Measurement(Record):
    """What a probe whose steps ran measured. Raw values; everything else is derived from them.

    Attributes:
        memory_steps: whole optimizer steps run while memory was counted.
        memory: what was counted.
        model_memory_bytes: memory of the model's weights and buffers alone.
        warmup_seconds: raw durations of the steps before timing, in order.
        step_seconds: raw durations of the timed steps, in order; empty when only memory was asked.
        stop_reason: why timing stopped; absent when only memory was asked.
        energy_joules: energy the GPU drew over the timed steps; absent where nothing counts it.
        before: the GPU before the timed steps; absent when only memory was asked, or on a CPU.
        after: the GPU after them; absent as above.
        built: what was found in the built model; absent when no model was built: simulated.
        relative_error: how much shorter than told a simulated step may be, of its 90 % interval, as
            a part of it; absent when steps were measured.
        relative_error_above: how much longer; absent for as much.
        shorter_step_seconds: of simulated steps at that batch size whose examples are shorter than
            the cell's, by their tokens; empty where the job's are not.
    """

    memory_steps: int
    memory: MemoryReading
    model_memory_bytes: int
    warmup_seconds: Seconds = ()
    step_seconds: Seconds = ()
    stop_reason: StopReason | None = None
    energy_joules: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    before: DeviceReading | None = None
    after: DeviceReading | None = None
    built: Built | None = None
    relative_error: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    relative_error_above: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    shorter_step_seconds: Shorter = ()


class Observation(Record):
    """One probe of one cell.

    Attributes:
        cell: what was measured.
        purpose: ``search`` looks for the largest batch, ``boundary`` tries that one again in a
            fresh child with other tokens, ``ladder`` measures throughput.
        batch_size: examples per step.
        repeat: 0 for the first visit of this batch size for this purpose, then 1, 2, …
        attempt: 1 for the first try; higher after one that told nothing, or whose times were not
            to be trusted.
        outcome: how it ended.
        detail: one line on why, for everything but FITS.
        basis: measured, capped or simulated.
        memory_limit_bytes: the device memory the probe was held against.
        batch_limit: the largest batch size the search was allowed to try.
        seed: what the data, the weights and the ladder's order were drawn from.
        measurement: present when the steps ran: for FITS and THRASHING.
        environment: present when the child lived long enough to say where it ran.
        started_at: UTC time in ISO 8601.
        seconds: wall time of the whole probe.
    """

    cell: Cell
    purpose: Purpose
    batch_size: int
    repeat: int = 0
    attempt: int = 1
    outcome: Outcome
    detail: str | None = None
    basis: Basis
    memory_limit_bytes: int
    batch_limit: int
    seed: int
    measurement: Measurement | None = None
    environment: Environment | None = None
    started_at: str
    seconds: float

    @property
    def key(self) -> str:
        """What makes this observation one of a kind within a run."""
        return f"{self.cell.key}/{self.purpose}/b{self.batch_size}/r{self.repeat}/t{self.attempt}"

    @property
    def is_timing(self) -> bool:
        """Whether it was asked for throughput, and fitted."""
        return self.purpose == "ladder" and self.outcome is Outcome.FITS


class OfCell(Protocol):
    """Anything that was seen of one cell."""

    @property
    def cell(self) -> Cell:
        """Which."""


S = TypeVar("S", bound=OfCell)


def by_cell(seen: Iterable[S]) -> defaultdict[Cell, list[S]]:
    """What was seen of each cell, in the order given; nothing of any other."""
    found: defaultdict[Cell, list[S]] = defaultdict(list)
    for each in seen:
        found[each.cell].append(each)
    return found


def standing(observations: Iterable[Observation]) -> list[Observation]:
    """All but the timed probes that were timed again, since their node was not to be trusted."""
    every = list(observations)
    last: dict[tuple[Cell, int, int], int] = {}
    for o in every:
        if o.is_timing:
            of = (o.cell, o.batch_size, o.repeat)
            last[of] = max(o.attempt, last.get(of, 0))
    return [
        o for o in every if not o.is_timing or o.attempt == last[o.cell, o.batch_size, o.repeat]
    ]


def largest_batch(observations: Sequence[Observation]) -> tuple[int, Observation | None] | None:
    """The largest batch size of one cell that is safe to train with, and the miss above it.

    The maximum is not stored but read off the probes: the largest size that fitted, below every
    size that ever did not. ``(0, miss)`` means that not even one example fits.

    Returns:
        The size and the miss one above it (absent when the batch limit was reached), or None while
        the search has not closed in on it.
    """
    verdicts = [o for o in observations if o.outcome.is_verdict]
    misses = [o for o in verdicts if o.outcome is not Outcome.FITS]
    lowest_miss = min(misses, key=lambda o: o.batch_size, default=None)
    fits = [
        o.batch_size
        for o in verdicts
        if o.outcome is Outcome.FITS
        and (lowest_miss is None or o.batch_size < lowest_miss.batch_size)
    ]
    largest = max(fits, default=0)
    if lowest_miss is not None and lowest_miss.batch_size == largest + 1:
        return largest, lowest_miss
    if fits and largest == max(o.batch_limit for o in verdicts):
        return largest, None
    return None


@dataclass(frozen=True, slots=True)
class Boundary:
    """How sharp the limit of one cell is.

    Attributes:
        safe: the largest batch size below every one that ever missed; None while it is not known.
        largest: the largest batch size that ever fitted.
        tries: probes at ``largest``.
        misses: how many of them did not fit.
    """

    safe: int | None
    largest: int
    tries: int
    misses: int


def boundary(observations: Sequence[Observation]) -> Boundary | None:
    """The limit of one cell with its repeats; None when nothing fitted."""
    verdicts = [o for o in observations if o.outcome.is_verdict]
    fits = [o.batch_size for o in verdicts if o.outcome is Outcome.FITS]
    if not fits:
        return None
    there = [o for o in verdicts if o.batch_size == max(fits)]
    closed = largest_batch(observations)
    return Boundary(
        safe=None if closed is None else closed[0],
        largest=max(fits),
        tries=len(there),
        misses=sum(o.outcome is not Outcome.FITS for o in there),
    )
