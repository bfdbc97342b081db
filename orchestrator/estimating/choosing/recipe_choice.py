"""Choice of a recipe on each GPU: the cheapest of those that learn the same."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from fitting.families.cell_step_time import Batch
from gpu_catalog.gpu import Gpu
from orchestrator.estimating.estimate import by_objective
from orchestrator.estimating.estimate_records import Alternative, Estimated
from orchestrator.estimating.question import EstimatedJob, Question, obstacle
from orchestrator.spec.job import PACKED
from orchestrator.spec.recipe_options import RecipeOptions, recipe_text
from trials.recipes.recipe import Recipe
from trials.records.observation import Outcome

METHODS = ("lora", "qlora")
"""Methods that are tried where none is given. They do not learn the same."""

Varied = Callable[[Mapping[str, Any]], Question | None]
"""The question with other options, by name; None where they contradict the given ones."""


Estimating = Callable[[Sequence[EstimatedJob]], list[Estimated]]


def recipes_to_try(options: RecipeOptions, varied: Varied) -> list[list[Question]]:
    """Recipes that an estimate tries where it may choose.

    Checkpointing saves memory and takes time, so both are tried. The other axes have a choice that
    no equal one beats: fused AdamW, the chunked loss, and attention by a fused kernel, for packed
    rows FlashAttention-2. Given fields stay.

    Returns:
        For each method with and without checkpointing, recipes in order of preference: the first
        that a GPU can run counts there.
    """
    given = options.given()
    kernels: tuple[str | None, ...] = (None, "eager")
    if given.get("packing"):
        kernels = ("flash_attention_2", *kernels)
    # TRL's default is the chunked loss.
    is_plain = options.defaults == "plain" and given.get("task", "sft") == "sft"
    axes: dict[str, tuple[Any, ...]] = {
        "method": METHODS,
        "gradient_checkpointing": (True, False),
        "loss": ("chunked",) if is_plain else (None,),
        "attention": kernels,
    }
    free = {name: values for name, values in axes.items() if name not in given}
    by_preference = [{"attention": kernel} for kernel in free.pop("attention", ())] or [{}]
    groups = [
        [varied(dict(zip(free, values, strict=True)) | last) for last in by_preference]
        for values in product(*free.values())
    ]
    return [[question for question in group if question is not None] for group in groups]


def choice_text(options: RecipeOptions, recipe: Recipe) -> str:
    """Say in a line which recipes an estimate chooses among."""
    given = options.given()
    methods = recipe.method if "method" in given else " and ".join(METHODS)
    switch = "" if "gradient_checkpointing" in given else ", with and without checkpointing"
    text = recipe_text(replace(options, recipe=None), recipe).removeprefix("Recipe: ")
    source, _, changes = text.removesuffix(f": {recipe.key}").partition(f" for {recipe.method}")
    of_methods = f"{methods}{switch}, from {source}{changes}"
    return f"Recipe: on each GPU the cheapest that fits of {of_methods}"


def jobs_on(
    groups: Iterable[Sequence[Question]], gpus: Sequence[Gpu]
) -> tuple[list[EstimatedJob], list[str]]:
    """Jobs of each GPU: the first of each group that it can run.

    Returns:
        The jobs, and the reason against each GPU that can run none.
    """
    jobs: list[EstimatedJob] = []
    reasons = []
    for gpu in gpus:
        first_reason, count = None, len(jobs)
        for group in groups:
            for question in group:
                reason = obstacle(question, gpu)
                if reason is None:
                    jobs.append((question, gpu))
                    break
                first_reason = first_reason or reason
        if len(jobs) == count and first_reason is not None:
            reasons.append(first_reason)
    return jobs, reasons


def best_recipes(jobs: Sequence[EstimatedJob], estimated_jobs: Estimating) -> list[Estimated]:
    """Estimate of the best recipe of each GPU.

    Where lengths vary, recipes are compared at the longest, because a run of drawn lengths takes
    many replays; only the best is estimated with them.

    Raises:
        TraceError: the model cannot be traced under a recipe.
    """
    alone = len({gpu.key for _, gpu in jobs}) == len(jobs)
    compared = jobs if alone else [(_for_comparison(question), gpu) for question, gpu in jobs]
    best = best_on_each(estimated_jobs(compared)) if jobs else []
    if all(one is other for (one, _), (other, _) in zip(jobs, compared, strict=True)):
        return best
    whole = {(gpu.key, question.options_text()): (question, gpu) for question, gpu in jobs}
    return estimated_jobs([whole[row.gpu.key, row.question.options_text()] for row in best])


def _for_comparison(question: Question) -> Question:
    """The question with examples of the longest length, and without draws of routings.

    The question itself where it has neither.
    """
    job = question.workload
    varies = job.lengths is not None and job.padding not in PACKED
    if varies:
        job = job.model_copy(update={"lengths": None, "padding": "longest"})
        batch: Batch = question.batch if isinstance(question.batch, int) else "largest"
        return replace(question, workload=job, batch=batch, routing_draws=0)
    return replace(question, routing_draws=0) if question.routing_draws else question


def best_on_each(estimated: Iterable[Estimated]) -> list[Estimated]:
    """The cheapest of each GPU's recipes that fits, with the others that fit as alternatives.

    A recipe whose only batch may not fit, by the error of the memory, comes after the others. Where
    none fits, the one that needs the least memory stays.
    """
    on: defaultdict[str, list[Estimated]] = defaultdict(list)
    for row in estimated:
        on[row.gpu.key].append(row)
    best = []
    for rows in on.values():
        fitting = sorted(filter(fits, rows), key=lambda row: (_is_doubtful(row), by_objective(row)))
        if fitting:
            best.append(with_alternatives(fitting[0], fitting[1:]))
        else:
            best.append(min(rows, key=lambda row: row.estimate.reserved_gib))
    return best


def fits(row: Estimated) -> bool:
    """Whether the batch of an estimate fits."""
    return row.estimate.outcome is Outcome.FITS


def _is_doubtful(row: Estimated) -> bool:
    return row.estimate.max_batch_size_interval.low < 1


def with_alternatives(row: Estimated, others: Iterable[Estimated]) -> Estimated:
    """An estimate with other recipes on the same GPU as its alternatives."""
    alternatives = tuple(_alternative(row, other) for other in others)
    estimate = row.estimate.model_copy(update={"alternatives": alternatives})
    return replace(row, estimate=estimate)


def _alternative(row: Estimated, other: Estimated) -> Alternative:
    before, after = row.question.changes, other.question.changes
    fields = (
        "method",
        "recipe",
        "batch_size",
        "micro_batches",
        "reserved_gib",
        "step_seconds",
        "hours",
    )
    return Alternative(
        **other.estimate.model_dump(include=set(fields)),
        options=other.question.options_text(),
        learns_alike=all(before.get(n) == after.get(n) for n in {*before, *after} & ALTERING),
        usd=None if other.estimate.price is None else other.estimate.price.usd,
    )


ALTERING = {"method", "precision", "optimizer", "seq_len"}
"""Options whose change alters what training learns."""
