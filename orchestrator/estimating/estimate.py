"""What a GPU nobody has here would take for a job: memory, largest batch, time, money."""

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from fitting.laws.fit_result import Interval
from fitting.numerics.arrays import FloatArray
from gpu_catalog.catalog import Catalog
from gpu_catalog.gpu import Gpu
from gpu_catalog.offer import Offer
from orchestrator.estimating.batch_choice import (
    BatchCandidates,
    ChosenBatch,
    at_lengths,
    sized,
    taken,
)
from orchestrator.estimating.estimate_records import BatchChoice, Estimate, Estimated, Price
from orchestrator.estimating.question import Question
from orchestrator.pricing.offer_constraints import MissedConstraints
from orchestrator.pricing.price_drift import widened
from orchestrator.pricing.rental_cost import charged_hours, rental
from orchestrator.ranking.priced_job import job_hours
from orchestrator.spec.job_tokens import rows
from trials.records.observation import Outcome
from trials.records.recipe import Recipe
from trials.simulation.simulated_cell import GIB, SimulatedCell
from trials.simulation.simulated_prober import usable_bytes
from trials.simulation.timing_model import EfficiencyConstants, NoSpeedError, SimulatedStepTime
from trials.simulation.trace_cache import Traces
from trials.simulation.trace_request import SMALLEST, Fidelity, Routing, approximations

# The worst that a prototype's peaks were off, of dozens of published single-GPU runs.
MEMORY_ERROR = 0.06

DRAWN_SIGMA = 0.2  # spread of experts' shares (of the logarithm) that published runs agree with


def estimates(
    question: Question,
    gpus: Sequence[Gpu],
    catalog: Catalog,
    constants: EfficiencyConstants,
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
    speed = told.examples_per_second or 0.0
    return (price is None, 0.0 if price is None else price.usd, -speed)


def _estimated(
    question: Question,
    each: BatchCandidates,
    catalog: Catalog,
    constants: EfficiencyConstants,
    batch: ChosenBatch,
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
        tokens_per_example=batch.tokens,
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


def _which(question: Question, batch: ChosenBatch) -> BatchChoice:
    if isinstance(question.batch, int):
        return "asked"
    return "fastest" if batch.hours else "largest"


def _speed(
    question: Question, batch: ChosenBatch, constants: EfficiencyConstants, step: SimulatedStepTime
) -> dict[str, Any]:
    # A packed row has several examples.
    examples = batch.size * question.workload.examples / rows(question.workload)
    seconds = _around(step.seconds, constants.error, constants.error_above)
    return {
        "step_seconds": step.seconds,
        "step_seconds_interval": seconds,
        "tokens_per_second": batch.size * batch.tokens / step.seconds,
        "examples_per_second": examples / step.seconds,
        "examples_per_second_interval": Interval(
            low=examples / seconds.high, high=examples / seconds.low
        ),
    }


def _job(
    question: Question,
    offers: Sequence[Offer],
    batch_size: int,
    step: SimulatedStepTime,
    constants: EfficiencyConstants,
) -> tuple[dict[str, Any], MissedConstraints | None]:
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
    missed = MissedConstraints.best_of((price.hours, price.usd) for price in prices)
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
