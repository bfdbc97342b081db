"""Estimate of a job on a GPU that is not at hand: memory, largest batch, time, dollars."""

import contextlib
import os
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np

from fitting.laws.fit_result import Interval
from fitting.numerics.arrays import FloatArray
from gpu_catalog.catalog import Catalog
from gpu_catalog.gpu import Gpu
from gpu_catalog.offer import TERMS, Offer
from orchestrator.estimating.batch_choice import (
    BatchCandidates,
    ChosenBatch,
    SimulationKey,
    at_lengths,
    batch_candidates,
    choose_batch,
    simulation_key,
    simulations,
)
from orchestrator.estimating.estimate_records import BatchChoice, Estimate, Estimated, Price
from orchestrator.estimating.longest_sequence import most_tokens
from orchestrator.estimating.memory_error import LengthKind, not_compared, published_errors
from orchestrator.estimating.question import EstimatedJob, Question
from orchestrator.pricing.host_memory import (
    OffersByHost,
    allowed_instances,
    host_memory_gib,
    none_has_enough,
)
from orchestrator.pricing.offer_constraints import MissedConstraints
from orchestrator.pricing.price_drift import sigma_of, widened
from orchestrator.pricing.rental_cost import charged_hours, rental
from orchestrator.pricing.transfer_times import with_transfer_times
from orchestrator.ranking.priced_job import job_hours
from orchestrator.spec.job import Job
from orchestrator.spec.job_tokens import rows
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell
from trials.records.observation import Outcome
from trials.simulation.length_traces import TraceSource
from trials.simulation.ranks.rank_links import layout_notes
from trials.simulation.simulated_cell import GIB, SimulatedCell, host_gib, model_parameters
from trials.simulation.simulated_prober import paged_notes, usable_bytes
from trials.simulation.timing_model import EfficiencyConstants, NoSpeedError, SimulatedStepTime
from trials.simulation.trace_request import SMALLEST, Fidelity, approximations
from trials.simulation.varying_lengths import RunsMemory
from trials.thread_pool import thread_pool

CELL_FIELDS = {"model", "experts", "active_experts", "seq_len", "image_tokens"}


def estimates(
    jobs: Sequence[EstimatedJob],
    catalog: Catalog,
    constants: EfficiencyConstants,
    traces: TraceSource,
) -> list[Estimated]:
    """Estimate each job on its GPU, in their order.

    Simulations are priced side by side, each by one thread: most of their time passes in numpy and
    compiled replays.

    Raises:
        TraceError: the model cannot be traced under a recipe.
    """
    shared = simulations(jobs, traces)
    numbers: defaultdict[SimulationKey, list[int]] = defaultdict(list)
    for number, job in enumerate(jobs):
        numbers[simulation_key(*job)].append(number)

    def candidates(key: SimulationKey) -> list[BatchCandidates]:
        return [batch_candidates(*jobs[n], shared[key]) for n in numbers[key]]

    def estimated(rows: Sequence[BatchCandidates]) -> list[Estimated]:
        chosen = ((row, choose_batch(row, timed, constants)) for row in rows)
        return [_estimated(row, catalog, constants, batch) for row, batch in chosen]

    with thread_pool(len(os.sched_getaffinity(0))) as cores:
        to_price = list(cores.map(candidates, numbers))
        timed = at_lengths(list(chain.from_iterable(to_price)), traces)
        priced = list(chain.from_iterable(cores.map(estimated, to_price)))
    order = chain.from_iterable(numbers.values())
    return [row for _, row in sorted(zip(order, priced, strict=True), key=itemgetter(0))]


def by_objective(estimated: Estimated) -> tuple[int, bool, float, float]:
    """Order of estimates: by length, the best offer first, then those without a price by speed."""
    estimate = estimated.estimate
    price, speed = estimate.price, estimate.examples_per_second or 0.0
    if price is None:
        return (-estimate.seq_len, True, -speed, 0.0)
    wanted = estimated.question.constraints
    return (-estimate.seq_len, False, *wanted.preference(price.hours, price.usd))


