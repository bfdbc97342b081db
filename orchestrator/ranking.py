"""What a job costs on every offer, how sure that is, and which is the cheapest. Pure."""

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date

import numpy as np

from fitting.design import ALIKE
from fitting.family import FamilyFit
from fitting.laws import FloatArray
from gpu_catalog.catalog import Catalog
from gpu_catalog.offer import Offer
from orchestrator.constraints import Constraints, Missed
from orchestrator.cost import (
    NO_OVERHEADS,
    SECONDS_PER_HOUR,
    Overheads,
    charged_hours,
    rental,
)
from orchestrator.learned_epochs import LearnedEpochs
from orchestrator.plan import Plan
from orchestrator.price_drift import PriceDrift, widened
from orchestrator.ranked import Excluded, RankedOffer, Ranking, comparable
from orchestrator.step_seconds import (
    Batch,
    StepTime,
    step_times,
    visit_spread,
)
from orchestrator.sweep import Workload
from orchestrator.workload_tokens import longest_query, longest_tokens, padded_tokens, rows
from trials.observation import Basis, Observation, by_cell, largest_batch
from trials.workload import Cell

DRAWS = 2000  # of what is not known: probabilities are told to about 1 %
FAR = 4.0  # standard deviations that no draw of ``DRAWS`` is likely to be off
TIED = 0.05  # as likely as this to be the cheapest, and an offer is not told apart from it
LOW, HIGH = 5.0, 95.0  # percentiles: the ends of the 90 % intervals


def overheads_text(overheads: Overheads) -> str:
    """What is assumed of a job beside its steps, in words."""
    if overheads == NO_OVERHEADS:
        return ""
    return (
        f", {overheads.startup_minutes:g} min of start-up, checkpoints of "
        f"{overheads.checkpoint_seconds:g} s, spot instances taken away "
        f"{overheads.interruptions_per_day:g} times a day (assumed, not measured)"
    )


def job_hours(workload: Workload, batch_size: int, step_seconds: float) -> float:
    """Hours of the steps: ``rows / batch`` of them in each epoch, but one at least.

    The last of an epoch, where it is smaller, is counted as the part that it is.
    """
    return workload.epochs * max(rows(workload) / batch_size, 1.0) * step_seconds / SECONDS_PER_HOUR


def offer_usd(workload: Workload, steps_hours: FloatArray, offer: Offer) -> float:
    """What so many hours of steps are expected to cost on an offer, all else included."""
    rented = rental(steps_hours, workload.overheads, spot=_is_spot(offer))
    return charged_hours(float(rented.hours[0]), offer.minimum_minutes) * offer.usd_per_hour


def rank(  # noqa: PLR0913 - what a ranking is made from
    workload: Workload,
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
    groups: dict[tuple[object, ...], list[_Priced]] = defaultdict(list)
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
            for each in _Job(job, cell, stack, basis, step_time, known).on(
                wanted, shared, drift, seed
            )
        ]
        kept = [p for p in priced if not constraints.refuse(p.rented.hours, p.usd)]
        if kept:
            groups[comparable(cell)] += kept
            continue
        known_reason = skipped.get(cell) or misfit or given_up.get(cell)
        reason = known_reason or _why_not(batch, cell, mine, priced=bool(offers))
        missed = Missed.best_of((each.rented.hours, each.usd) for each in priced)
        if missed is not None:
            reason = missed.text(constraints)
        elif times and offers:
            unwanted = f"none of its {len(offers)} offers"
            reason = f"{unwanted} is of the providers, regions and kind asked for"
        excluded.append(Excluded(cell=cell, reason=reason, missed=missed))
    ranked: list[RankedOffer] = []
    for group in groups.values():
        alike, others = _of_like_lengths(workload, group)
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


