"""Kinds of training data against the tasks that train on them."""

from typing import get_args

from orchestrator.datasets.preference import Kind
from orchestrator.spec.job import NOT_PACKED, Job
from trials.recipes.fields import Task
from trials.recipes.recipe import Recipe

KINDS: dict[str, Kind] = {
    "sft": "texts",
    "dpo": "pairs",
    "orpo": "pairs",
    "reward": "pairs",
    "kto": "labelled",
}
"""Kind of data that a task trains on."""
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
    needed = KINDS.get(recipe.task)
    if job.padding == "packed" and needed != "texts":
        return f"packing {NOT_PACKED}"
    lengths = job.lengths
    if lengths is None or lengths.kind is None or needed is None or lengths.kind == needed:
        return None
    tasks = [task for task in get_args(Task) if KINDS.get(task) == lengths.kind]
    remedies = [f"use task {' or '.join(tasks)}"] * bool(tasks) + [REMEDIES[needed]]
    return (
        f"task {recipe.task} trains on {NAMES[needed]}, but {lengths.source} holds "
        f"{NAMES[lengths.kind]} ({lengths.rendering}): {', or '.join(remedies)}"
    )
