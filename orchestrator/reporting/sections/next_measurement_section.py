"""Tables of the most useful next measurements and of the state of each choice of a GPU."""

import math
from collections.abc import Sequence

from orchestrator.markdown_table import table
from orchestrator.ranking.next_measurement import CandidateMeasurement, GpuChoice
from trials.records.cell import Cell

JOB_HEADERS = ("model", "recipe", "experts", "tokens")


def next_measurements_table(choices: Sequence[GpuChoice], most: int) -> str:
    """Markdown: the most useful measurements of all open choices, then the state of each choice."""
    if not choices:
        return "There is nothing to choose: no GPU of the specification has an offer and fits."
    candidates = sorted(
        (c for choice in choices if choice.is_open for c in choice.candidates),
        key=lambda c: (-c.worth, c.usd),
    )
    rows = [
        (
            number,
            c.option.cell.gpu,
            c.option.batch_size or "largest",
            *_job_columns(c.option.cell),
            c.option.known_by,
            _saving(c),
            f"{c.usd:.2g}",
            f"{c.seconds / 60:.1f}",
        )
        for number, c in enumerate(candidates[:most], start=1)
    ]
    headers = (
        *("", "GPU", "batch size", *JOB_HEADERS),
        *("estimated from", "saves per job", "costs $", "minutes"),
    )
    parts = []
    if rows:
        parts.append(table(headers, rows))
    elif all(choice.is_decided for choice in choices):
        parts.append("Every choice is decided.")
    else:
        parts.append("Nothing is left to measure.")
    if len(candidates) > most:
        parts.append(f"{len(candidates) - most} more: --most sets how many are listed.")
    return "\n\n".join([*parts, choices_table(choices)])


def _job_columns(cell: Cell) -> tuple[object, ...]:
    experts = "none" if cell.experts is None else f"{cell.active_experts} of {cell.experts}"
    return (cell.model, cell.recipe.key, experts, cell.seq_len)


def _saving(candidate: CandidateMeasurement) -> str:
    if math.isinf(candidate.saving):
        return "needed first"
    if candidate.saving_usd is None:
        return f"{candidate.saving:.1%}"
    return f"${candidate.saving_usd:.2g}"


def choices_table(choices: Sequence[GpuChoice]) -> str:
    """Markdown table: the leading GPU of each choice, its probability and whether it is decided."""
    rows = [
        (
            *_job_columns(choice.leader.cell),
            choice.leader.cell.gpu,
            f"{choice.probability:.0%}",
            _state(choice),
        )
        for choice in choices
    ]
    return table((*JOB_HEADERS, "leading GPU", "probability", "state"), rows)


def _state(choice: GpuChoice) -> str:
    if choice.is_decided:
        return "decided"
    if not choice.candidates:
        return "undecided, all measured"
    begun = "" if choice.leader.is_measured else "leading GPU not measured yet; "
    return f"{begun}measurements that may decide: {len(choice.candidates)}"
