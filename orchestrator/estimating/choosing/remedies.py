"""Changes that make a job fit where it does not: the cheapest on each GPU."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from orchestrator.estimating.choosing.recipe_choice import (
    Estimating,
    Varied,
    best_recipes,
    fits,
    with_alternatives,
)
from orchestrator.estimating.estimate_records import Estimated
from orchestrator.estimating.question import Question, obstacle
from trials.recipes.fields import Method
from trials.simulation.simulated_cell import GIB

SHORTEST = 128  # tokens; shorter examples are another job
SMALLER_METHODS: Mapping[Method, tuple[Method, ...]] = {
    "full": ("lora", "qlora"),
    "lora": ("qlora",),
    "qlora": (),
}
WIDE = ("fp32", "fp32-mixed-load")
"""Precisions that hold frozen weights in fp32."""
Changes = dict[str, Any]


def with_remedies(
    rows: Sequence[Estimated], varied: Varied, estimated_jobs: Estimating
) -> list[Estimated]:
    """Add the cheapest change that fits to each estimate that does not fit.

    Changes under which training learns the same come first, then those that alter one thing, then
    two, then shorter examples: each where nothing before fits.

    Raises:
        TraceError: the model cannot be traced under a recipe.
    """
    remedied = {row.gpu.key: row for row in rows}
    weights = {row.gpu.key: _weights_gib(row) for row in rows}  # the least that was tried
    for changes_of in (_alike, _altered, _altered_twice, _shorter):
        misfits = [r for r in remedied.values() if not fits(r) and not r.estimate.alternatives]
        keeps_weights = changes_of in (_alike, _shorter)
        jobs = [
            (question, row.gpu)
            for row in misfits
            if not keeps_weights or weights[row.gpu.key] < row.estimate.usable_gib
            for changes in changes_of(row)
            if (question := _possible(row, changes, varied)) is not None
        ]
        for other in best_recipes(jobs, estimated_jobs):
            key = other.gpu.key
            weights[key] = min(weights[key], _weights_gib(other))
            if fits(other):
                remedied[key] = with_alternatives(remedied[key], [other])
    return list(remedied.values())


def _weights_gib(row: Estimated) -> float:
    """Memory of the model itself."""
    return float(row.cell.held.sizes.sum()) / GIB


def _possible(row: Estimated, changes: Changes, varied: Varied) -> Question | None:
    """The question after changes, with its own attention if the GPU lacks the other."""
    without = {name: value for name, value in changes.items() if name != "attention"}
    for some in (changes, without):
        question = varied(dict(row.question.changes) | some) if some else None
        if question is not None and obstacle(question, row.gpu) is None:
            return question
    return None


def _alike(row: Estimated) -> Iterator[Changes]:
    """Changes that save memory, and under which training learns the same."""
    changes = _frugal(row.question)
    for count in range(1, len(changes) + 1):
        yield from map(dict, combinations(changes.items(), count))


def _frugal(question: Question) -> Changes:
    """All changes that save memory, and under which training learns the same."""
    recipe, changes = question.recipe, Changes()
    if not recipe.gradient_checkpointing:
        changes["gradient_checkpointing"] = True
    if recipe.loss == "full-logits" and recipe.task == "sft":
        changes["loss"] = "chunked"
    if recipe.attention == "eager":
        changes["attention"] = "sdpa"
    if recipe.has_square_mask:
        changes["attention"] = "flash_attention_2"
    if isinstance(question.batch, int) and question.batch > 1 and recipe.effective_batch:
        changes["batch_size"] = "largest"
    return changes


def _altered(row: Estimated) -> Iterator[Changes]:
    """Changes that also alter one thing: the method, frozen weights, or the optimizer's state."""
    recipe, frugal = row.question.recipe, _frugal(row.question)
    for method in SMALLER_METHODS[recipe.method]:
        yield frugal | {"method": method}
    if recipe.method == "full":
        yield frugal | {"optimizer": "adamw_8bit"}
    elif recipe.precision in WIDE:
        yield frugal | {"precision": "bf16-mixed"}


def _altered_twice(row: Estimated) -> Iterator[Changes]:
    """Changes that alter the method and what it leaves in fp32."""
    frugal = _frugal(row.question)
    for method in SMALLER_METHODS[row.question.recipe.method]:
        yield frugal | {"method": method, "precision": "bf16-mixed"}


def _shorter(row: Estimated) -> Iterator[Changes]:
    """Shorter examples, with the smallest recipe."""
    question = row.question
    if question.workload.lengths is not None or question.recipe.packing:
        return
    *_, smallest = (_frugal(question), *_altered(row), *_altered_twice(row))
    seq_len = question.seq_len // 2
    while seq_len >= SHORTEST:
        yield smallest | {"seq_len": seq_len}
        seq_len //= 2