def _approximations(
    candidates: BatchCandidates, requested: Cell, constants: EfficiencyConstants, batch_size: int
) -> tuple[str, ...]:
    """Differences between what is simulated and what would run, those of its links first."""
    question, gpu = candidates.question, candidates.gpu
    is_padded = candidates.cells.varying is not None
    of_step = approximations(requested, question.model, gpu, is_padded=is_padded)
    of_step += tuple(paged_notes(candidates.cells.own, gpu, batch_size))
    if requested.parallel is None:
        return of_step
    return (*layout_notes(gpu, requested.parallel, constants.links), *of_step)


def _estimated(
    candidates: BatchCandidates,
    catalog: Catalog,
    constants: EfficiencyConstants,
    batch: ChosenBatch,
) -> Estimated:
    """Estimate of a batch: memory at the longest rows, time at the mean padded length."""
    question, gpu = candidates.question, candidates.gpu
    cell, varying = candidates.cells.own, candidates.cells.varying
    limit = usable_bytes(gpu, cell.recipe)
    outcome = _outcome(candidates, batch.size, limit)
    needed = cell.without_limit(batch.size, gpu)  # whether or not the GPU has as much
    step = None
    if outcome is Outcome.FITS:
        with contextlib.suppress(NoSpeedError):
            step = batch.timed.step_time(batch.size, gpu, constants)
    requested = question.cell(gpu)
    approximate = _approximations(candidates, requested, constants, batch.size)
    on_host = host_gib(cell, batch.size, limit)
    job = _with_times(question, requested.recipe, cell)
    timed: dict[str, Any] = {}
    missed: MissedConstraints | None = None
    prices: tuple[Price, ...] = ()
    if step is not None:
        seconds = _around(step, constants, question.workload.length_error)
        offers = question.offers_of(gpu, catalog, on_host)
        timed, missed, prices = _job(question, job, offers, _hours(question, batch, step, seconds))
        timed |= _speed(question, batch, step.seconds, seconds)
    peak_gib = needed.peak_allocated_bytes / GIB
    kind: LengthKind = "constant" if varying is None else "varying"
    memory_error = published_errors().interval(requested.recipe.method, kind)
    length_error = _memory_length_error(question, cell, needed.peak_allocated_bytes)
    limits = _wider(limit, memory_error.limits(limit), length_error)
    estimate = Estimate(
        **requested.model_dump(include=CELL_FIELDS),
        **_layout(question, gpu, step),
        method=requested.recipe.method,
        recipe=requested.recipe.key,
        sparsity=requested.sparsity,
        **_priced_job(question, job, requested, batch),
        outcome=outcome,
        max_batch_size=candidates.largest,
        batch_limit=question.batch_limit,
        seq_len_limit=most_tokens(question.model) if question.finds_seq_len else None,
        max_batch_size_interval=_batches(
            cell, gpu, limits, candidates.largest, question.batch_limit
        ),
        peak_gib=peak_gib,
        peak_gib_interval=_wider(peak_gib, memory_error.around(peak_gib), length_error),
        reserved_gib=needed.peak_reserved_bytes / GIB,
        surviving_batch_size=candidates.surviving,
        survives_surely=_survives(candidates, batch.size, limits.low, outcome),
        varying_reserved_gib=None if varying is None else _of_runs(varying.memory(batch.size, gpu)),
        usable_gib=limit / GIB,
        host_gib=on_host,
        routed_peak_gib=_spread(candidates.cells.routed, gpu, batch.size),
        fidelity=Fidelity.APPROXIMATE if approximate else Fidelity.REPRODUCED,
        approximations=approximate,
        constants=constants.source,
        left_out=requested.recipe.left_out,
        memory_error=memory_error,
        time_error=None if step is None else constants.measured_error(step),
        not_compared=not_compared(requested),
        options=question.options_text() or None,
        **timed,
    )
    return Estimated(estimate, question, cell, varying, gpu, step, batch.hours, missed, prices)


def _with_times(question: Question, recipe: Recipe, cell: SimulatedCell) -> Job:
    """The job, with start-up and checkpoints by the size of its model."""
    counts, layout = model_parameters(cell), question.parallel
    return with_transfer_times(question.workload, recipe, counts, layout, is_own=question.is_own)


