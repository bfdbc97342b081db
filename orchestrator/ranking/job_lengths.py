"""A job's examples against the tasks and lengths of cells."""

from collections.abc import Iterable, Sequence

from fitting.families.cell_step_time import PaddedTokens
from orchestrator.ranking.priced_job import PricedOffer
from orchestrator.ranking.ranked_offer import Excluded
from orchestrator.spec.data_kinds import wrong_kind
from orchestrator.spec.job import Job
from orchestrator.spec.job_tokens import (
    drawn_lengths,
    job_of,
    longest_example,
    longest_tokens,
    waited_tokens,
)
from trials.drawn_lengths import DrawnLengths
from trials.records.cell import Cell
from trials.records.observation import Observation


def padding(job: Job, cell: Cell) -> PaddedTokens | None:
    """Padded tokens per example by batch size; None where all examples have the full length.

    Of several ranks they are those of the batch that the others wait for.
    """
    if job.lengths is None:
        return None

    def tokens(size: int) -> float:
        micro_batches = cell.rank_recipe.micro_batches(size)
        waited = waited_tokens(job, size, cell.seq_len, cell.parallel, micro_batches)
        return min(waited, float(cell.seq_len))

    return tokens


def of_drawn_lengths(
    observations: Sequence[Observation], job: Job, measured: Job
) -> list[Observation]:
    """Drop the runs of drawn lengths of cells where another job draws other lengths.

    Args:
        observations: observations of a run.
        job: job to price.
        measured: job whose lengths the run drew.
    """

    def draws(of_job: Job, cell: Cell) -> DrawnLengths | None:
        return drawn_lengths(job_of(of_job, cell.recipe, cell.seq_len), cell.seq_len)

    cells = {o.cell for o in observations if o.is_drawn}
    others = {cell for cell in cells if draws(job, cell) != draws(measured, cell)}
    return [o for o in observations if not (o.is_drawn and o.cell in others)]


def unsuited(job: Job, cell: Cell, others: Iterable[Cell]) -> str | None:
    """Reason why a cell does not train on the job's examples; None where it does.

    Args:
        job: job to run.
        cell: cell to check.
        others: cells to suggest instead.
    """
    return wrong_kind(job, cell.recipe) or _too_long(job, cell, others)


def _too_long(job: Job, cell: Cell, others: Iterable[Cell]) -> str | None:
    """Reason why the job's examples do not fit the length of a cell; None where they do.

    Of the other cells those that differ from this one in their length alone are suggested.
    """
    longest = longest_example(job)
    if longest is None or longest <= cell.seq_len:
        return None
    long_enough = (
        other.seq_len
        for other in others
        if other.seq_len >= longest and other.model_copy(update={"seq_len": cell.seq_len}) == cell
    )
    length = min(long_enough, default=None)
    remedy = (
        f"--cutoff {cell.seq_len}, or a sweep at {longest_tokens(job, cell.seq_len)}"
        if length is None
        else f"use the cell at {length}, or --cutoff {cell.seq_len} for this one"
    )
    return f"its length is {cell.seq_len}, but examples have up to {longest} tokens: {remedy}"


def of_like_lengths(
    job: Job, group: Sequence[PricedOffer]
) -> tuple[list[PricedOffer], list[Excluded]]:
    """Keep the offers that are priced at the lengths of the data, and exclude the other cells.

    The others are priced at the full length, which would make them look too expensive. Where a law
    of lengths exists for no cell, all of them are compared at the full length.
    """
    at_lengths = [p for p in group if p.rented.job.step_time.tokens is not None]
    if job.lengths is None or not at_lengths:
        return list(group), []
    kept = {p.rented.job.cell for p in at_lengths}
    reason = "no law predicts shorter steps: time more batch sizes, or another length"
    others = dict.fromkeys(p.rented.job.cell for p in group if p.rented.job.cell not in kept)
    return at_lengths, [Excluded(cell=cell, reason=reason) for cell in others]
