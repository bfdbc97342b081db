"""Reasons why a cell or an offer is excluded from the ranking."""

from collections.abc import Callable, Iterable, Sequence

from fitting.families.cell_step_time import Batch
from orchestrator.ranking.priced_job import PricedOffer
from orchestrator.ranking.ranked_offer import Excluded
from orchestrator.spec.job import Job
from orchestrator.spec.job_tokens import longest_example, longest_tokens, padded_tokens
from trials.records.cell import Cell
from trials.records.observation import Observation, largest_batch


def padding(workload: Job, cell: Cell) -> Callable[[int], float] | None:
    """Padded tokens of an example by batch size; None where all have the full length."""
    if workload.lengths is None:
        return None
    return lambda size: min(padded_tokens(workload, size, cell.seq_len), float(cell.seq_len))


def too_long(workload: Job, cell: Cell, others: Iterable[Cell]) -> str | None:
    """Why a cell's length is none for the job; None where it is.

    Args:
        workload: the job.
        cell: asked about.
        others: all there are: one that differs in its length alone may have the job.
    """
    longest = longest_example(workload)
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
    return f"its length is {cell.seq_len}, examples have up to {longest} tokens: {remedy}"


def of_like_lengths(
    workload: Job, group: Sequence[PricedOffer]
) -> tuple[list[PricedOffer], list[Excluded]]:
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


def limit_reason(miss: Observation | None) -> str:
    """Reason why the largest batch is not larger."""
    if miss is None:
        return "the search's limit"
    return f"{miss.outcome} at {miss.batch_size}"


def why_not(batch: Batch, cell: Cell, seen: Sequence[Observation], *, priced: bool) -> str:
    """Reason why a cell has no price."""
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
        return f"not even one example fits: {miss.outcome} at batch size 1 ({miss.detail})"
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