def _priced_job(question: Question, job: Job, cell: Cell, batch: ChosenBatch) -> dict[str, Any]:
    """Fields of the job, and of the batch that it is priced at."""
    is_assumed = question.assumes_batch
    micro_batches = cell.rank_recipe.micro_batches(batch.size)
    return {
        **{name: getattr(job, name) for name in ("examples", "epochs", "overheads")},
        "assumed": (*question.by_default, *["--effective-batch"] * is_assumed),
        "batch_size": batch.size,
        "micro_batches": micro_batches,
        "effective_batch": batch.size * micro_batches * question.data_parallel_ranks,
        "batch": _batch_choice(question, batch),
        "tokens_per_example": batch.tokens,
        "examples_per_row": job.examples / rows(job),
    }


def _batch_choice(question: Question, batch: ChosenBatch) -> BatchChoice:
    if isinstance(question.batch, int):
        return "asked"
    return "fastest" if batch.hours else "largest"


def _layout(question: Question, gpu: Gpu, step: SimulatedStepTime | None) -> dict[str, Any]:
    """Fields of the GPUs that train together."""
    is_own, layout = question.is_own, question.parallel
    if layout is None:
        return {"gpu": gpu.key, "is_own": is_own}
    return {
        "gpu": layout.counted(gpu.key),
        "is_own": is_own,
        **layout.model_dump(
            include={
                *("gpus", "strategy", "replicas", "degree"),
                *("nodes", "node_network_gbps", "rdma", "interconnect"),
            }
        ),
        "exposed_seconds": None if step is None else step.exposed_seconds,
    }


def _outcome(candidates: BatchCandidates, batch_size: int, limit: int) -> Outcome:
    """Outcome of a batch size: of a step at the longest rows, then of runs of varying length."""
    gpu, cells = candidates.gpu, candidates.cells
    outcome = cells.own.memory(batch_size, gpu, limit).outcome
    if cells.varying is None or outcome is not Outcome.FITS:
        return outcome
    survives = cells.varying.survives(batch_size, gpu, limit)
    return Outcome.FITS if survives else Outcome.OUT_OF_MEMORY


def _survives(row: BatchCandidates, size: int, limit: float, outcome: Outcome) -> bool | None:
    """Whether a batch that fits also survives below another limit; None where lengths are one."""
    varying = row.cells.varying
    if varying is None:
        return None
    return outcome is Outcome.FITS and varying.survives(size, row.gpu, round(limit))


def _speed(
    question: Question, batch: ChosenBatch, seconds: float, interval: Interval
) -> dict[str, Any]:
    rows_per_step = (
        question.rank_recipe.micro_batches(batch.size) * batch.size * question.data_parallel_ranks
    )
    examples = rows_per_step * question.workload.examples / rows(question.workload)
    rates = Interval(low=examples / interval.high, high=examples / interval.low)
    return {
        "step_seconds": seconds,
        "step_seconds_interval": interval,
        "tokens_per_second": rows_per_step * question.recipe.sequences * batch.tokens / seconds,
        "examples_per_second": examples / seconds,
        "examples_per_second_interval": rates,
    }


def _hours(
    question: Question, batch: ChosenBatch, step: SimulatedStepTime, interval: Interval
) -> FloatArray:
    """(3,) hours of the job's steps, expected and at the ends of the interval of a step."""
    step_seconds = np.array([step.seconds, interval.low, interval.high])
    # Micro-batches of all GPUs, which run at the same time.
    micro_batches = question.rank_recipe.micro_batches(batch.size) * question.data_parallel_ranks
    return job_hours(question.workload, batch.size, 1.0) * step_seconds / micro_batches


