"""Ranking of all offers of a sweep's GPUs for one job. Pure."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fitting.families.cell_step_time import Batch
from fitting.numerics.value_of_information import INDIFFERENCE
from gpu_catalog.offer import TERMS, Offer
from orchestrator.pricing.host_memory import host_memory_gib
from orchestrator.pricing.offer_constraints import Constraints
from orchestrator.ranking.exclusions import excluded
from orchestrator.ranking.job_lengths import of_like_lengths
from orchestrator.ranking.priced_cells import RankingInputs, priced_cells
from orchestrator.ranking.priced_job import PricedOffer, RentedJob
from orchestrator.ranking.ranked_offer import (
    Excluded,
    LeftOutInstances,
    RankedOffer,
    Ranking,
    comparable,
)
from trials.records.cell import Cell
from trials.records.observation import SIMULATED, Observation

FAR = 4.0  # standard deviations that no draw of ``DRAWS`` is likely to be off
TIED = 0.05  # probability of costing about as little as the cheapest that makes an offer tied


def rank(inputs: RankingInputs) -> Ranking:
    """Rank the job on every offer of every cell, the best first among comparable cells.

    A cell with a price that the constraints allow is ranked; any other is excluded with a reason.
    """
    place = {cell: number for number, cell in enumerate(inputs.cells)}
    excluded_cells: list[Excluded] = []
    left_out: list[LeftOutInstances] = []
    groups: list[tuple[int, list[RankedOffer], list[Excluded]]] = []
    # Draws of a group take megabytes, so each group is ranked before the next one is priced.
    for _, group in itertools.groupby(priced_cells(inputs), lambda priced: comparable(priced.cell)):
        kept: list[PricedOffer] = []
        for priced in group:
            refuse = inputs.constraints.refuse
            allowed = [p for p in priced.offers if not refuse(p.rented.hours, p.usd)]
            kept += allowed
            if not allowed:
                excluded_cells.append(excluded(priced, inputs))
            elif short := priced.too_little_host_memory:
                left_out.append(LeftOutInstances(cell=priced.cell, instances=short))
        if kept:
            alike, others = of_like_lengths(inputs.job, kept)
            ranked = _best_first(ordered_offers(alike, inputs.batch), inputs.constraints)
            groups.append((min(place[p.rented.job.cell] for p in kept), ranked, others))
    groups.sort(key=lambda group: group[0])
    excluded_cells.sort(key=lambda row: place[row.cell])
    job, learned = inputs.job, inputs.known_epochs
    if learned:
        job = job.model_copy(update={"epochs": max(row.epochs for row in learned)})
    return Ranking(
        workload=job,
        priced_on=inputs.today,
        constraints=inputs.constraints,
        learned=tuple(dict.fromkeys(learned)),
        offers=tuple(offer for _, ranked, _ in groups for offer in ranked),
        too_little_host_memory=tuple(left_out),
        excluded=(*excluded_cells, *(row for _, _, others in groups for row in others)),
    )


def _best_first(offers: Iterable[RankedOffer], wanted: Constraints) -> list[RankedOffer]:
    """Offers of comparable cells in the order of the objective, and numbered in it."""
    if wanted.objective != "time":
        return list(offers)
    ordered = sorted(offers, key=lambda row: (row.hours, row.rank))
    return [row.model_copy(update={"rank": n}) for n, row in enumerate(ordered, start=1)]


@dataclass(frozen=True, slots=True)
class _Odds:
    """Probability that an offer is the cheapest, and that it costs about as little."""

    cheapest: float = 0.0
    near: float = 0.0


NO_CHANCE = _Odds()


def ordered_offers(group: Sequence[PricedOffer], batch: Batch) -> Iterator[RankedOffer]:
    """Offers of comparable cells, cheapest first."""
    # At the same cost, a measured cell precedes a simulated one.
    ordered = sorted(group, key=lambda p: (p.usd, p.rented.job.basis is SIMULATED, p.rented.hours))
    odds = _odds(ordered)
    of_jobs: dict[int, dict[str, object]] = {}
    fastest, last = math.inf, (math.inf, math.inf)
    for rank_, priced in enumerate(ordered, start=1):
        rented, chances = priced.rented, odds.get(id(priced), NO_CHANCE)
        if id(rented) not in of_jobs:
            of_jobs[id(rented)] = _of_job(rented, batch)
        usd_low, usd_high = priced.usd_interval
        row = {
            **of_jobs[id(rented)],
            **_of_offer(priced.offer),
            "rank": rank_,
            "probability_cheapest": chances.cheapest,
            "tied": rank_ == 1 or chances.near >= TIED,
            "pareto": rented.hours < fastest or (rented.hours, priced.usd) == last,
            "usd": priced.usd,
            "usd_low": usd_low,
            "usd_high": usd_high,
        }
        yield RankedOffer.of_checked(row)
        if rented.hours < fastest:
            fastest, last = rented.hours, (rented.hours, priced.usd)


@lru_cache(maxsize=4096)  # each offer is on many rows
def _of_offer(offer: Offer) -> dict[str, object]:
    terms = {name: getattr(offer, name) for name in TERMS}
    return {
        **terms,
        "price_as_of": offer.as_of,
        "price_recorded": offer.recorded,
        "host_memory_gib": host_memory_gib(offer),
    }


def _of_job(rented: RentedJob, batch: Batch) -> dict[str, object]:
    """Every field of a row, in their order; None for those that depend on the offer."""
    job, step = rented.job, rented.job.step_time
    largest, miss = job.largest or (None, None)
    return dict.fromkeys(RankedOffer.model_fields) | {
        "cell": job.cell,
        "stack": job.stack,
        "host_gib": job.host_gib,
        "batch_size": step.batch_size,
        "batch": batch if isinstance(batch, str) else "asked",
        "largest_batch": largest,
        "limited_by": None if largest is None else _limit_reason(job.cell, largest, miss),
        "examples_per_second": job.cell.examples_per_second(step.batch_size, step.seconds),
        "epochs": job.job.epochs,
        "tokens_per_example": step.tokens or float(job.cell.seq_len),
        "as_if_full": job.job.lengths is not None and step.tokens is None,
        "hours": rented.hours,
        "hours_low": rented.low,
        "hours_high": rented.high,
        "own_error_share": job.own_error_share,
        "startup_minutes": job.job.overheads.expected_startup_minutes,
        "checkpoint_seconds": job.job.overheads.expected_checkpoint_seconds,
        "checkpoint_minutes": rented.checkpoint_minutes,
        "basis": job.basis,
        "source": step.source,
        "law": step.law,
        "length_error": step.length_error,
        "extrapolated": step.extrapolated,
    }


def _limit_reason(cell: Cell, largest: int, miss: Observation | None) -> str:
    """Reason why the largest batch is not larger."""
    if miss is None:
        return f"the {cell.limit_name(largest)}"
    return f"{miss.outcome} at {miss.batch_size}{' with drawn lengths' if miss.is_drawn else ''}"


def _odds(ordered: Sequence[PricedOffer]) -> dict[int, _Odds]:
    """Odds of offers by their id, from draws of their costs; absent where they are zero.

    Offers of one job on one GPU are equally fast. One that costs more than the cheapest of them by
    more than ``INDIFFERENCE`` in every draw can never win, so it is skipped.

    Args:
        ordered: offers of comparable cells, cheapest first.
    """
    cheapest_of_job: dict[int, PricedOffer] = {}
    for priced in ordered:
        if id(priced.rented) in cheapest_of_job:
            continue
        # Costs are proportional to prices only where the billed hours are those of the job.
        drawn = priced.rented.drawn
        if (priced.price.billing.charged(drawn) <= drawn).all():
            cheapest_of_job[id(priced.rented)] = priced
    close = [p for p in ordered if _can_win(p, cheapest_of_job.get(id(p.rented)))]
    usd = np.stack([priced.drawn_usd for priced in close])
    best = usd.min(axis=0)
    cheapest = (usd <= best).mean(axis=1)
    near = (usd <= best * (1 + INDIFFERENCE)).mean(axis=1)
    return {
        id(priced): _Odds(*chances)
        for priced, *chances in zip(close, cheapest.tolist(), near.tolist(), strict=True)
    }


def _can_win(priced: PricedOffer, cheapest_of_job: PricedOffer | None) -> bool:
    """Whether an offer may cost about as little as the cheapest one of the same job."""
    if cheapest_of_job is None or priced is cheapest_of_job:
        return True
    apart = FAR * math.hypot(priced.price.sigma, cheapest_of_job.price.sigma)
    limit = cheapest_of_job.offer.usd_per_hour * (1 + INDIFFERENCE) * math.exp(apart)
    return priced.offer.usd_per_hour <= limit
