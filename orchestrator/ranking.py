"""Hours and money of a job on every offer, from what was measured. Pure."""

import csv
import io
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date

from fitting.families import FamilyFit
from fitting.step_times import Form
from gpu_catalog.catalog import Catalog
from gpu_catalog.offer import Offer
from gpu_catalog.record import Record
from orchestrator.plan import Plan
from orchestrator.step_seconds import Source, StepTime, step_times
from orchestrator.sweep import Workload
from trials.observation import Basis, Observation, largest_batch
from trials.workload import Cell

SECONDS_PER_HOUR = 3600.0


class RankedOffer(Record):
    """One cell's job on one offer.

    Attributes:
        rank: 1 is the cheapest for this model, recipe, sparsity and sequence length.
        cell: what runs.
        stack: fingerprint of the software it was measured with.
        provider, instance, region, market, gpus_per_instance, usd_per_hour: the offer; the price
            is that of the whole instance, which is what must be rented.
        price_as_of: when the price held; absent where its source does not say.
        price_recorded: when it was written into the catalog.
        batch_size: queries per step.
        largest_batch: the largest that fits; absent while the search has not closed in on it.
        limited_by: what the next larger batch size ended in, or the search's limit.
        queries_per_second: throughput at ``batch_size``.
        hours, hours_low, hours_high: duration of the job, with the interval of its ``Source``.
        usd, usd_low, usd_high: its price.
        basis: measured or simulated; a capped GPU has no price.
        source: where the step time comes from.
        law: which, where it comes from one.
        extrapolated: the law was asked beyond what it was fitted on.
    """

    rank: int
    cell: Cell
    stack: str
    provider: str
    instance: str
    region: str
    market: str
    gpus_per_instance: int
    usd_per_hour: float
    price_as_of: date | None
    price_recorded: date
    batch_size: int
    largest_batch: int | None
    limited_by: str | None
    queries_per_second: float
    hours: float
    hours_low: float
    hours_high: float
    usd: float
    usd_low: float
    usd_high: float
    basis: Basis
    source: Source
    law: Form | None
    extrapolated: bool


class Excluded(Record):
    """A cell that is not ranked, and why."""

    cell: Cell
    reason: str


class Ranking(Record):
    """Every cell of a sweep on every offer of its GPU, cheapest first within comparable cells."""

    workload: Workload
    offers: tuple[RankedOffer, ...]
    excluded: tuple[Excluded, ...]


