"""What a GPU nobody has here would take for a job: memory, largest batch, time, money."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fitting.laws import FloatArray
from fitting.result import Interval
from gpu_catalog.catalog import Catalog
from gpu_catalog.gpu import Gpu
from gpu_catalog.offer import Offer
from gpu_catalog.record import Record
from orchestrator.constraints import Missed
from orchestrator.cost import charged_hours, rental
from orchestrator.estimate_batch import Sized, Taken, at_lengths, sized, taken
from orchestrator.estimate_question import Question
from orchestrator.price_drift import widened
from orchestrator.ranking import job_hours
from orchestrator.workload_tokens import rows
from trials.observation import Basis, Outcome
from trials.recipe import Recipe
from trials.simulation.clock import Constants, NoSpeedError, StepTime
from trials.simulation.prober import usable_bytes
from trials.simulation.request import SMALLEST, Fidelity, Routing, approximations
from trials.simulation.simulated import GIB, SimulatedCell
from trials.simulation.traces import Traces

# The worst that a prototype's peaks were off, of dozens of published single-GPU runs.
MEMORY_ERROR = 0.06
BatchChoice = Literal["asked", "largest", "fastest"]
DRAWN_SIGMA = 0.2  # spread of experts' shares (of the logarithm) that published runs agree with


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
        batch_size: queries per step, or packed rows, that all that follows is of.
        batch: why that one: asked for, the largest that fits, or the fastest of several.
        tokens_per_query: that times are of, padding included; memory is of ``seq_len``.
        outcome: how steps of that size end.
        max_batch_size: the largest that fits; 0 when not even one query does.
        batch_limit: the largest that was tried: where ``max_batch_size`` is as large, more may fit.
        max_batch_size_interval: by the interval of the memory.
        peak_gib, peak_gib_interval: most memory in use at once, as PyTorch's allocator counts it.
        reserved_gib: most memory it holds.
        usable_gib: what the GPU has for it.
        routed_peak_gib: median and 95th percentile of the peak over drawn shares of the experts;
            absent when none were drawn.
        step_seconds, step_seconds_interval: absent when the GPU's speed is not known, or the batch
            does not fit; as are those that follow.
        tokens_per_second, queries_per_second, queries_per_second_interval: throughput.
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
    tokens_per_query: float
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
    queries_per_second: float | None = None
    queries_per_second_interval: Interval | None = None
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
    step: StepTime | None
    hours: Mapping[int, float]
    missed: Missed | None


def estimates(
    question: Question,
    gpus: Sequence[Gpu],
    catalog: Catalog,
    constants: Constants,
    traces: Traces,
) -> list[Estimated]:
    """An estimate for each GPU, the cheapest job first, those without a price by their speed.

    Raises:
        TraceError: the model cannot be traced under the recipe.
    """
    cells: dict[Recipe, SimulatedCell] = {}
    routed: dict[Recipe, list[SimulatedCell]] = {}
    for gpu in gpus:
        cell = question.cell(gpu)
        if cell.recipe not in cells:  # a trace does not depend on the GPU
            cells[cell.recipe] = SimulatedCell(
                cell, question.model, traces, expandable_segments=question.expandable_segments
            )
            routed[cell.recipe] = [
                SimulatedCell(cell, question.model, traces, Routing(sigma=DRAWN_SIGMA, seed=seed))
                for seed in range(1, question.routing_draws + 1)
                if question.model.experts is not None
            ]
    alone = question.batch in {1, "fastest"}
    everything = [*cells.values(), *(each for drawn in routed.values() for each in drawn)]
    traces.prepare([request for cell in everything for request in cell.requests(alone=alone)])
    found = [
        sized(question, gpu, cells[recipe], routed[recipe])
        for gpu in gpus
        for recipe in [question.cell(gpu).recipe]
    ]
    timed = at_lengths(question, found, traces)
    return sorted(
        (
            _estimated(question, each, catalog, constants, taken(question, each, timed, constants))
            for each in found
        ),
        key=_worth,
    )


def _worth(estimated: Estimated) -> tuple[bool, float, float]:
    told = estimated.estimate
    price = told.price
    speed = told.queries_per_second or 0.0
    return (price is None, 0.0 if price is None else price.usd, -speed)


def _estimated(
    question: Question, each: Sized, catalog: Catalog, constants: Constants, batch: Taken
) -> Estimated:
    """The estimate of a batch: its memory at the longest rows, its time at what those have."""
    gpu, cell = each.gpu, each.cell
    limit = usable_bytes(gpu)
    use = cell.memory(batch.size, gpu, limit)
    needed = cell.without_limit(batch.size, gpu)  # whether it is there or not
    step = None
    if use.outcome is Outcome.FITS:
        with contextlib.suppress(NoSpeedError):
            step = batch.timed.step_time(batch.size, gpu, constants)
    asked = question.cell(gpu)
    approximate = approximations(asked, question.model, gpu)
    timed: dict[str, Any] = {}
    missed = None
    if step is not None:
        timed, missed = _job(question, catalog.offers(gpu.key), batch.size, step, constants)
        timed |= _speed(question, batch, constants, step)
    told = Estimate(
        model=asked.model,
        gpu=gpu.key,
        method=asked.recipe.method,
        recipe=asked.recipe.key,
        experts=asked.experts,
        active_experts=asked.active_experts,
        sparsity=asked.sparsity,
        seq_len=asked.seq_len,
        batch_size=batch.size,
        batch=_which(question, batch),
        tokens_per_query=batch.tokens,
        outcome=use.outcome,
        max_batch_size=each.largest,
        batch_limit=question.batch_limit,
        max_batch_size_interval=_batches(cell, gpu, limit, each.largest, question.batch_limit),
        peak_gib=needed.peak_allocated_bytes / GIB,
        peak_gib_interval=_around(needed.peak_allocated_bytes / GIB, MEMORY_ERROR),
        reserved_gib=needed.peak_reserved_bytes / GIB,
        usable_gib=limit / GIB,
        routed_peak_gib=_spread(each.routed, gpu, batch.size),
        fidelity=Fidelity.APPROXIMATE if approximate else Fidelity.REPRODUCED,
        approximations=approximate,
        constants=constants.source,
        **timed,
    )
    return Estimated(told, cell, gpu, step, batch.hours, missed)


def _which(question: Question, batch: Taken) -> BatchChoice:
    if isinstance(question.batch, int):
        return "asked"
    return "fastest" if batch.hours else "largest"


def _speed(
    question: Question, batch: Taken, constants: Constants, step: StepTime
) -> dict[str, Any]:
    # A packed row has several queries.
    queries = batch.size * question.workload.queries / rows(question.workload)
    seconds = _around(step.seconds, constants.error, constants.error_above)
    return {
        "step_seconds": step.seconds,
        "step_seconds_interval": seconds,
        "tokens_per_second": batch.size * batch.tokens / step.seconds,
        "queries_per_second": queries / step.seconds,
        "queries_per_second_interval": Interval(
            low=queries / seconds.high, high=queries / seconds.low
        ),
    }


def _job(
    question: Question,
    offers: Sequence[Offer],
    batch_size: int,
    step: StepTime,
    constants: Constants,
) -> tuple[dict[str, Any], Missed | None]:
    """The job on the cheapest of a GPU's offers that are wanted; else its hours, and why."""
    seconds = _around(step.seconds, constants.error, constants.error_above)
    told = np.array([step.seconds, seconds.low, seconds.high])
    steps_hours = job_hours(question.workload, batch_size, 1.0) * told
    rented = {
        spot: rental(steps_hours, question.workload.overheads, spot=spot).hours
        for spot in (False, True)
    }
    wanted = question.constraints
    prices = [
        _priced(offer, rented[offer.market == "spot"], question.drift.sigma(offer))
        for offer in offers
        if wanted.allows(offer)
    ]
    kept = [price for price in prices if not wanted.refuse(price.hours, price.usd)]
    if kept:
        best = min(kept, key=lambda price: price.usd)
        return {"price": best, "hours": best.hours, "hours_interval": best.hours_interval}, None
    hours, low, high = map(float, rented[False])
    missed = Missed.best_of((price.hours, price.usd) for price in prices)
    if missed is not None:
        reason = f"the job {missed.text(wanted)}"
    else:
        reason = "no offer of it is wanted" if offers else "the catalog has no offer of it"
    unpriced = {"no_price": reason, "hours": hours, "hours_interval": Interval(low=low, high=high)}
    return unpriced, missed


