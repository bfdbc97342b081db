"""What a GPU nobody has here would take for a job: memory, largest batch, time, money."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pydantic import ValidationError

from fitting.laws import FloatArray
from fitting.result import Interval
from gpu_catalog.catalog import Catalog
from gpu_catalog.gpu import Gpu
from gpu_catalog.offer import Offer
from gpu_catalog.record import Record
from orchestrator.cost import charged_hours, rental
from orchestrator.price_drift import PriceDrift, widened
from orchestrator.ranking import Constraints, job_hours, too_late_or_dear
from orchestrator.sweep import Workload
from orchestrator.workload_tokens import padded_tokens, rows
from trials.models.model import Model
from trials.observation import Basis, Outcome
from trials.possible import obstacle, resolved
from trials.recipe import Recipe
from trials.simulation.clock import Constants, NoSpeedError, StepTime
from trials.simulation.prober import usable_bytes
from trials.simulation.request import Fidelity, Routing, approximations, not_simulated
from trials.simulation.simulated import CONTEXT_BYTES, GIB, SimulatedCell
from trials.simulation.traces import Traces
from trials.workload import Cell

# The worst that a prototype's peaks were off, of dozens of published single-GPU runs.
MEMORY_ERROR = 0.06
DRAWN_SIGMA = 0.2  # spread of experts' shares (of the logarithm) that published runs agree with
EXTRAS = frozenset({"flash_attn", "mamba_ssm", "causal_conv1d", "deepspeed"})


class EstimateError(ValueError):
    """What is asked cannot be estimated; a line for each reason."""


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
        tokens_per_query: that times are of, padding included; memory is of ``seq_len``.
        outcome: how steps of that size end.
        max_batch_size: the largest that fits; 0 when not even one query does.
        max_batch_size_interval: by the interval of the memory.
        peak_gib, peak_gib_interval: most memory in use at once, as PyTorch's allocator counts it.
        reserved_gib: most memory it holds.
        usable_gib: what the GPU has for it.
        routed_peak_gib: median and 95th percentile of the peak over drawn shares of the experts;
            absent when none were drawn.
        step_seconds, step_seconds_interval: absent when the GPU's speed is not known, or the batch
            does not fit; as are those that follow.
        tokens_per_second, queries_per_second, queries_per_second_interval: throughput.
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
    tokens_per_query: float
    outcome: Outcome
    max_batch_size: int
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
    price: Price | None = None
    no_price: str | None = None
    fidelity: Fidelity
    approximations: tuple[str, ...]
    constants: str
    basis: Basis = Basis.SIMULATED


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of every GPU.

    Attributes:
        model: what is fine-tuned.
        recipe: how, as asked.
        active_experts: experts each token is routed to; absent for the model's own.
        seq_len: tokens of the longest query, padding included.
        batch_size: queries per step; absent for the largest that fits.
        batch_limit: the largest to try.
        workload: the job to price.
        constraints: what an offer must be.
        drift: how far prices may have moved.
        routing_draws: draws of the experts' shares to tell the spread of the peak from.
        expandable_segments: a setting of PyTorch's allocator.
    """

    model: Model
    recipe: Recipe
    active_experts: int | None
    seq_len: int
    batch_size: int | None
    batch_limit: int
    workload: Workload
    constraints: Constraints
    drift: PriceDrift
    routing_draws: int
    expandable_segments: bool

    def cell(self, gpu: Gpu) -> Cell:
        """The cell on one GPU.

        Raises:
            EstimateError: there is no such cell; one line on why.
        """
        active = self.active_experts or self.model.active_experts
        if self.active_experts is not None and self.model.experts is None:
            raise EstimateError(f"--active-experts: {self.model.name} has no experts: leave it out")
        recipe = resolved(self.recipe, self.model, gpu)
        reason = obstacle(recipe, self.model, gpu, EXTRAS) or not_simulated(recipe, self.model, gpu)
        if reason is not None:
            raise EstimateError(f"{gpu.key}: {reason}")
        try:
            return Cell(
                gpu=gpu.key,
                simulated=True,
                model=self.model.name,
                recipe=recipe,
                experts=self.model.experts,
                active_experts=active,
                seq_len=self.seq_len,
            )
        except ValidationError as error:
            raise EstimateError(plain(error)) from None