@dataclass(frozen=True, slots=True)
class _Rented:
    """A job on a GPU, on demand or on spot instances, whatever the price.

    Attributes:
        job: of what.
        hours: expected.
        low, high: of the 90 % interval.
        drawn: (draws,) hours.
        checkpoint_minutes: between two.
    """

    job: "_Job"
    hours: float
    low: float
    high: float
    drawn: FloatArray
    checkpoint_minutes: float


@dataclass(frozen=True, slots=True)
class _Priced:
    """A job on one offer, what it costs, and the largest batch of its cell with the miss above."""

    offer: Offer
    rented: _Rented
    usd: float
    known: tuple[int, Observation | None] | None
    drift: PriceDrift

    @property
    def usd_interval(self) -> tuple[float, float]:
        """Nine times in ten."""
        low, high = self._usd_of(self.rented.low), self._usd_of(self.rented.high)
        return widened(self.usd, low, high, self.price_sigma)

    @property
    def price_sigma(self) -> float:
        """How far the price may have moved."""
        return self.drift.sigma(self.offer)

    @property
    def drawn_usd(self) -> FloatArray:
        """(draws,)."""
        least = charged_hours(0.0, self.offer.minimum_minutes)
        usd = np.maximum(self.rented.drawn, least) * self.offer.usd_per_hour
        return np.asarray(usd * np.exp(self.drift.errors(self.offer))) if self.price_sigma else usd

    def _usd_of(self, hours: float) -> float:
        return charged_hours(hours, self.offer.minimum_minutes) * self.offer.usd_per_hour


@dataclass(frozen=True, slots=True)
class _Job:
    """A workload as one cell, whose step time is known."""

    workload: Workload
    cell: Cell
    stack: str
    basis: Basis
    step_time: StepTime
    known: tuple[int, Observation | None] | None

    def on(
        self, offers: Sequence[Offer], shared: FloatArray, drift: PriceDrift, seed: int
    ) -> Iterator[_Priced]:
        """The job on each of these."""
        name = f"{seed}/{self.cell.key}/{self.stack}/{self.basis}"
        random = np.random.default_rng(int(hashlib.sha256(name.encode()).hexdigest()[:15], 16))
        step = self.step_time
        errors = np.concatenate([[0.0], step.doubt.drawn(shared, random)])
        drawn = job_hours(self.workload, step.batch_size, step.seconds) * np.exp(errors)
        rentals = {spot: self._rented(drawn, spot=spot) for spot in {_is_spot(o) for o in offers}}
        for offer in offers:
            rented = rentals[_is_spot(offer)]
            usd = charged_hours(rented.hours, offer.minimum_minutes) * offer.usd_per_hour
            yield _Priced(offer, rented, usd, self.known, drift)

    def _rented(self, drawn: FloatArray, *, spot: bool) -> _Rented:
        told = rental(drawn, self.workload.overheads, spot=spot)
        low, high = np.percentile(told.hours[1:], [LOW, HIGH])
        return _Rented(
            job=self,
            hours=float(told.hours[0]),
            low=float(low),
            high=float(high),
            drawn=told.hours[1:],
            checkpoint_minutes=told.checkpoint_minutes,
        )


def _is_spot(offer: Offer) -> bool:
    return offer.market == "spot"


def _ranked(group: Sequence[_Priced], batch: Batch) -> Iterator[RankedOffer]:
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
            limited_by=None if priced.known is None else _limit_reason(priced.known[1]),
            queries_per_second=step.batch_size / step.seconds,
            epochs=job.workload.epochs,
            tokens_per_query=step.tokens or float(job.cell.seq_len),
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


def _odds(group: Sequence[_Priced]) -> dict[int, tuple[float, float]]:
    """How likely each offer is the cheapest, and how likely about as cheap, by its id.

    One that another offer of the same job undercuts by more than ``ALIKE`` in every draw is neither
    ever, and left out: of one GPU all are as fast.
    """
    least: dict[int, _Priced] = {}
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


