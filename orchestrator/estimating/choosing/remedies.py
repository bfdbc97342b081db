"""Changes that make a job fit where it does not: the cheapest on each GPU."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import combinations
from operator import or_
from typing import Any

from orchestrator.estimating.choosing.memory_bound import cannot_fit
from orchestrator.estimating.choosing.recipe_choice import (
    Estimating,
    best_recipes,
    compared_recipes,
    fits,
    with_alternatives,
)
from orchestrator.estimating.estimate import by_objective
from orchestrator.estimating.estimate_records import Estimated
from orchestrator.estimating.estimate_request import EFFECTIVE_BATCH
from orchestrator.estimating.longest_sequence import MULTIPLE
from orchestrator.estimating.question import EstimatedJob, Question, obstacle
from trials.recipes.fields import Method
from trials.recipes.optional_packages import importable_extras
from trials.records.compatibility import EAGER_FAMILIES

SMALLER_METHODS: Mapping[Method, tuple[Method, ...]] = {
    "full": ("lora", "qlora"),
    "lora": ("qlora",),
    "qlora": (),
}
WIDE = ("fp32", "fp32-mixed-load")
"""Precisions that hold frozen weights in fp32."""
Changes = dict[str, Any]
WithOptions = Callable[[Question, Changes], Question | None]
"""A question with other options, by name; None where they contradict the given ones."""
Alteration = Callable[[Question], Iterable[Changes]]
"""Changes of one kind, each of which the settings go with."""
SPARING_LOSS: Mapping[str, Changes] = {
    "axolotl": {"loss": "cce"},
    "LLaMA-Factory": {"loss": "liger", "liger_kernels": True},
    "TRL": {"loss": "chunked"},
}
"""Loss by which each trainer computes only a part of the logits at once."""


def with_remedies(  # noqa: PLR0913 - settings by name
    rows: Sequence[Estimated],
    varied: WithOptions,
    estimated_jobs: Estimating,
    shorter_jobs: Estimating,
    *,
    alterations: Sequence[Alteration],
    trainer: str,
) -> list[Estimated]:
    """Add the cheapest change that fits to each estimate that does not fit.

    Each alteration is tried where none before fits.

    Args:
        rows: estimates.
        varied: a row's question with other options.
        estimated_jobs: estimates questions with examples as long as they are.
        shorter_jobs: estimates questions with shorter examples.
        alterations: kinds of changes to try, in this order.
        trainer: name of the trainer, which decides on the loss to try.

    Raises:
        TraceError: the model cannot be traced under a recipe.
    """
    remedied = {row.placement: row for row in rows}
    weights = {row.placement: row.weights_gib for row in rows}  # the least that was tried
    for altered in alterations:
        estimating = shorter_jobs if altered is _shorter else estimated_jobs
        misfits = [r for r in remedied.values() if not fits(r) and not r.estimate.alternatives]
        if altered not in {_altered, _altered_twice, _laid_out}:  # the others keep the weights
            misfits = [r for r in misfits if weights[r.placement] < r.estimate.usable_gib]
        places = {(row.gpu.key, row.question.ranks): row.placement for row in misfits}
        jobs: list[EstimatedJob] = []
        most = _jobs(misfits, altered, partial(_all_settings, trainer=trainer), varied)
        for (_, layout, _), others in compared_recipes(most, estimating).items():
            place = places[others[0].gpu.key, others[0].question.ranks]
            if altered is not _laid_out:
                weights[place] = min(weights[place], *(row.weights_gib for row in others))
            # What does not fit with all settings does not fit with some of them.
            if fits(others[0]):
                tokens = others[0].estimate.seq_len
                selections = partial(some_settings, trainer=trainer)
                some = _jobs([remedied[place]], altered, selections, varied)
                jobs += [
                    (question, gpu)
                    for question, gpu in some
                    if (question.seq_len, question.parallel) == (tokens, layout)
                    and not cannot_fit(question, remedied[place])
                ]
        fitting = filter(fits, best_recipes(jobs, estimating))
        for other in sorted(fitting, key=by_objective, reverse=True):  # the best counts
            place = places[other.gpu.key, other.question.ranks]
            remedied[place] = with_alternatives(remedied[place], [other])
    return list(remedied.values())


def largest_misfits(rows: Iterable[Estimated]) -> list[Estimated]:
    """The largest number of each GPU of which no number fits: there, all changes are tried."""
    by_number = sorted(rows, key=lambda row: row.estimate.gpus)
    fitting = {row.gpu.key for row in by_number if fits(row)}
    largest = {row.gpu.key: row for row in by_number}
    return [row for key, row in largest.items() if key not in fitting]


def is_fragmented(row: Estimated) -> bool:
    """Whether a job would fit if the allocator reserved no more than is in use."""
    estimate = row.estimate
    return not fits(row) and estimate.peak_gib < estimate.usable_gib < estimate.needed_gib


def _jobs(
    rows: Iterable[Estimated],
    altered: Alteration,
    settings: Callable[[Question], Iterable[Changes]],
    varied: WithOptions,
) -> list[EstimatedJob]:
    """Jobs with each alteration and each of the settings that go with it."""
    return [
        (question, row.gpu)
        for row in rows
        for alteration in altered(row.question)
        for some in settings(row.question)
        if (question := _possible(row, alteration | some, varied)) is not None
    ]


def _possible(row: Estimated, changes: Changes, varied: WithOptions) -> Question | None:
    """The question after changes, with its own attention if the GPU lacks the other."""
    if changes.get("strategy") == "tp" and row.weights_gib >= row.estimate.usable_gib:
        return None  # it divides no more of the weights
    without = {name: value for name, value in changes.items() if name != "attention"}
    for some in (changes, without):
        question = varied(row.question, dict(row.question.changes) | some) if some else None
        if question is not None and obstacle(question, row.gpu) is None:
            return question
    return None


def _settings(question: Question, trainer: str) -> Iterator[Changes]:
    """Settings that save memory for some time, and under which training learns the same."""
    recipe = question.recipe
    if not recipe.gradient_checkpointing:
        yield {"gradient_checkpointing": True}
    if recipe.loss == "full-logits" and recipe.task == "sft":
        yield SPARING_LOSS[trainer]
    if isinstance(question.batch, int) and question.batch > 1:
        yield {"batch_size": "fastest"} | _same_effective_batch(question, question.batch)
    if not question.expandable_segments:
        yield {"expandable_segments": True}


def _kernel(question: Question) -> Changes:
    """Attention that saves memory and time."""
    if question.has_square_mask:
        return {"attention": "flash_attention_2"}
    has_other = question.model.family not in EAGER_FAMILIES
    return {"attention": "sdpa"} if question.recipe.attention == "eager" and has_other else {}


def _same_effective_batch(question: Question, batch_size: int) -> Changes:
    """Options that keep the examples of an optimizer step with other micro-batches."""
    recipe = question.recipe
    if recipe.effective_batch is None:
        accumulated = {"gradient_accumulation": 1} if recipe.gradient_accumulation > 1 else {}
        return {"effective_batch": batch_size * recipe.gradient_accumulation} | accumulated
    if question.assumes_batch and recipe.effective_batch != EFFECTIVE_BATCH:
        return {"effective_batch": recipe.effective_batch}
    return {}


def _all_settings(question: Question, trainer: str) -> Iterator[Changes]:
    """All settings together, with and without expandable segments.

    Those divide memory into larger pages, of which a small step may waste more than it saves.
    """
    together = reduce(or_, _settings(question, trainer), _kernel(question))
    yield {name: value for name, value in together.items() if name != "expandable_segments"}
    if "expandable_segments" in together:
        yield together


def some_settings(question: Question, trainer: str) -> Iterator[Changes]:
    """Every selection of the settings, the smallest first."""
    settings = list(_settings(question, trainer))
    for count in range(len(settings) + 1):
        yield from (reduce(or_, some, _kernel(question)) for some in combinations(settings, count))


def lacks_offloading(row: Estimated) -> bool:
    """Whether activations on the host were not tried, because TRL is not installed."""
    return (
        not fits(row)
        and not any(change.learns_alike for change in row.estimate.alternatives)
        and _can_offload(row.question)
        and not _is_offloading_simulated()
        and row.weights_gib < row.estimate.usable_gib
    )


def can_leave_to_host(row: Estimated) -> bool:
    """Whether the host could hold weights and optimizer, which no change tries on one GPU."""
    recipe = row.question.recipe  # by DeepSpeed alone, which does not divide weights of 4 bits
    return row.question.parallel is None and recipe.task == "sft" and recipe.method != "qlora"


def _can_offload(question: Question) -> bool:
    """Whether activations of the recipe may move to the host, and do not yet."""
    recipe = question.recipe
    return recipe.task == "sft" and not recipe.activation_offloading


def _is_offloading_simulated() -> bool:
    return "trl" in importable_extras()


def _alike(question: Question) -> Iterator[Changes]:
    """No alteration: the settings alone."""
    del question
    yield {}


def _offloaded(question: Question) -> Iterator[Changes]:
    """Activations on the host, which takes TRL to simulate, and longer: all layers are traced."""
    if _can_offload(question) and _is_offloading_simulated():
        yield {"activation_offloading": True}


def _laid_out(question: Question) -> Iterator[Changes]:
    """The same GPUs with parts of each layer, which divide activations, or shards on the host."""
    layout = question.parallel
    if layout is None or layout.offload is not None or question.recipe.task != "sft":
        return
    if layout.gpus_per_node > 1 and layout.strategy != "tp":  # whose degree may be given
        yield {"strategy": "tp"}
    yield {"strategy": "hsdp" if layout.strategy == "hsdp" else "fsdp2", "offload": "all"}


def _altered(question: Question) -> Iterator[Changes]:
    """One thing that alters training: the method, frozen weights, or the optimizer's state."""
    recipe = question.recipe
    for method in SMALLER_METHODS[recipe.method]:
        yield {"method": method}
    if recipe.method == "full":
        yield {"optimizer": "adamw_8bit"}
    elif recipe.precision in WIDE:
        yield {"precision": "bf16-mixed"}


