"""Records of an estimate."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fitting.laws.fit_result import Interval
from gpu_catalog.gpu import Gpu
from gpu_catalog.record import Record
from orchestrator.estimating.memory_error import MemoryError90
from orchestrator.estimating.question import Question
from orchestrator.pricing.offer_constraints import MissedConstraints
from trials.records.observation import Basis, Outcome
from trials.simulation.simulated_cell import SimulatedCell
from trials.simulation.timing_model import SimulatedStepTime
from trials.simulation.trace_request import Fidelity
from trials.simulation.varying_lengths import VaryingLengths

BatchChoice = Literal["asked", "largest", "fastest"]


class Price(Record):
    """The job on the cheapest offer of a GPU, with 90 % intervals.

    ``usd_per_hour`` is the price of the whole instance.
    """

    provider: str
    instance: str
    region: str
    market: str
    gpus_per_instance: int
    usd_per_hour: float
    hours: float
    hours_interval: Interval
    usd: float
    usd_interval: Interval


class Estimate(Record):
    """Simulation of one cell on one GPU. Unknown values are None.

    Attributes:
        sparsity: active experts over experts; 1.0 without experts.
        batch_size: examples per micro-batch, or packed rows, of all fields below.
        micro_batches: micro-batches per optimizer step.
        batch: origin of the batch size: requested, the largest that fits, or the fastest.
        tokens_per_example: mean padded length that times refer to; memory refers to ``seq_len``.
        outcome: outcome of a step of that size.
        max_batch_size: largest batch that fits; 0 when not even one example fits.
        batch_limit: largest batch size that was tried; a ``max_batch_size`` equal to it is a lower
            bound.
        max_batch_size_interval: interval of it, by that of the memory.
        surviving_batch_size: largest batch that survives an epoch of examples of varying length, in
            95 % of simulated runs; None where all batches are of one length.
        varying_reserved_gib: 5th and 95th percentile, over these runs, of the most memory that the
            allocator reserves at ``batch_size`` where it is not limited; None as above.
        peak_gib, peak_gib_interval: peak of the memory that PyTorch's allocator has in use.
        reserved_gib: peak of the memory that it reserves.
        usable_gib: memory of the GPU that it may reserve.
        routed_peak_gib: median and 95th percentile of the peak over drawn shares of the experts;
            None without draws.
        step_seconds, step_seconds_interval: seconds of a step; they and the fields below are None
            when the GPU's speed is unknown or the batch does not fit.
        hours, hours_interval: hours of the job as rented by ``price``, or else on demand.
        price: cheapest offer; None without an allowed one.
        no_price: reason why ``price`` is None although a step time is known.
        fidelity: similarity of the traced stack to the one that would run.
        approximations: parts of the stack that others stand in for.
        constants: source of the timing model's constants.
        left_out: part of the training without which memory, times and price are.
        memory_error: published runs that the intervals of memory and batch size are computed from.
        not_compared: axes of the recipe with a value that no published run has.
    """

    model: str
    gpu: str
    method: str
    recipe: str
    experts: int | None
    active_experts: int | None
    sparsity: float
    seq_len: int
    batch_size: int
    micro_batches: int
    batch: BatchChoice
    tokens_per_example: float
    outcome: Outcome
    max_batch_size: int
    batch_limit: int
    max_batch_size_interval: Interval
    surviving_batch_size: int | None = None
    varying_reserved_gib: Interval | None = None
    peak_gib: float
    peak_gib_interval: Interval
    reserved_gib: float
    usable_gib: float
    routed_peak_gib: tuple[float, float] | None = None
    step_seconds: float | None = None
    step_seconds_interval: Interval | None = None
    tokens_per_second: float | None = None
    examples_per_second: float | None = None
    examples_per_second_interval: Interval | None = None
    hours: float | None = None
    hours_interval: Interval | None = None
    price: Price | None = None
    no_price: str | None = None
    fidelity: Fidelity
    approximations: tuple[str, ...]
    constants: str
    left_out: str | None = None
    memory_error: MemoryError90
    not_compared: tuple[str, ...] = ()
    basis: Basis = Basis.SIMULATED


@dataclass(frozen=True, slots=True)
class Estimated:
    """An estimate with the simulation that it was made from.

    Attributes:
        question: the job, and the recipe on this GPU.
        varying: runs on examples of varying length; None where all batches are of one length.
        hours: hours of the job's steps by candidate batch size; empty for a single candidate.
        missed: best hours and dollars of the GPU's offers where none meets the constraints.
        prices: the job on each offer that meets them, the cheapest first.
    """

    estimate: Estimate
    question: Question
    cell: SimulatedCell
    varying: VaryingLengths | None
    gpu: Gpu
    step: SimulatedStepTime | None
    hours: Mapping[int, float]
    missed: MissedConstraints | None
    prices: tuple[Price, ...] = ()
