"""What to measure next, and how each choice of a GPU stands, as tables."""

import math
from collections.abc import Sequence

from orchestrator.markdown_table import table
from orchestrator.ranking.next_measurement import CandidateMeasurement, GpuChoice
from trials.records.cell import Cell

SUBJECT = ("model", "recipe", "experts", "tokens")


def next_measurements_table(found: Sequence[GpuChoice], most: int) -> str:
    """What to measure next, over all choices, the worthiest first; then each choice as it is."""
    open_choices = [choice for choice in found if choice.is_open]
    candidates = sorted(
        (c for choice in open_choices for c in choice.candidates), key=lambda c: (-c.worth, c.usd)
    )
    listed = [
        (
            number,
            c.option.cell.gpu,
            c.option.batch_size or "the largest",
            *_subject(c.option.cell),
            c.option.known_by,
            _saving(c),
            f"{c.usd:.2g}",
            f"{c.seconds / 60:.1f}",
        )
        for number, c in enumerate(candidates[:most], start=1)
    ]
    headers = (
        "",
        "GPU",
        "batch",
        *SUBJECT,
        "known by",
        "saves of a job",
        "costs $",
        "minutes",
    )
    decided = all(choice.is_decided for choice in found)
    nothing = "Every choice is decided." if decided else "Nothing is left to measure."
    if not found:
        nothing = (
            "There is nothing to choose: no GPU of the specification has an offer and the room."
        )
    parts = [table(headers, listed) if listed else nothing]
    if len(candidates) > most:
        parts.append(f"{len(candidates) - most} more: --most tells how many to list.")
    parts += [choices_table(found)] if found else []
    return "\n\n".join(parts)


def _subject(cell: Cell) -> tuple[object, ...]:
    experts = "none" if cell.experts is None else f"{cell.active_experts} of {cell.experts}"
    return (cell.model, cell.recipe.key, experts, cell.seq_len)


def _saving(candidate: CandidateMeasurement) -> str:
    if math.isinf(candidate.saving):
        return "to begin with"
    if candidate.saving_usd is None:
        return f"{candidate.saving:.1%}"
    return f"${candidate.saving_usd:.2g}"


def choices_table(found: Sequence[GpuChoice]) -> str:
    """Which GPU leads each choice, and whether that is settled."""
    listed = [
        (
            *_subject(choice.leader.cell),
            choice.leader.cell.gpu,
            f"{choice.probability:.0%}",
            _state(choice),
        )
        for choice in found
    ]
    return table((*SUBJECT, "likely winner", "sure", "state"), listed)


def _state(choice: GpuChoice) -> str:
    if choice.is_decided:
        return "decided"
    if not choice.candidates:
        return "all measured, not told apart"
    begun = "" if choice.leader.is_measured else "nothing of it measured, "
    return f"{begun}to choose from: {len(choice.candidates)} measurements"