@dataclass(frozen=True, slots=True)
class Estimated:
    """An estimate, and what it was made from."""

    estimate: Estimate
    cell: SimulatedCell
    gpu: Gpu
    step: StepTime | None


def plain(error: ValidationError) -> str:
    """The mistakes of a record that was made from options, a line each."""
    return "\n".join(
        " ".join(
            part
            for part in (
                f"--{str(e['loc'][0]).replace('_', '-')}:" if e["loc"] else "",
                e["msg"].removeprefix("Value error, "),
            )
            if part
        )
        for e in error.errors()
    )


def possible_gpus(question: Question, gpus: Sequence[Gpu]) -> tuple[list[Gpu], list[str]]:
    """The GPUs the question can be asked of, and of each other why not."""
    possible, reasons = [], []
    for gpu in gpus:
        try:
            question.cell(gpu)
        except EstimateError as error:
            reasons.append(str(error))
            continue
        if gpu.usable_memory_bytes is None and gpu.marketed_memory_gb is None:
            reasons.append(f"{gpu.key}: its memory is not known: give --memory-gib")
            continue
        if usable_bytes(gpu) <= 0:
            context = f"CUDA's context alone takes {CONTEXT_BYTES / GIB:g} GiB"
            reasons.append(f"{gpu.key}: {context}: give more memory")
            continue
        possible.append(gpu)
    return possible, reasons


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
    alone = question.batch_size == 1
    everything = [*cells.values(), *(each for drawn in routed.values() for each in drawn)]
    traces.prepare([request for cell in everything for request in cell.requests(alone=alone)])
    sized = [
        _sized(question, gpu, cells[recipe], routed[recipe])
        for gpu in gpus
        for recipe in [question.cell(gpu).recipe]
    ]
    timed = _at_lengths(question, sized, traces)
    traces.prepare([r for cell in timed.values() for r in cell.requests()])
    return sorted(
        (
            _estimated(question, each, catalog, constants, timed.get(each.key, each.cell))
            for each in sized
        ),
        key=_worth,
    )


def _worth(estimated: Estimated) -> tuple[bool, float, float]:
    told = estimated.estimate
    price = told.price
    speed = told.queries_per_second or 0.0
    return (price is None, 0.0 if price is None else price.usd, -speed)


@dataclass(frozen=True, slots=True)
class _Sized:
    """A cell on a GPU, and the batch that is priced.

    Attributes:
        gpu, cell, routed: what was replayed, and with drawn shares of the experts.
        largest: batch that fits.
        batch_size: queries per step.
        tokens: of each, padding included.
    """

    gpu: Gpu
    cell: SimulatedCell
    routed: Sequence[SimulatedCell]
    largest: int
    batch_size: int
    tokens: float

    @property
    def key(self) -> tuple[SimulatedCell, int]:
        """What a step's time is asked of: steps of rows so long."""
        return (self.cell, max(round(self.tokens), 1))


def _sized(
    question: Question, gpu: Gpu, cell: SimulatedCell, routed: Sequence[SimulatedCell]
) -> _Sized:
    largest = cell.largest_batch(gpu, usable_bytes(gpu), question.batch_limit)
    batch_size = question.batch_size or max(min(largest, rows(question.workload)), 1)
    tokens = padded_tokens(question.workload, batch_size, question.seq_len)
    return _Sized(gpu, cell, routed, largest, batch_size, min(tokens, float(question.seq_len)))


