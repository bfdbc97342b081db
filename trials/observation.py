"""The record of one probe: what was asked, what happened, and on which machine. No torch here."""

import hashlib
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from gpu_catalog.record import Record
from trials.workload import Cell


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
        """Whether this tells if the batch size can be trained with. FAILED does not."""
        return self is not Outcome.FAILED


class Basis(StrEnum):
    """Whether a real device ran the probe."""

    MEASURED = "measured"
    SIMULATED = "simulated"


Purpose = Literal["search", "ladder"]
StopReason = Literal["precise", "step cap", "time cap"]


class Environment(Record):
    """The software and hardware a probe ran on.

    Attributes:
        versions: package name and version, sorted by name; ``python`` is among them.
        device_name: what the device calls itself.
        threads: CPU threads the step could use.
        host: the machine's name.
        node_id: the Ray node's id; absent outside a cluster.
    """

    versions: tuple[tuple[str, str], ...]
    device_name: str
    threads: int
    host: str
    node_id: str | None = None

    @property
    def stack(self) -> str:
        """Fingerprint of what makes measurements comparable. Host and node are not part of it."""
        text = repr((self.versions, self.device_name, self.threads))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


class ParameterCounts(Record):
    """Parameters of a model under a recipe, in logical elements (a 4-bit weight counts once)."""

    total: int
    trainable: int
    four_bit: int


class Measurement(Record):
    """What a probe that fits measured. Raw values; everything else is derived from them.

    Attributes:
        memory_steps: whole optimizer steps run while memory was counted.
        peak_memory_bytes: most memory in use at once during those steps.
        model_memory_bytes: memory of the model's weights and buffers alone.
        step_seconds: raw durations of the timed steps, in order; empty when only memory was asked.
        stop_reason: why timing stopped; absent when only memory was asked.
        parameters: the counts found in the built model.
    """

    memory_steps: int
    peak_memory_bytes: int
    model_memory_bytes: int
    step_seconds: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...] = ()
    stop_reason: StopReason | None = None
    parameters: ParameterCounts


class Observation(Record):
    """One probe of one cell.

    Attributes:
        cell: what was measured.
        purpose: ``search`` looks for the largest batch, ``ladder`` measures throughput.
        batch_size: queries per step.
        repeat: 0 for the first visit of this batch size on the ladder, 1 for an anchor's second.
        attempt: 1 for the first try; higher after a FAILED one.
        outcome: how it ended.
        detail: one line on why, for everything but FITS.
        basis: measured or simulated.
        memory_limit_bytes: the device memory the probe was held against.
        batch_limit: the largest batch size the search was allowed to try.
        seed: what the data, the weights and the ladder's order were drawn from.
        measurement: present when, and only when, the probe fits.
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


def largest_batch(observations: list[Observation]) -> tuple[int, Observation | None] | None:
    """The largest batch size of one cell that fits, and the miss above it.

    The maximum is not stored but read off the probes: the largest size that fitted, below every
    size that did not. ``(0, miss)`` means that not even one query fits.

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