def _can_win(priced: _Priced, least: _Priced | None) -> bool:
    """Whether an offer may be about as cheap as the one of the same job with the lowest price."""
    if least is None or priced is least:
        return True
    apart = FAR * math.hypot(priced.price_sigma, least.price_sigma)
    return priced.offer.usd_per_hour <= least.offer.usd_per_hour * (1 + ALIKE) * math.exp(apart)


def padding(workload: Workload, cell: Cell) -> Callable[[int], float] | None:
    """Tokens of a query at a batch size, padding included; None where all have the full length."""
    if workload.lengths is None:
        return None
    return lambda size: min(padded_tokens(workload, size, cell.seq_len), float(cell.seq_len))


def too_long(workload: Workload, cell: Cell, others: Iterable[Cell]) -> str | None:
    """Why a cell's length is none for the job; None where it is.

    Args:
        workload: the job.
        cell: asked about.
        others: all there are: one that differs in its length alone may have the job.
    """
    longest = longest_query(workload)
    if longest is None or longest <= cell.seq_len:
        return None
    long_enough = (
        other.seq_len
        for other in others
        if other.seq_len >= longest and other.model_copy(update={"seq_len": cell.seq_len}) == cell
    )
    length = min(long_enough, default=None)
    remedy = (
        f"--cutoff {cell.seq_len}, or a sweep at {longest_tokens(workload, cell.seq_len)}"
        if length is None
        else f"the cell at {length} is for this job, --cutoff {cell.seq_len} for one of this cell"
    )
    return f"its length is {cell.seq_len}, queries have up to {longest} tokens: {remedy}"


def _of_like_lengths(
    workload: Workload, group: Sequence[_Priced]
) -> tuple[list[_Priced], list[Excluded]]:
    """What of comparable cells is priced at the lengths of the data; the rest would look too dear.

    All of them, at the full length, where no law tells of any.
    """
    at_lengths = [p for p in group if p.rented.job.step_time.tokens is not None]
    if workload.lengths is None or not at_lengths:
        return list(group), []
    kept = {p.rented.job.cell for p in at_lengths}
    reason = "no law tells how long shorter steps take: time more batch sizes, or another length"
    out = dict.fromkeys(p.rented.job.cell for p in group if p.rented.job.cell not in kept)
    return at_lengths, [Excluded(cell=cell, reason=reason) for cell in out]


def _limit_reason(miss: Observation | None) -> str:
    if miss is None:
        return "the search's limit"
    return f"{miss.outcome} at {miss.batch_size}"


def _why_not(batch: Batch, cell: Cell, seen: Sequence[Observation], *, priced: bool) -> str:
    if not priced and cell.capped_on is None:
        return f"the catalog has no offer for {cell.gpu}: add one under catalog.offers"
    known = largest_batch(seen)
    if known is not None:
        reason = _why_not_at(batch if isinstance(batch, int) else None, cell, *known)
        if reason is not None:
            return reason
    failures = [o for o in seen if not o.outcome.is_verdict]
    if failures:
        last = failures[-1]
        times = sum((o.purpose, o.batch_size) == (last.purpose, last.batch_size) for o in failures)
        return f"batch size {last.batch_size} {last.outcome} {times} times: {last.detail}"
    return "not measured yet: run the sweep again to go on" if seen else "not measured"


def _why_not_at(wish: int | None, cell: Cell, largest: int, miss: Observation | None) -> str | None:
    """Why a cell with a known largest batch has no price; None when that is not the reason."""
    if largest == 0 and miss is not None:
        return f"not even one query fits: {miss.outcome} at batch size 1 ({miss.detail})"
    if cell.capped_on is not None:
        return (
            f"its largest batch, {largest}, was found on {cell.capped_on} under a memory cap; its "
            "speed is not known"
        )
    if wish is not None and wish > largest:
        return f"batch size {wish} does not fit: the largest is {largest}"
    if wish is not None:
        return f"batch size {wish} was not measured, and no law predicts it"
    return None