def _priced(offer: Offer, rented: FloatArray, sigma: float) -> Price:
    """What so many hours, their low and their high end cost, the price off by sigma."""
    hours, low, high = map(float, rented)
    usd, usd_low, usd_high = (
        charged_hours(each, offer.minimum_minutes) * offer.usd_per_hour
        for each in (hours, low, high)
    )
    usd_low, usd_high = widened(usd, usd_low, usd_high, sigma)
    return Price(
        provider=offer.provider,
        instance=offer.instance,
        region=offer.region,
        market=offer.market,
        gpus_per_instance=offer.gpus_per_instance,
        usd_per_hour=offer.usd_per_hour,
        hours=hours,
        hours_interval=Interval(low=low, high=high),
        usd=usd,
        usd_interval=Interval(low=usd_low, high=usd_high),
    )


def _around(value: float, error: float, above: float | None = None) -> Interval:
    return Interval(low=value / (1 + error), high=value * (1 + (above or error)))


def _batches(cell: SimulatedCell, gpu: Gpu, limit: int, largest: int, batch_limit: int) -> Interval:
    """The largest batches if every need were as far off as it may be, either way.

    A doubt is not worth further replays: they are told by the line through those there are.
    """
    least, most = limit / (1 + MEMORY_ERROR), limit * (1 + MEMORY_ERROR)
    if largest < SMALLEST:
        fewer, more = (cell.largest_batch(gpu, round(at), batch_limit) for at in (least, most))
        return Interval(low=min(fewer, largest), high=max(more, largest))
    fewer, more = (cell.roughly_largest(gpu, at, largest) for at in (least, most))
    low = min(max(fewer, 0), largest)
    return Interval(low=low, high=max(min(more, batch_limit), largest))


def _spread(
    routed: Sequence[SimulatedCell], gpu: Gpu, batch_size: int
) -> tuple[float, float] | None:
    """Median and 95th percentile of the peak over the drawn shares."""
    if not routed:
        return None
    peaks = sorted(
        cell.without_limit(batch_size, gpu).peak_allocated_bytes / GIB for cell in routed
    )
    last = len(peaks) - 1
    return peaks[round(0.5 * last)], peaks[round(0.95 * last)]
