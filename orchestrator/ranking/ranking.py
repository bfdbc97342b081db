"""What a job costs on every offer, how sure that is, and which is the cheapest. Pure."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import date

import numpy as np

from fitting.families.cell_step_time import Batch, step_times, visit_spread
from fitting.families.records import FamilyFit
from fitting.numerics.value_of_information import ALIKE
from gpu_catalog.catalog import Catalog
from orchestrator.planning.plan import Plan
from orchestrator.pricing.offer_constraints import Constraints, MissedConstraints
from orchestrator.pricing.price_drift import PriceDrift
from orchestrator.pricing.rental_cost import charged_hours
from orchestrator.ranking.epochs_needed import LearnedEpochs
from orchestrator.ranking.exclusions import (
    limit_reason,
    of_like_lengths,
    padding,
    too_long,
    why_not,
)
from orchestrator.ranking.priced_job import DRAWS, CellJob, PricedOffer
from orchestrator.ranking.ranked_offer import Excluded, RankedOffer, Ranking, comparable
from orchestrator.spec.job import NO_OVERHEADS, Job, Overheads
from orchestrator.spec.job_tokens import rows
from trials.records.cell import Cell
from trials.records.observation import Basis, Observation, by_cell, largest_batch

FAR = 4.0  # standard deviations that no draw of ``DRAWS`` is likely to be off
TIED = 0.05  # as likely as this to be the cheapest, and an offer is not told apart from it


def overheads_text(overheads: Overheads) -> str:
    """What is assumed of a job beside its steps, in words."""
    if overheads == NO_OVERHEADS:
        return ""
    return (
        f", {overheads.startup_minutes:g} min of start-up, checkpoints of "
        f"{overheads.checkpoint_seconds:g} s, spot instances taken away "
        f"{overheads.interruptions_per_day:g} times a day (assumed, not measured)"
    )


def rank(  # noqa: PLR0913 - what a ranking is made from
    workload: Job,
    catalog: Catalog,
    plan: Plan,
    observations: Sequence[Observation],
    families: Sequence[FamilyFit],
    *,
    batch: Batch | None = None,
    constraints: Constraints | None = None,
    today: date | None = None,
    learned: Mapping[Cell, LearnedEpochs | str] | None = None,
    seed: int = 0,
) -> Ranking:
    """Prices a job on every offer of every measured cell's GPU.

    Coefficients belong to a stack: a cell measured with two is ranked once for each. So is one that
    was both measured and simulated. Families are asked only about a batch size nobody measured.

    What is not known is drawn, ``DRAWS`` times: how far each cell's step time is off, how far all
    simulated ones are off together, which moves all of them and hardly their order, and how far
    each price has moved since it was noted.

    Args:
        workload: the job.
        catalog: offers.
        plan: which cells there are.
        observations: what is known of them.
        families: the laws that may speak of them.
        batch: which batch size to run at; absent for the workload's, or the fastest.
        constraints: what an offer must be; absent for anything.
        today: the day that prices have moved until; absent to take them as quoted.
        learned: the epochs of each cell, or why they are not known; absent for the workload's.
        seed: of the draws.
    """
    constraints = constraints or Constraints()
    drift = PriceDrift(workload.overheads, today, seed, DRAWS)
    batch = batch or workload.batch_size or "fastest"
    seen = by_cell(observations)
    spread = visit_spread(observations)
    shared = np.random.default_rng(seed).standard_normal(DRAWS)
    skipped = {skip.cell: skip.reason for skip in plan.skipped}
    given_up = {gone.cell: gone.reason for gone in plan.given_up}
    groups: dict[tuple[object, ...], list[PricedOffer]] = defaultdict(list)
    excluded: list[Excluded] = []
    cells = (*plan.complete, *plan.pending, *skipped)
    for cell in cells:
        mine = seen.get(cell, [])
        offers = catalog.offers(cell.gpu)
        wanted = [offer for offer in offers if constraints.allows(offer)]
        told = None if learned is None else learned[cell]
        misfit = too_long(workload, cell, cells) or (told if isinstance(told, str) else None)
        job = workload
        if isinstance(told, LearnedEpochs):
            job = workload.model_copy(update={"epochs": told.epochs})
        times = (
            {}
            if misfit is not None
            else step_times(
                batch,
                cell,
                mine,
                families,
                spread,
                rows(workload),
                padding(workload, cell),
            )
        )
        known = largest_batch(mine)
        priced = [
            each
            for (stack, basis), step_time in times.items()
            for each in CellJob(job, cell, stack, basis, step_time, known).on(
                wanted, shared, drift, seed
            )
        ]
        kept = [p for p in priced if not constraints.refuse(p.rented.hours, p.usd)]
        if kept:
            groups[comparable(cell)] += kept
            continue
        known_reason = skipped.get(cell) or misfit or given_up.get(cell)
        reason = known_reason or why_not(batch, cell, mine, priced=bool(offers))
        missed = MissedConstraints.best_of((each.rented.hours, each.usd) for each in priced)
        if missed is not None:
            reason = missed.text(constraints)
        elif times and offers:
            unwanted = f"none of its {len(offers)} offers"
            reason = f"{unwanted} is of the providers, regions and kind asked for"
        excluded.append(Excluded(cell=cell, reason=reason, missed=missed))
    ranked: list[RankedOffer] = []
    for group in groups.values():
        alike, others = of_like_lengths(workload, group)
        ranked += _ranked(alike, batch)
        excluded += others
    known_epochs = [each for each in (learned or {}).values() if isinstance(each, LearnedEpochs)]
    if known_epochs:
        most = max(each.epochs for each in known_epochs)
        workload = workload.model_copy(update={"epochs": most})
    return Ranking(
        workload=workload,
        priced_on=today,
        constraints=constraints,
        learned=tuple(dict.fromkeys(known_epochs)),
        offers=tuple(ranked),
        excluded=tuple(excluded),
    )


def _ranked(group: Sequence[PricedOffer], batch: Batch) -> Iterator[RankedOffer]:
    """The offers of comparable cells, cheapest first."""
    # What was measured before what was simulated, where they cost the same.
    ordered = sorted(
        group, key=lambda p: (p.usd, p.rented.job.basis is Basis.SIMULATED, p.rented.hours)
    )
    odds = _odds(ordered)
    quickest, last = np.inf, (np.inf, np.inf)
    for number, priced in enumerate(ordered, start=1):
        rented, offer = priced.rented, priced.offer
        job, step = rented.job, rented.job.step_time
        cheapest, near = odds.get(id(priced), (0.0, 0.0))
        usd_low, usd_high = priced.usd_interval
        yield RankedOffer(
            rank=number,
            probability_cheapest=cheapest,
            tied=number == 1 or near >= TIED,
            pareto=rented.hours < quickest or (rented.hours, priced.usd) == last,
            cell=job.cell,
            stack=job.stack,
            provider=offer.provider,
            instance=offer.instance,
            region=offer.region,
            market=offer.market,
            gpus_per_instance=offer.gpus_per_instance,
            usd_per_hour=offer.usd_per_hour,
            price_as_of=offer.as_of,
            price_recorded=offer.recorded,
            batch_size=step.batch_size,
            batch=batch if isinstance(batch, str) else "asked",
            largest_batch=None if priced.known is None else priced.known[0],
            limited_by=None if priced.known is None else limit_reason(priced.known[1]),
            examples_per_second=step.batch_size / step.seconds,
            epochs=job.workload.epochs,
            tokens_per_example=step.tokens or float(job.cell.seq_len),
            as_if_full=job.workload.lengths is not None and step.tokens is None,
            hours=rented.hours,
            hours_low=rented.low,
            hours_high=rented.high,
            usd=priced.usd,
            usd_low=usd_low,
            usd_high=usd_high,
            checkpoint_minutes=rented.checkpoint_minutes,
            basis=job.basis,
            source=step.source,
            law=step.law,
            length_error=step.length_error,
            extrapolated=step.extrapolated,
        )
        if rented.hours < quickest:
            quickest, last = rented.hours, (rented.hours, priced.usd)


def _odds(group: Sequence[PricedOffer]) -> dict[int, tuple[float, float]]:
    """How likely each offer is the cheapest, and how likely about as cheap, by its id.

    One that another offer of the same job undercuts by more than ``ALIKE`` in every draw is neither
    ever, and left out: of one GPU all are as fast.
    """
    least: dict[int, PricedOffer] = {}
    for priced in group:  # the cheapest first
        rented = priced.rented
        if charged_hours(0.0, priced.offer.minimum_minutes) <= rented.drawn.min():
            least.setdefault(id(rented), priced)
    close = [priced for priced in group if _can_win(priced, least.get(id(priced.rented)))]
    usd = np.stack([priced.drawn_usd for priced in close])
    best = usd.min(axis=0)
    cheapest = (usd <= best).mean(axis=1)
    near = (usd <= best * (1 + ALIKE)).mean(axis=1)
    return {
        id(priced): (float(first), float(tied))
        for priced, first, tied in zip(close, cheapest, near, strict=True)
    }


def _can_win(priced: PricedOffer, least: PricedOffer | None) -> bool:
    """Whether an offer may be about as cheap as the one of the same job with the lowest price."""
    if least is None or priced is least:
        return True
    apart = FAR * math.hypot(priced.price_sigma, least.price_sigma)
    return priced.offer.usd_per_hour <= least.offer.usd_per_hour * (1 + ALIKE) * math.exp(apart)
