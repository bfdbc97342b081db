"""Tables of the most useful next measurements and of the state of each choice of a GPU."""

import math
from collections.abc import Sequence

from gpu_catalog.number_text import short
from orchestrator.markdown_table import records_table
from orchestrator.ranking.next_measurement import CandidateMeasurement, GpuChoice
from trials.records.cell import Cell

PROBABILITY = "Probability: that no other GPU is cheaper by more than 1 %."


def next_measurements_table(choices: Sequence[GpuChoice], most: int) -> str:
    """Markdown: the most useful measurements of all open choices, then the state of each choice."""
    if not choices:
        return "There is nothing to choose: no GPU of the specification has an offer and fits."
    candidates = sorted(
        (c for choice in choices if choice.is_open for c in choice.candidates),
        key=lambda c: (-c.worth, c.usd),
    )
    rows = [
        {
            "": number,
            "GPU": c.option.cell.gpus,
            "batch size": c.option.batch_size or "largest",
            **_job(c.option.cell),
            "estimated from": c.option.known_by,
            "saves per job": _saving(c),
            "costs $": short(c.usd, 2),
            "minutes": f"{c.seconds / 60:.1f}",
        }
        for number, c in enumerate(candidates[:most], start=1)
    ]
    if rows:
        parts = [records_table(rows)]
    elif all(choice.is_decided for choice in choices):
        parts = ["Every choice is decided."]
    else:
        parts = ["Nothing is left to measure."]
    if len(candidates) > most:
        parts.append(f"{len(candidates) - most} more: --most sets how many are listed.")
    return "\n\n".join([*parts, choices_table(choices), PROBABILITY])


def _job(cell: Cell) -> dict[str, object]:
    experts = "none" if cell.experts is None else f"{cell.active_experts} of {cell.experts}"
    return {
        "model": cell.model,
        "recipe": cell.recipe.key,
        "experts": experts,
        "tokens": cell.seq_len,
    }


def _saving(candidate: CandidateMeasurement) -> str:
    if math.isinf(candidate.saving):
        return "needed first"
    if candidate.saving_usd is None:
        return "under 0.1%" if candidate.saving < 0.001 else f"{candidate.saving:.1%}"
    return "under $0.01" if candidate.saving_usd < 0.01 else f"${short(candidate.saving_usd, 2)}"


def choices_table(choices: Sequence[GpuChoice]) -> str:
    """Markdown table: the leading GPU of each choice, its probability and whether it is decided."""
    return records_table(
        {
            **_job(choice.leader.cell),
            "leading GPU": choice.leader.cell.gpus,
            "probability": f"{choice.probability:.0%}",
            "state": _state(choice),
        }
        for choice in choices
    )


def _state(choice: GpuChoice) -> str:
    if choice.is_decided:
        return "decided"
    if not choice.candidates:
        return "undecided, all measured"
    begun = "" if choice.leader.is_measured else "leading GPU not measured yet; "
    return f"{begun}measurements that may decide: {len(choice.candidates)}"
