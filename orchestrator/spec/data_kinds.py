"""Kinds of training data against the tasks that train on them."""

from typing import get_args

from orchestrator.datasets.lengths import DataLengths
from orchestrator.datasets.preference import Kind
from orchestrator.spec.job import NOT_PACKED, Job
from trials.recipes.fields import Task
from trials.recipes.recipe import Recipe

KINDS: dict[str, tuple[Kind, ...]] = {
    "sft": ("texts",),
    "dpo": ("pairs",),
    "orpo": ("pairs",),
    "reward": ("pairs",),
    "kto": ("labelled", "pairs"),
    "grpo": ("texts",),  # a prompt with a completion
}
"""Kinds of data that a task trains on, the usual one first."""
NAMES: dict[Kind, str] = {"texts": "texts", "pairs": "pairs", "labelled": "labelled answers"}
REMEDIES: dict[Kind, str] = {
    "texts": "render texts, for example with --text-fields",
    "pairs": "give data with the columns chosen and rejected, and no rendering",
    "labelled": "give data with the columns prompt, completion and label, and no rendering",
}


def wrong_kind(job: Job, recipe: Recipe) -> str | None:
    """Mistake of data that a recipe does not train on, with the remedy; None where it does.

    The kind of data of which only the lengths are known is not checked.
    """
    kinds = KINDS[recipe.task]
    if job.padding == "packed" and recipe.task != "sft":
        return f"packing {NOT_PACKED}"
    lengths = job.lengths
    if lengths is None or lengths.kind is None:
        return None
    if lengths.kind in kinds:
        return _all_too_long(job, lengths) if recipe.is_scored else None
    tasks = [task for task in get_args(Task) if lengths.kind in KINDS[task]]
    remedies = [f"use task {' or '.join(tasks)}"] * bool(tasks) + [REMEDIES[kinds[0]]]
    return (
        f"task {recipe.task} trains on {NAMES[kinds[0]]}, but {lengths.source} holds "
        f"{NAMES[lengths.kind]} ({lengths.rendering}): {', or '.join(remedies)}"
    )


def _all_too_long(job: Job, lengths: DataLengths) -> str | None:
    shortest = lengths.histogram[0][0]
    if job.cutoff is None or shortest <= job.cutoff:
        return None
    return (
        f"cutoff {job.cutoff}: task reward leaves out longer pairs, and the shortest pair of "
        f"{lengths.source} has {shortest} tokens: raise the cutoff, or leave it out"
    )
