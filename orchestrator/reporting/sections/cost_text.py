"""Sentences about the cost of a job and of a sweep: overheads, epochs and expected measurements."""

from collections.abc import Sequence

from orchestrator.ranking.epochs_needed import LearnedEpochs
from orchestrator.spec.job import NO_OVERHEADS, Overheads


def overheads_text(overheads: Overheads) -> str:
    """Assumptions about a job beside its steps, to follow its size."""
    if overheads == NO_OVERHEADS:
        return ""
    return (
        f", {overheads.startup_minutes:g} min of start-up, checkpoints of "
        f"{overheads.checkpoint_seconds:g} s, spot instances taken away "
        f"{overheads.interruptions_per_day:g} times a day (assumed, not measured)"
    )


def epochs_text(learned: Sequence[LearnedEpochs]) -> str:
    """Sources of the epochs of a ranking, a line each."""
    lines = []
    for row in learned:
        experts = "" if row.active_experts is None else f", {row.active_experts} experts"
        lines.append(
            f"{row.model}{experts}, {row.recipe}: {row.epochs} epochs, after which "
            f"{row.held_out_examples:,} held-out examples of {row.data} got no better by "
            f"{row.by} (learned from {row.weights} weights in batches of {row.batch_size}; other "
            "batches may take more or fewer)."
        )
    return "\n".join(lines)