def _at_lengths(
    question: Question, sized: Sequence[_Sized], traces: Traces
) -> dict[tuple[SimulatedCell, int], SimulatedCell]:
    """The cells at the lengths that steps have on average, where those are not the longest."""
    found = {}
    for each in sized:
        _, tokens = each.key
        if tokens < question.seq_len and each.largest:
            shorter = replace(question, seq_len=tokens)
            found[each.key] = SimulatedCell(shorter.cell(each.gpu), question.model, traces)
    return found


def _estimated(
    question: Question, sized: _Sized, catalog: Catalog, constants: Constants, timed: SimulatedCell
) -> Estimated:
    """The estimate of a batch: its memory at the longest rows, its time as ``timed`` has it."""
    gpu, cell, batch_size = sized.gpu, sized.cell, sized.batch_size
    limit = usable_bytes(gpu)
    use = cell.memory(batch_size, gpu, limit)
    needed = cell.without_limit(batch_size, gpu)  # whether it is there or not
    step = None
    if use.outcome is Outcome.FITS:
        with contextlib.suppress(NoSpeedError):
            step = timed.step_time(batch_size, gpu, constants)
    asked = question.cell(gpu)
    approximate = approximations(asked, question.model, gpu)
    price, reason = (None, None)
    if step is not None:
        price, reason = _price(question, catalog.offers(gpu.key), batch_size, step, constants)
    told = Estimate(
        model=asked.model,
        gpu=gpu.key,
        method=asked.recipe.method,
        recipe=asked.recipe.key,
        experts=asked.experts,
        active_experts=asked.active_experts,
        sparsity=asked.sparsity,
        seq_len=asked.seq_len,
        batch_size=batch_size,
        tokens_per_query=sized.tokens,
        outcome=use.outcome,
        max_batch_size=sized.largest,
        max_batch_size_interval=_batches(cell, gpu, limit, sized.largest, question.batch_limit),
        peak_gib=needed.peak_allocated_bytes / GIB,
        peak_gib_interval=_around(needed.peak_allocated_bytes / GIB, MEMORY_ERROR),
        reserved_gib=needed.peak_reserved_bytes / GIB,
        usable_gib=limit / GIB,
        routed_peak_gib=_spread(sized.routed, gpu, batch_size),
        price=price,
        no_price=reason,
        fidelity=Fidelity.APPROXIMATE if approximate else Fidelity.REPRODUCED,
        approximations=approximate,
        constants=constants.source,
        **({} if step is None else _speed(question, sized, constants, step)),
    )
    return Estimated(told, cell, gpu, step)


def _speed(
    question: Question, sized: _Sized, constants: Constants, step: StepTime
) -> dict[str, Any]:
    # A packed row has several queries.
    queries = sized.batch_size * question.workload.queries / rows(question.workload)
    seconds = _around(step.seconds, constants.error, constants.error_above)
    batch_size = sized.batch_size
    return {
        "step_seconds": step.seconds,
        "step_seconds_interval": seconds,
        "tokens_per_second": batch_size * sized.tokens / step.seconds,
        "queries_per_second": queries / step.seconds,
        "queries_per_second_interval": Interval(
            low=queries / seconds.high, high=queries / seconds.low
        ),
    }


def _price(
    question: Question,
    offers: Sequence[Offer],
    batch_size: int,
    step: StepTime,
    constants: Constants,
) -> tuple[Price | None, str | None]:
    """The job on the cheapest of a GPU's offers that are wanted; else why there is none."""
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
        return min(kept, key=lambda price: price.usd), None
    if not prices:
        return None, "no offer of it is wanted" if offers else "the catalog has no offer of it"
    quickest = min(price.hours for price in prices)
    missed = too_late_or_dear(wanted, quickest, min(price.usd for price in prices))
    return None, f"the job {missed}"


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
    """The largest batches if every need were as far off as it may be, either way."""
    fewer, more = (
        cell.largest_batch(gpu, round(limit * factor), batch_limit)
        for factor in (1 / (1 + MEMORY_ERROR), 1 + MEMORY_ERROR)
    )
    return Interval(low=min(fewer, largest), high=max(more, largest))


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
