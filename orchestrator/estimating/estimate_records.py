"""Records of an estimate: price, batch and what one GPU comes to."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fitting.laws.fit_result import Interval
from gpu_catalog.gpu import Gpu
from gpu_catalog.record import Record
from orchestrator.pricing.offer_constraints import MissedConstraints
from trials.records.observation import Basis, Outcome
from trials.simulation.simulated_cell import SimulatedCell
from trials.simulation.timing_model import SimulatedStepTime
from trials.simulation.trace_request import Fidelity

BatchChoice = Literal["asked", "largest", "fastest"]


class Price(Record):
    """The cheapest offer of a GPU for the job, and what it comes to.

    Attributes:
        provider, instance, region, market, gpus_per_instance, usd_per_hour: the offer; the price is
            that of the whole instance.
        hours, usd: of the job.
        hours_interval, usd_interval: theirs.
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
    """One cell on one GPU that was simulated. What is not known is absent.

    Attributes:
        model, gpu, method, recipe, seq_len: the cell.
        experts, active_experts, sparsity: its routing; sparsity is 1.0 without experts.
        batch_size: examples per step, or packed rows, that all that follows is of.
        batch: why that one: asked for, the largest that fits, or the fastest of several.
        tokens_per_example: that times are of, padding included; memory is of ``seq_len``.
        outcome: how steps of that size end.
        max_batch_size: the largest that fits; 0 when not even one example does.
        batch_limit: the largest that was tried: where ``max_batch_size`` is as large, more may fit.
        max_batch_size_interval: by the interval of the memory.
        peak_gib, peak_gib_interval: most memory in use at once, as PyTorch's allocator counts it.
        reserved_gib: most memory it holds.
        usable_gib: what the GPU has for it.
        routed_peak_gib: median and 95th percentile of the peak over drawn shares of the experts;
            absent when none were drawn.
        step_seconds, step_seconds_interval: absent when the GPU's speed is not known, or the batch
            does not fit; as are those that follow.
        tokens_per_second, examples_per_second, examples_per_second_interval: throughput.
        hours, hours_interval: of the job: as rented for ``price``, else as on demand.
        price: absent without an offer, too.
        no_price: why there is none, where there is a time.
        fidelity: how near the traced stack is to the one that would run.
        approximations: what stands in for something else.
        constants: where those of the clock come from.
        basis: simulated.
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
    batch: BatchChoice
    tokens_per_example: float
    outcome: Outcome
    max_batch_size: int
    batch_limit: int
    max_batch_size_interval: Interval
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
    basis: Basis = Basis.SIMULATED


@dataclass(frozen=True, slots=True)
class Estimated:
    """An estimate, and what it was made from.

    Attributes:
        estimate: what is told.
        cell, gpu, step: of what.
        hours: of the job's steps at each batch size that was tried; empty where one alone was.
        missed: what the GPU's offers come to where none keeps the deadline and the budget.
    """

    estimate: Estimate
    cell: SimulatedCell
    gpu: Gpu
    step: SimulatedStepTime | None
    hours: Mapping[int, float]
    missed: MissedConstraints | None
