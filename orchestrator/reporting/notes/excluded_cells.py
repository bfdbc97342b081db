"""Cells that a ranking excludes, by reason, and advice where it excludes all. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from gpu_catalog.number_text import given, short
from orchestrator.pricing.offer_constraints import Constraints, MissedConstraints, nothing_text
from orchestrator.ranking.ranked_offer import Excluded, Ranking

MOST_NAMED = 3  # excluded cells named for one reason; more are counted


def excluded_list(ranking: Ranking) -> str:
    """The excluded cells and instances, a line for each reason; empty for none."""
    return "\n".join(
        f"- {', '.join(keys) if len(keys) <= MOST_NAMED else f'{len(keys)} cells'}: {reason}"
        for reason, keys in keys_by_reason(ranking).items()
    )


def keys_by_reason(ranking: Ranking) -> dict[str, list[str]]:
    """Keys of the excluded cells, and of those with excluded instances, by the reason.

    More than a few that miss the same limits are one entry, with the best and the worst of them.
    """
    wanted = ranking.constraints
    by_limits: dict[tuple[bool, bool], list[Excluded]] = defaultdict(list)
    reasons: dict[str, list[str]] = defaultdict(list)
    for row in ranking.excluded:
        if row.missed is None:
            reasons[row.reason].append(row.cell.key)
        else:
            limits = row.missed.misses_deadline(wanted), row.missed.exceeds_budget(wanted)
            by_limits[limits].append(row)
    for rows in by_limits.values():
        misses = [row.missed for row in rows if row.missed is not None]
        for row in rows:
            reason = row.reason if len(rows) <= MOST_NAMED else _missed_by_many(misses, wanted)
            reasons[reason].append(row.cell.key)
    for left_out in ranking.too_little_host_memory:
        for instance in left_out.instances:
            reasons[instance.text].append(left_out.cell.key)
    return reasons


def _missed_by_many(misses: Sequence[MissedConstraints], wanted: Constraints) -> str:
    """Limits that several cells miss, with the range of what they take."""
    parts = []
    if misses[0].misses_deadline(wanted):
        hours = _range(miss.quickest_hours for miss in misses)
        parts.append(
            f"are expected to take {hours} h; the deadline is {given(wanted.deadline_hours)}"
        )
    if misses[0].exceeds_budget(wanted):
        usd = _range(miss.cheapest_usd for miss in misses)
        parts.append(f"are expected to cost ${usd}; the budget is ${given(wanted.budget_usd)}")
    return "; ".join(parts) or "meet both the deadline and the budget on no offer"


def _range(values: Iterable[float]) -> str:
    listed = sorted(values)
    return f"{short(listed[0])} to {short(listed[-1])}"


def no_offer_text(ranking: Ranking) -> str:
    """Advice where a ranking has no offer.

    Options to relax if offers miss the deadline or the budget; else it stands beside each cell.
    """
    misses = [
        (f"{row.cell.gpus}{' (simulated)' if row.cell.simulated else ''}", row.missed)
        for row in ranking.excluded
        if row.missed is not None
    ]
    if misses:
        return nothing_text(ranking.constraints, misses)
    return "Nothing can be ranked: each excluded cell has the reason, and what to do."