def job_hours(workload: Workload, batch_size: int, step_seconds: float) -> float:
    """Hours of a job: ``ceil(queries / batch) * epochs`` steps. The last batch may be smaller."""
    steps = -(-workload.queries // batch_size) * workload.epochs
    return steps * step_seconds / SECONDS_PER_HOUR


def rank(
    workload: Workload,
    catalog: Catalog,
    plan: Plan,
    observations: Sequence[Observation],
    families: Sequence[FamilyFit],
) -> Ranking:
    """Prices a job on every offer of every measured cell's GPU.

    Coefficients belong to a stack: a cell measured with two is ranked once for each. So is one that
    was both measured and simulated. Families are asked only about a batch size nobody measured.
    """
    skipped = {skip.cell: skip.reason for skip in plan.skipped}
    ranked: list[RankedOffer] = []
    excluded: list[Excluded] = []
    for cell in (*plan.complete, *plan.pending, *skipped):
        seen = [o for o in observations if o.cell == cell]
        offers = catalog.offers(cell.gpu)
        times = step_times(workload.batch_size, cell, seen, families)
        for (stack, basis), step_time in times.items():
            job = _Job(workload, cell, stack, basis, step_time, seen)
            ranked += [job.on(offer) for offer in offers]
        if not (times and offers):
            reason = _why_not(workload, cell, seen, priced=bool(offers))
            excluded.append(Excluded(cell=cell, reason=skipped.get(cell) or reason))
    return Ranking(workload=workload, offers=tuple(_in_order(ranked)), excluded=tuple(excluded))


@dataclass(frozen=True, slots=True)
class _Job:
    """A workload as one cell, whose step time is known."""

    workload: Workload
    cell: Cell
    stack: str
    basis: Basis
    step_time: StepTime
    seen: Sequence[Observation]

    def on(self, offer: Offer) -> RankedOffer:
        """The job on one offer; ranks are given when all are known."""
        batch, seconds = self.step_time.batch_size, self.step_time.seconds
        hours, low, high = (
            job_hours(self.workload, batch, s) for s in (seconds.value, seconds.low, seconds.high)
        )
        known = largest_batch(self.seen)
        return RankedOffer(
            rank=0,
            cell=self.cell,
            stack=self.stack,
            provider=offer.provider,
            instance=offer.instance,
            region=offer.region,
            market=offer.market,
            gpus_per_instance=offer.gpus_per_instance,
            usd_per_hour=offer.usd_per_hour,
            price_as_of=offer.as_of,
            price_recorded=offer.recorded,
            batch_size=batch,
            largest_batch=None if known is None else known[0],
            limited_by=None if known is None else _limit_reason(known[1]),
            queries_per_second=batch / seconds.value,
            hours=hours,
            hours_low=low,
            hours_high=high,
            usd=hours * offer.usd_per_hour,
            usd_low=low * offer.usd_per_hour,
            usd_high=high * offer.usd_per_hour,
            basis=self.basis,
            source=self.step_time.source,
            law=self.step_time.law,
            extrapolated=seconds.extrapolated,
        )


def _limit_reason(miss: Observation | None) -> str:
    if miss is None:
        return "the search's limit"
    return f"{miss.outcome} at {miss.batch_size}"


def _why_not(workload: Workload, cell: Cell, seen: Sequence[Observation], *, priced: bool) -> str:
    if not priced and cell.capped_on is None:
        return f"the catalog has no offer for {cell.gpu}: add one under catalog.offers"
    known = largest_batch(seen)
    if known is not None:
        reason = _why_not_at(workload.batch_size, cell, *known)
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


def _in_order(rows: Iterable[RankedOffer]) -> list[RankedOffer]:
    """Comparable cells together (all but the GPU alike), each group cheapest first and numbered."""
    groups: dict[tuple[object, ...], list[RankedOffer]] = defaultdict(list)
    for row in rows:
        groups[comparable(row.cell)].append(row)
    return [
        row.model_copy(update={"rank": number})
        for group in groups.values()
        for number, row in enumerate(sorted(group, key=_worth), start=1)
    ]


def _worth(row: RankedOffer) -> tuple[float, bool, float]:
    """What was measured before what was simulated, where they cost the same."""
    return (row.usd, row.basis is Basis.SIMULATED, row.hours)


def comparable(cell: Cell) -> tuple[object, ...]:
    """What two cells must share for the cheaper one to be the better choice."""
    return (cell.model, cell.weights, cell.recipe, cell.active_experts, cell.seq_len)


def ranking_csv(ranking: Ranking) -> str:
    """The ranking as CSV: a row per offer, the cell's parts as columns of their own."""
    buffer = io.StringIO()
    fields = [name for name in RankedOffer.model_fields if name != "cell"]
    parts = ["gpu", "model", "weights", "recipe", "sparsity", "active_experts", "seq_len"]
    job = ["queries", "epochs"]
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*parts, *fields, *job])
    for row in ranking.offers:
        cell = row.cell
        writer.writerow(
            [
                cell.gpu,
                cell.model,
                cell.weights,
                cell.recipe.key,
                cell.sparsity,
                cell.active_experts,
                cell.seq_len,
            ]
            + [getattr(row, name) for name in fields]
            + [ranking.workload.queries, ranking.workload.epochs]
        )
    return buffer.getvalue()
