"""A ranking, as a record and as CSV: what each offer comes to, and how sure that is. Pure."""

import csv
import io
from datetime import date
from typing import Literal

from fitting.families.cell_step_time import StepTimeOrigin
from fitting.laws.forms import Form
from gpu_catalog.record import Record
from orchestrator.pricing.offer_constraints import Constraints, MissedConstraints
from orchestrator.ranking.epochs_needed import LearnedEpochs
from orchestrator.spec.job import Job
from trials.records.cell import Cell
from trials.records.observation import Basis


class RankedOffer(Record):
    """One cell's job on one offer. Intervals hold nine times in ten.

    Attributes:
        rank: 1 is the cheapest for this model, recipe, sparsity and sequence length.
        probability_cheapest: that no other offer is cheaper; 0 for an offer of the same GPU and
            market that is dearer by more than prices move.
        tied: whether it cannot be told apart from the cheapest.
        pareto: whether no other offer is both faster and cheaper.
        cell: what runs.
        stack: fingerprint of the software it was measured with.
        provider, instance, region, market, gpus_per_instance, usd_per_hour: the offer; the price
            is that of the whole instance, which is what must be rented.
        price_as_of: when the price held; absent where its source does not say.
        price_recorded: when it was written into the catalog.
        batch_size: examples per step.
        batch: why that one: asked for, the largest, or the fastest of those timed.
        largest_batch: the largest that fits; absent while the search has not closed in on it.
        limited_by: what the next larger batch size ended in, or the search's limit.
        examples_per_second: throughput at ``batch_size``; of packed rows, those.
        epochs: how often each example is seen.
        tokens_per_example: padding included; the cell's length where the job has no lengths, or
            ``as_if_full``.
        as_if_full: whether every example is priced as if it had the cell's length though the job's
            are shorter, since nothing tells how long its steps take: an upper bound.
        hours, hours_low, hours_high: from renting to the end: start-up, steps, checkpoints, and of
            spot instances what interruptions are expected to cost.
        usd, usd_low, usd_high: what is paid for them; the interval is of the hours and of how far
            the price may have moved since it was noted.
        checkpoint_minutes: of work between two checkpoints.
        basis: measured or simulated; a capped GPU has no price.
        source: where the step time comes from.
        law: which, where it comes from one, or was scaled by one to the job's lengths.
        length_error: how far off that law is on lengths that it has not seen, where it was scaled.
        extrapolated: the law was asked beyond what it was fitted on.
    """

    rank: int
    probability_cheapest: float
    tied: bool
    pareto: bool
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
    batch: Literal["asked", "largest", "fastest"]
    largest_batch: int | None
    limited_by: str | None
    examples_per_second: float
    epochs: int
    tokens_per_example: float
    as_if_full: bool = False
    hours: float
    hours_low: float
    hours_high: float
    usd: float
    usd_low: float
    usd_high: float
    checkpoint_minutes: float
    basis: Basis
    source: StepTimeOrigin
    law: Form | None
    length_error: float | None = None
    extrapolated: bool


class Excluded(Record):
    """A cell that is not ranked, and why.

    Attributes:
        missed: by how much its best offers miss the deadline or the budget, where that is why.
    """

    cell: Cell
    reason: str
    missed: MissedConstraints | None = None


class Ranking(Record):
    """Every cell of a sweep on every offer of its GPU, cheapest first within comparable cells.

    Attributes:
        workload: the job; its epochs are the most of any cell where they were learned.
        priced_on: the day that prices have moved until; absent where they are as quoted.
        constraints: what an offer must be.
        learned: where epochs come from that were learned; empty where they were asked for.
        offers, excluded: what is ranked, and what is not.
    """

    schema_version: Literal[3] = 3
    workload: Job
    priced_on: date | None = None
    learned: tuple[LearnedEpochs, ...] = ()
    constraints: Constraints = Constraints()
    offers: tuple[RankedOffer, ...]
    excluded: tuple[Excluded, ...]


def comparable(cell: Cell) -> tuple[object, ...]:
    """What two cells must share for the cheaper one to be the better choice."""
    return (cell.model, cell.weights, cell.recipe, cell.active_experts, cell.seq_len)


def ranking_csv(ranking: Ranking) -> str:
    """The ranking as CSV: a row per offer, the cell's parts as columns of their own."""
    buffer = io.StringIO()
    fields = [name for name in RankedOffer.model_fields if name not in {"cell", "epochs"}]
    parts = ["gpu", "model", "weights", "recipe", "sparsity", "active_experts", "seq_len"]
    job = ["examples", "epochs"]
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
            + [ranking.workload.examples, row.epochs]
        )
    return buffer.getvalue()