def _job(
    question: Question, job: Job, offers: OffersByHost, steps_hours: FloatArray
) -> tuple[dict[str, Any], MissedConstraints | None, tuple[Price, ...]]:
    """Fields of the job on the best allowed offer, or else its hours and the reason.

    The allowed offers follow, the best first.

    Args:
        question: the question.
        job: its job, with start-up and checkpoints by the size of the model.
        offers: offers with enough GPUs.
        steps_hours: (3,) hours of the steps, as of ``_hours``.
    """
    overheads = job.on_nodes(question.nodes).overheads
    rented = {spot: rental(steps_hours, overheads, spot=spot).hours for spot in (False, True)}
    wanted, (enough, too_small) = question.constraints, offers
    prices = [
        _priced(offer, rented[offer.market == "spot"], question)
        for offer in filter(question.allows, enough)
    ]
    short = allowed_instances(too_small, question.allows)
    kept = [price for price in prices if not wanted.refuse(price.hours, price.usd)]
    if kept:
        best, *_ = kept = sorted(kept, key=lambda p: wanted.preference(p.hours, p.usd))
        fields = {"price": best, "hours": best.hours, "hours_interval": best.hours_interval}
        return fields | {"too_little_host_memory": short}, None, tuple(kept)
    hours, low, high = map(float, rented[False])
    missed = MissedConstraints.best_of((price.hours, price.usd) for price in prices)
    if missed is not None:
        reason = f"the job {missed.text(wanted)}"
    elif short:
        reason = none_has_enough(short)
    elif enough or too_small:
        reason = "the constraints allow none of its offers"
    else:
        per_node = question.ranks // question.nodes
        several = f" with {per_node} GPUs in an instance" if per_node > 1 else ""
        reason = f"the catalog has no offer of it{several}"
    unpriced = {"no_price": reason, "hours": hours, "hours_interval": Interval(low=low, high=high)}
    return unpriced | {"too_little_host_memory": short}, missed, ()


def _priced(offer: Offer, rented: FloatArray, question: Question) -> Price:
    """Price of a job on an offer, for (3,) expected hours and the ends of their interval."""
    hours, low, high = map(float, rented)
    usd, usd_low, usd_high = map(float, charged_hours(rented, offer) * offer.usd_per_hour)
    usd_low, usd_high = widened(usd, usd_low, usd_high, question.drift.sigma(offer))
    return Price(
        **offer.model_dump(include={*TERMS, "note"}),
        price_as_of=offer.as_of,
        price_recorded=offer.recorded,
        instances=question.nodes,
        host_memory_gib=host_memory_gib(offer),
        hours=hours,
        hours_interval=Interval(low=low, high=high),
        usd=usd,
        usd_interval=Interval(low=usd_low, high=usd_high),
    )


def _around(
    step: SimulatedStepTime, constants: EfficiencyConstants, length_error: float
) -> Interval:
    low, high = constants.interval(step)
    return _wider(step.seconds, Interval(low=low, high=high), length_error)


def _wider(value: float, interval: Interval, error: float) -> Interval:
    """Interval with a further, independent relative error."""
    low, high = widened(value, interval.low, interval.high, sigma_of(error))
    return Interval(low=low, high=high)


def _memory_length_error(question: Question, cell: SimulatedCell, peak_bytes: float) -> float:
    """Relative error of the peak by that of the longest example; the model itself has none.

    Packed and truncated rows have the length that they are given.
    """
    job = question.workload
    if question.recipe.packing or (job.cutoff is not None and question.seq_len >= job.cutoff):
        return 0.0
    dynamic = max(peak_bytes - float(cell.held.sizes.sum()), 0.0)
    return job.length_error * dynamic / peak_bytes


def _of_runs(runs: RunsMemory) -> Interval:
    return Interval(low=runs.quantile(0.05) / GIB, high=runs.quantile(0.95) / GIB)


def _batches(
    cell: SimulatedCell, gpu: Gpu, limits: Interval, largest: int, batch_limit: int
) -> Interval:
    """Interval of the largest batch, by that of the memory.

    Between the smallest batches and the limit, its ends are interpolated between the replays that
    exist, because an interval is not worth further replays.

    Args:
        cell: cell to simulate.
        gpu: GPU whose libraries hold memory.
        limits: bytes that may be predicted where the memory is at either end of its interval.
        largest: largest batch as predicted.
        batch_limit: largest batch size to try.
    """
    least, most = limits.low, limits.high
    if largest < SMALLEST or largest == batch_limit:
        fewer, more = (cell.largest_batch(gpu, round(at), batch_limit) for at in (least, most))
        return Interval(low=min(fewer, largest), high=max(more, largest))
    fewer, more = (cell.roughly_largest(gpu, at, batch_limit, largest) for at in (least, most))
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
