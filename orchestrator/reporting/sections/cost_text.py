"""Sentences about the cost of a job and of a sweep: overheads, epochs and expected measurements."""

from collections.abc import Iterator, Sequence

from gpu_catalog.number_text import dollars, given, short
from orchestrator.markdown_table import records_table, span
from orchestrator.planning.measurement_cost import PROBE_SECONDS, Budget, RemainingWork
from orchestrator.planning.node_pricing import NodePrices
from orchestrator.pricing.transfer_times import (
    BOOT_MINUTES,
    CHECKPOINT_SECONDS,
    DISK_BYTES_PER_SECOND,
    DOWNLOAD_BYTES_PER_SECOND,
)
from orchestrator.ranking.epochs_needed import LearnedEpochs
from orchestrator.ranking.ranked_offer import Ranking
from orchestrator.spec.job import NO_OVERHEADS, SECONDS_PER_MINUTE, Overheads

_WORDS = ("min", "of start-up", "by the model's bytes"), ("s", "per checkpoint", "by its bytes")


def overheads_text(overheads: Overheads) -> str:
    """Assumptions of a priced job beside its steps, to follow its size."""
    return _assumed(
        overheads,
        f"{overheads.expected_startup_minutes:g} min of start-up",
        f"{overheads.expected_checkpoint_seconds:g} s per checkpoint",
    )


def ranked_overheads_text(ranking: Ranking) -> str:
    """The same for a ranking, with the times that its offers were priced with.

    Without offers (those of earlier rankings lack the times), it states the formulas of the times
    that were not given.
    """
    overheads = ranking.workload.overheads
    charged = {
        (row.startup_minutes, row.checkpoint_seconds)
        for row in ranking.offers
        if row.startup_minutes is not None and row.checkpoint_seconds is not None
    }
    if not charged:
        return _formulas(overheads)
    flat = overheads.expected_startup_minutes, overheads.expected_checkpoint_seconds
    sized = charged - {flat}
    if not sized:
        return overheads_text(overheads)
    texts = []
    given = overheads.startup_minutes, overheads.checkpoint_seconds
    for time, assumed, values, words in zip(
        given, flat, zip(*sized, strict=True), _WORDS, strict=True
    ):
        unit, purpose, by_size = words
        texts.append(f"{span(values, 'g')} {unit} {purpose}")
        if time is None:
            texts[-1] += f" {by_size}"
            texts[-1] += f" ({assumed:g} {unit} where they are unknown)" if flat in charged else ""
    return _assumed(overheads, *texts)


def _formulas(overheads: Overheads) -> str:
    """Assumptions of a job for models of any size."""
    download, disk = (
        f"{rate / 1e6:g} MB/s" for rate in (DOWNLOAD_BYTES_PER_SECOND, DISK_BYTES_PER_SECOND)
    )
    startup = f"{overheads.expected_startup_minutes:g} min of start-up"
    if overheads.startup_minutes is None:
        startup = (
            f"{BOOT_MINUTES:g} min of start-up plus the weights, downloaded at {download} and read "
            f"at {disk}"
        )
    checkpoint = f"{overheads.expected_checkpoint_seconds:g} s per checkpoint"
    if overheads.checkpoint_seconds is None:
        checkpoint = f"{CHECKPOINT_SECONDS:g} s per checkpoint plus its bytes, written at {disk}"
    return _assumed(overheads, startup, checkpoint)


def _assumed(overheads: Overheads, startup: str, checkpoint: str) -> str:
    # The interval between checkpoints alone takes no time.
    if overheads.model_copy(update={"checkpoint_minutes": None}) == NO_OVERHEADS:
        return ""
    return (
        f". Assumed, not measured: {startup}, {checkpoint}, "
        f"{overheads.interruptions_per_day:g} interruptions a day of a spot instance"
    )


def epochs_text(learned: Sequence[LearnedEpochs]) -> str:
    """Sources of the epochs of a ranking, a line each."""
    lines = []
    for row in learned:
        experts = "" if row.active_experts is None else f", {row.active_experts} experts"
        epochs = f"{row.epochs} epoch{'s' * (row.epochs != 1)}"
        lines.append(
            f"{row.model}{experts}, {row.recipe}: {epochs}. More epochs did not improve "
            f"the {row.by} on {row.held_out_examples:,} held-out examples of {row.data} (trained "
            f"from {row.weights} weights at batch size {row.batch_size}; other batch sizes may "
            "need more or fewer epochs)."
        )
    return "\n".join(lines)


def expected(work: Sequence[RemainingWork], budget: Budget, rates: NodePrices) -> Iterator[str]:
    """Table of the measurements that each GPU has left, and lines on their total cost.

    Where no duration can be estimated yet, one line that says so.
    """
    if not work:
        return
    if all(row.hours is None for row in work):
        gpus = ", ".join(row.gpu for row in work)
        yield f"expected cost: unknown before the first probes of {gpus}"
        return
    yield records_table(
        {
            "GPU": row.gpu,
            "trials": row.trials,
            "nodes": row.nodes,
            "at a time": row.at_a_time,
            "hours": "unknown yet" if row.hours is None else short(row.hours, 2),
            "$/h": "" if row.offer is None else dollars(row.offer.usd_per_hour),
            "$": "" if row.usd is None else dollars(row.usd),
        }
        for row in work
    )
    yield from expected_text(work, budget, rates)


def expected_text(
    work: Sequence[RemainingWork], budget: Budget, rates: NodePrices
) -> Iterator[str]:
    """Lines on the total: hours until the last GPU ends, dollars, and whether the budget lasts."""
    estimated = [row for row in work if row.hours is not None]
    usd = [row.usd for row in work if row.usd is not None]
    if not estimated:
        return
    hours = max(row.hours or 0.0 for row in work)
    unknown = [row.gpu for row in work if row.hours is None]
    unknown += ["profiles"] if budget.profiles else []
    without = f", {', '.join(unknown)} not counted" if unknown else ""
    cost = f" and ${dollars(sum(usd))}" if usd else ""
    yield f"expected: {short(hours, 2)} h{cost}{without}{_assumptions(estimated)}"
    priced = rates.text((row.gpu, row.offer) for row in estimated)
    if priced:
        yield priced
    if budget.budget_usd is None:
        return
    if not usd:
        yield "the budget has no effect: no node is rented at a known price"
    elif budget.spent_usd + sum(usd) > budget.budget_usd:
        spent = f", of which ${budget.spent_usd:,.2f} is spent" if budget.spent_usd else ""
        limit = f"the budget is ${given(budget.budget_usd)}{spent}"
        yield f"{limit}: measurements stop when it is spent"


def _assumptions(estimated: Sequence[RemainingWork]) -> str:
    """Origin of the durations, to follow the hours."""
    if not any(row.is_assumed for row in estimated):
        return ", by the measurements so far"
    minutes = max(row.start_seconds for row in estimated) / SECONDS_PER_MINUTE
    start = f" and {minutes:g} min to start a node" if minutes else ""
    return f" (assumed: {PROBE_SECONDS:g} s a probe{start}; large models take longer)"
