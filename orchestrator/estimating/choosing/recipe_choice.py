"""Choice of a recipe on each GPU: the cheapest of those that learn the same."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from gpu_catalog.gpu import Gpu
from orchestrator.estimating.choosing.memory_bound import cannot_fit
from orchestrator.estimating.estimate import by_objective
from orchestrator.estimating.estimate_records import Alternative, Estimated
from orchestrator.estimating.question import (
    EstimatedJob,
    Placement,
    Question,
    obstacle,
    placement,
)
from orchestrator.spec.job_tokens import drawn_lengths
from orchestrator.spec.recipe_options import RecipeOptions, recipe_text
from trials.recipes.recipe import Recipe
from trials.records.observation import Outcome

METHODS = ("lora", "qlora")
"""Methods that are tried where none is given. They do not learn the same."""

WORTHWHILE = 0.05
"""Least saving for which a recipe that TRL does not train by is named, or one with quantised
weights is preferred. It is an assumption: two recipes' times on one GPU share a part of their
errors, and no measurement says which; the 90 % interval of one time is 43 % below to 64 % above."""
MOST_DRAWN = 3  # recipes of a GPU that are estimated with drawn lengths; seconds each

Varied = Callable[[Mapping[str, Any]], Question | None]
"""The question with other options, by name; None where they contradict the given ones."""

Estimating = Callable[[Sequence[EstimatedJob]], list[Estimated]]


def recipes_to_try(options: RecipeOptions, varied: Varied) -> list[list[Question]]:
    """Recipes that an estimate tries where it may choose.

    Checkpointing saves memory and takes time, so both are tried. Each other axis has a choice than
    which no other that TRL trains by is more than 2 % cheaper
    (``tests/benchmarks/recipe_grid.py``): fused AdamW, the chunked loss, and attention by a fused
    kernel, for packed rows FlashAttention-2. Given fields stay.

    Returns:
        For each method with and without checkpointing, recipes in order of preference: the first
        that a GPU can run counts there.
    """
    # TRL's default is the chunked loss.
    is_plain = options.defaults == "plain" and options.given().get("task", "sft") == "sft"
    loss = "chunked" if is_plain else None
    return _combined(options, varied, (True, False), loss)


def sparing_recipes(options: RecipeOptions, varied: Varied) -> list[list[Question]]:
    """Recipes without checkpointing and with the loss that needs the least memory.

    TRL does not train by that loss, and axolotl does.

    Returns:
        For each method, recipes in order of preference; none where a given field excludes them.
    """
    given = options.given()
    if {"loss", "gradient_checkpointing"} & given.keys() or given.get("task", "sft") != "sft":
        return []
    return _combined(options, varied, (False,), "cce")


def _combined(
    options: RecipeOptions, varied: Varied, checkpointing: tuple[bool, ...], loss: str | None
) -> list[list[Question]]:
    given = options.given()
    kernels: tuple[str | None, ...] = (None, "eager")
    if given.get("packing"):
        kernels = ("flash_attention_2", *kernels)
    axes: dict[str, tuple[Any, ...]] = {
        "method": METHODS,
        "gradient_checkpointing": checkpointing,
        "loss": (loss,),
        "attention": kernels,
    }
    free = {name: values for name, values in axes.items() if name not in given}
    by_preference = [{"attention": kernel} for kernel in free.pop("attention", ())] or [{}]
    groups = [
        [varied(dict(zip(free, values, strict=True)) | last) for last in by_preference]
        for values in product(*free.values())
    ]
    return [[question for question in group if question is not None] for group in groups]


def origin_text(options: RecipeOptions, recipe: Recipe, *, finds_seq_len: bool) -> str:
    """Say in a line which recipes an estimate chooses among, or where its recipe comes from.

    Args:
        options: options of the recipe.
        recipe: the recipe they come to.
        finds_seq_len: whether the longest sequence is sought, for which no recipe is chosen.
    """
    if options.is_automatic and not finds_seq_len:
        return _choice_text(options, recipe)
    text, given = recipe_text(options, recipe), options.given()
    is_whole = options.recipe or options.defaults or options.recipe_source
    if finds_seq_len or is_whole or "gradient_checkpointing" in given:
        return text
    others = " ".join(f"--{name.replace('_', '-')}" for name in given if name != "method")
    return (
        f"{text}. With {others} given, checkpointing is no longer searched: --recipe auto searches "
        "it"
    )


def _choice_text(options: RecipeOptions, recipe: Recipe) -> str:
    given = options.given()
    methods: str = recipe.method
    if "method" not in given:
        rule = f"lora where qlora saves less than {WORTHWHILE:.0%}"
        methods = f"{' and '.join(METHODS)} ({rule})"
    switch = "" if "gradient_checkpointing" in given else ", with and without checkpointing"
    text = recipe_text(replace(options, recipe=None), recipe).removeprefix("Recipe: ")
    source, _, changes = text.removesuffix(f": {recipe.key}").partition(f" for {recipe.method}")
    of_methods = f"{methods}{switch}, from {source}{changes}"
    return f"Recipe: on each GPU the cheapest that fits of {of_methods}"


def jobs_on(
    groups: Iterable[Sequence[Question]], gpus: Sequence[Gpu]
) -> tuple[list[EstimatedJob], dict[str, str]]:
    """Jobs of each GPU: the first of each group that it can run.

    Returns:
        The jobs, and the reason against each GPU that can run none, by its key.
    """
    jobs: list[EstimatedJob] = []
    reasons: dict[str, str] = {}
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
            reasons[gpu.key] = first_reason
    return jobs, reasons


def best_recipes(
    jobs: Sequence[EstimatedJob],
    estimated_jobs: Estimating,
    sparing: Sequence[EstimatedJob] = (),
) -> list[Estimated]:
    """Estimate of the best recipe of each placement, with the others that fit as alternatives.

    ``sparing`` are alternatives that matter only where the best recipe is checkpointed for want of
    memory: those that are at least ``WORTHWHILE`` cheaper.

    Where lengths vary, the best by ``compared_recipes`` is estimated with runs of drawn lengths,
    and the next one where that does not fit, or costs more than the next one seemed to: in all
    ``MOST_DRAWN``, the last of which is the one with the largest batch where none fits yet.

    Raises:
        TraceError: the model cannot be traced under a recipe.
    """
    ranked = compared_recipes(jobs, estimated_jobs)
    spare = [
        (question, gpu)
        for question, gpu in sparing
        if _may_fit(question, ranked[placement(question, gpu)])
    ]
    spared = {
        place: [row for row in rows if _is_cheaper(row, ranked[place][0])]
        for place, rows in compared_recipes(spare, estimated_jobs).items()
    }
    if all(for_comparison(question) is question for question, _ in jobs):
        return [
            _with_runners_up([best, *sorted([*others, *spared.get(place, ())], key=_order)])
            for place, (best, *others) in ranked.items()
        ]
    whole = {(placement(*job), job[0].options_text()): job for job in jobs}
    drawn: dict[Placement, list[Estimated]] = {place: [] for place in ranked}
    undecided = list(ranked)
    while undecided:
        tried = [_taken(ranked[place], drawn[place]) for place in undecided]
        for row in estimated_jobs([whole[r.placement, r.question.options_text()] for r in tried]):
            drawn[row.placement] = sorted([*drawn[row.placement], row], key=_order)
        undecided = [
            place
            for place in undecided
            if ranked[place]
            and len(drawn[place]) < MOST_DRAWN
            and _order(drawn[place][0]) > _order(ranked[place][0])
        ]
    return [
        _with_runners_up(
            [best, *sorted([*others, *ranked[place], *spared.get(place, ())], key=_order)]
        )
        for place, (best, *others) in drawn.items()
    ]


def _may_fit(question: Question, rows: Sequence[Estimated]) -> bool:
    """Whether a recipe without checkpointing may fit where it may not with another loss.

    Args:
        question: the recipe, with another loss than those of the rows.
        rows: estimates of the GPU, the best first.
    """
    best = rows[0]
    return (
        fits(best)
        and best.question.recipe.gradient_checkpointing
        and best.question.recipe.method == question.recipe.method
        and any(
            not row.question.recipe.gradient_checkpointing
            and row.question.recipe.method == question.recipe.method
            and not _surely_fits(row)
            and not cannot_fit(question, row)
            for row in rows
        )
    )


def _is_cheaper(row: Estimated, best: Estimated) -> bool:
    """Whether a recipe surely fits and saves as much as makes it worthwhile."""
    if not _surely_fits(row):
        return False
    *length, cost, _ = by_objective(row)
    *best_length, best_cost, _ = by_objective(best)
    return length == best_length and worthwhile_below(cost) < best_cost


def worthwhile_below(cost: float) -> float:
    """Cost than which ``cost`` is ``WORTHWHILE`` lower.

    Args:
        cost: dollars or hours; negative where it is a speed, as ``by_objective`` has it.
    """
    return cost / (1 - math.copysign(WORTHWHILE, cost))


def _taken(rows: list[Estimated], drawn: Sequence[Estimated]) -> Estimated:
    """Take the recipe to estimate next with drawn lengths off those of a GPU, the best first."""
    is_last = len(drawn) == MOST_DRAWN - 1 and not fits(drawn[0])
    largest = max(range(len(rows)), key=lambda n: rows[n].estimate.max_batch_size)
    return rows.pop(largest if is_last else 0)


def compared_recipes(
    jobs: Sequence[EstimatedJob], estimated_jobs: Estimating
) -> dict[Placement, list[Estimated]]:
    """Estimates by their placement, the best first, without runs of drawn lengths.

    Those take many replays. Memory is that of the longest examples alone, a lower bound.

    Raises:
        TraceError: the model cannot be traced under a recipe.
    """
    on: defaultdict[Placement, list[Estimated]] = defaultdict(list)
    compared = [(for_comparison(question), gpu) for question, gpu in jobs]
    for row in sorted(estimated_jobs(compared) if jobs else [], key=_order):
        on[row.placement].append(row)
    return on


def for_comparison(question: Question) -> Question:
    """The question without draws of lengths and routings; itself where it has neither."""
    is_drawn = drawn_lengths(question.workload, question.seq_len) is not None
    if not is_drawn and not question.routing_draws:
        return question
    return replace(question, routing_draws=0, draws_lengths=False)


def _order(row: Estimated) -> tuple[float, ...]:
    """Order of a GPU's recipes: those that fit by price, then the others by the least memory.

    A recipe whose only batch may not fit, by the error of the memory, comes after the others.
    Quantised weights approximate the model, so they have to save ``WORTHWHILE``.
    """
    if fits(row):
        *before, cost, after = by_objective(row)
        if row.question.recipe.method == "qlora":
            cost = worthwhile_below(cost)
        return (0, not _surely_fits(row), *before, cost, after)
    return (1, row.estimate.reserved_gib)


def _surely_fits(row: Estimated) -> bool:
    """Whether a batch fits even by the error of the memory."""
    return fits(row) and row.estimate.max_batch_size_interval.low >= 1


def _with_runners_up(rows: Sequence[Estimated]) -> Estimated:
    best, *others = rows
    return with_alternatives(best, filter(fits, others))


def fits(row: Estimated) -> bool:
    """Whether the batch of an estimate fits."""
    return row.estimate.outcome is Outcome.FITS


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
        surely_fits=_surely_fits(other),
        learns_alike=all(before.get(n) == after.get(n) for n in {*before, *after} & ALTERING),
        usd=None if other.estimate.price is None else other.estimate.price.usd,
    )


ALTERING = {"method", "precision", "optimizer", "seq_len", "cutoff"}
"""Options whose change alters what training learns."""
