"""Notes below a table of ranked offers: its columns, its job and its doubtful rows. Pure."""

import datetime as dt
from collections.abc import Iterable, Iterator, Sequence

from gpu_catalog.number_text import given
from gpu_catalog.price_table import OLD_DAYS
from orchestrator.pricing.catalog_file import OWN
from orchestrator.ranking.ranked_offer import RankedOffer, Ranking
from orchestrator.reporting.notes.certainty_notes import interval_sources
from orchestrator.reporting.notes.host_notes import ranked_host_notes
from orchestrator.reporting.sections.recommendation import (
    EQUAL_STEPS,
    FEW_STEPS,
    Recommendation,
    is_mostly_startup,
    recommendations,
    steps_per_epoch,
)

STABLE = 0.10  # widest stable interval of the hours, as a part of them
BATCH_RULES = {
    "asked": "as requested",
    "largest": "the largest that was timed",
    "fastest": "the fastest that was timed, by however small a margin",
}


def prices_text(ranking: Ranking) -> str:
    """Currency and dates of the rented offers, and the oldest of each provider with old ones."""
    rented = _rented(ranking.offers)
    if not rented:
        return ""
    recorded = (
        " (or recorded, where their source gives no date)"
        if any(row.price_as_of is None for row in rented)
        else ""
    )
    text = f"Prices are in US dollars before tax, quoted {_dates_text(rented)}{recorded}."
    if ranking.priced_on is None:
        return text
    first_old = ranking.priced_on - dt.timedelta(days=OLD_DAYS)
    old: dict[str, dt.date] = {}
    for row in rented:
        if row.price_date < first_old:
            old[row.provider] = min(row.price_date, old.get(row.provider, row.price_date))
    listed = ", ".join(f"{provider} {day}" for provider, day in sorted(old.items()))
    return f"{text} Quotes over {OLD_DAYS} days old (oldest): {listed}." if old else text


def _rented(rows: Iterable[RankedOffer]) -> list[RankedOffer]:
    return [row for row in rows if row.provider != OWN]


def _dates_text(rows: Iterable[RankedOffer]) -> str:
    dates = sorted(row.price_date for row in rows)
    first, last = dates[0], dates[-1]
    return f"on {first}" if first == last else f"from {first} to {last}"


def ranking_notes(rows: Sequence[RankedOffer], ranking: Ranking) -> str:
    """Notes on the columns of an offer table and on its doubtful rows, a line each."""
    left_out = dict.fromkeys(text for row in rows if (text := row.cell.recipe.left_out))
    notes = [
        *(f"Left out: {text}." for text in left_out),
        *_unequal_steps(recommendations(ranking)),
        *_column_notes(rows, ranking),
        *_job_notes(rows, ranking),
        *ranked_host_notes(rows),
    ]
    if any(row.elsewhere for row in rows):
        notes.append("Measured elsewhere: on the machine that ran the sweep, not on this instance.")
    if any(row.source == "law" for row in rows):
        notes.append("Law: the batch size was not timed, so a law predicts its step time.")
    if any(is_unstable(row) for row in rows):
        notes.append(
            f"~ The 90 % interval spans more than {STABLE:.0%} of the hours: measure longer "
            "(`timing` in the specification) or on a quieter machine."
        )
    is_several_instances = any(row.instances > 1 for row in rows)
    if is_several_instances or any(row.gpus_per_instance > 1 for row in rows):
        is_several = any(row.cell.ranks > 1 for row in rows)
        used = "as many GPUs as the row names" if is_several else "one of its GPUs"
        rented = "all rented instances" if is_several_instances else "the whole instance"
        notes.append(f"$/h is the price of {rented}. The job uses {used}.")
    return "\n".join(notes)


def _unequal_steps(advice: Sequence[Recommendation]) -> Iterator[str]:
    """A line on jobs whose offers have optimizer steps of other sizes, or none."""
    unequal = [text for job in advice if (text := job.unequal_steps)]
    if len(unequal) == len(advice) == 1:
        yield from unequal
    elif unequal:
        yield (
            f"In {len(unequal)} of {len(advice)} jobs the compared offers do not train alike: they "
            f"differ in the examples of an optimizer step. {EQUAL_STEPS}"
        )


def _column_notes(rows: Sequence[RankedOffer], ranking: Ranking) -> Iterator[str]:
    rented, shown = _rented(ranking.offers), _rented(rows)
    if shown and _dates_text(shown) != _dates_text(rented):
        yield f"Prices above were quoted {_dates_text(shown)}."
    where = ", on each GPU" if any(row.cell.ranks > 1 for row in rows) else ""
    rule = BATCH_RULES[rows[0].batch]
    yield f"Batch size: {rule}{where}; max is the largest that fits, or was tried."
    yield f"Brackets: 90 % intervals. They include {interval_sources(ranking)}."
    yield "P(cheapest): the probability that no other offer is cheaper."


def _job_notes(rows: Sequence[RankedOffer], ranking: Ranking) -> Iterator[str]:
    """Warnings of large batches, of short jobs and of a deadline that may be missed."""
    job, deadline = ranking.workload, ranking.constraints.deadline_hours
    few = sum(steps_per_epoch(job, row) < FEW_STEPS for row in rows)
    if few:
        yield (
            f"Offers with fewer than {FEW_STEPS} optimizer steps per epoch: {few}. "
            "--batch-size N prices a smaller batch size."
        )
    mostly = sum(is_mostly_startup(row) for row in rows)
    if mostly:
        yield (
            f"Offers whose hours are mostly the assumed start-up: {mostly}. To distinguish GPUs, "
            "price a longer job or set --startup-minutes."
        )
    if deadline is not None and any(row.hours_high > deadline for row in rows):
        limit = f"the deadline of {given(deadline)} h"
        yield f"Some offers may miss {limit}, which is in their interval."


def is_unstable(row: RankedOffer) -> bool:
    """Whether more measuring would narrow the wide interval of an offer's hours."""
    # More measuring narrows the interval of neither a simulated step nor a law.
    return row.source == "measured steps" and row.hours_high - row.hours_low > STABLE * row.hours