def _altered_twice(question: Question) -> Iterator[Changes]:
    """The method, and what it leaves in fp32."""
    for method in SMALLER_METHODS[question.recipe.method]:
        yield {"method": method, "precision": "bf16-mixed"}


def _smallest(question: Question) -> Changes:
    """All that alters training but its examples."""
    *_, smallest = ({}, *_altered(question), *_altered_twice(question))
    return smallest


def _smallest_offloaded(question: Question) -> Iterator[Changes]:
    """Activations on the host, and all that alters training but its examples."""
    for offloading in _offloaded(question):
        yield _smallest(question) | offloading


def _shorter(question: Question) -> Iterator[Changes]:
    """Shorter examples, truncated where the data have their lengths, and the smallest recipe."""
    if question.recipe.packing:
        return
    name = "seq_len" if question.workload.lengths is None else "cutoff"
    tokens = question.seq_len // 2
    while tokens >= MULTIPLE:
        yield _smallest(question) | {name: tokens // MULTIPLE * MULTIPLE}
        tokens //= 2


SETTINGS: Sequence[Alteration] = (_alike,)
"""Changes under which training learns the same, and which take no trace of all layers."""
ON_GPU: Sequence[Alteration] = (*SETTINGS, _altered, _altered_twice, _shorter)
"""These first, then those that alter one thing, then two, then shorter examples."""
ALL_CHANGES: Sequence[Alteration] = (
    *(_alike, _laid_out, _offloaded),
    *(_altered, _altered_twice, _smallest_offloaded, _shorter),
)
"""The same with other layouts of several GPUs, and with activations on the host, for which all
layers are traced."""
