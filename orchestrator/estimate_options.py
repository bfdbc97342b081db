"""The options of ``estimate`` as what they mean."""

import argparse
import datetime as dt
from typing import Any

from pydantic import ValidationError

from gpu_catalog.catalog import Catalog, UnknownGpuError
from gpu_catalog.gpu import Gpu
from orchestrator.asked_workload import SOURCES
from orchestrator.estimate_question import EstimateError, Question, plain
from orchestrator.job_options import asked_constraints, with_overheads
from orchestrator.price_drift import PriceDrift
from orchestrator.step_seconds import Batch
from orchestrator.sweep import Workload, written_out
from orchestrator.workload_options import changed_workload, given_options
from orchestrator.workload_tokens import longest_query, longest_tokens
from trials.models.model import Model, find_model
from trials.recipe import Method, Precision, Recipe

JOB = Workload(queries=15_000, epochs=10)  # where nothing else is asked for
BATCH_LIMIT = 65_536  # the largest batch to try
LORA_RANK = 16
MOST_DRAWS = 100  # seconds each; the 95th percentile needs no more


def asked_question(options: argparse.Namespace, catalog: Catalog, today: dt.date) -> Question:
    """What is asked of every GPU.

    Args:
        options: those of ``estimate``.
        catalog: where offers are from.
        today: the day that prices have moved until.

    Raises:
        DataError: the data set cannot be read.
        EstimateError: options contradict one another; a line each.
        UnknownModelError: there is no such model.
    """
    model = find_model(options.model)
    workload = with_overheads(options, changed_workload(JOB, options, [model]))
    return Question(
        model=model,
        recipe=asked_recipe(options),
        active_experts=options.active_experts,
        seq_len=_seq_len(options, workload),
        batch=options.batch_size or _batch(workload),
        batch_limit=BATCH_LIMIT,
        workload=workload,
        constraints=asked_constraints(options, catalog),
        drift=PriceDrift(workload.overheads, today, seed=0, draws=0),
        routing_draws=_draws(options, model),
        expandable_segments=options.expandable_segments,
        by_default=_not_given(options),
    )


def _batch(workload: Workload) -> Batch:
    """Where larger batches are padded to more, the largest is seldom the fastest."""
    is_padded = workload.lengths is not None and workload.padding != "packed"
    return "fastest" if is_padded else "largest"


def _not_given(options: argparse.Namespace) -> tuple[str, ...]:
    """The options in whose place the job is a made-up one."""
    has_data = bool(given_options(options).keys() & set(SOURCES))
    given = {"--queries": has_data or options.queries is not None, "--epochs": options.epochs}
    return tuple(name for name, value in given.items() if not value)


def _seq_len(options: argparse.Namespace, workload: Workload) -> int:
    """Tokens of the longest row, which must fit: as asked, or as the data has them."""
    longest = longest_query(workload)
    if longest is None:
        if options.seq_len is None:
            raise EstimateError("--seq-len is missing: give it, or --dataset, whose queries tell")
        return int(options.seq_len)
    if options.seq_len is not None and options.seq_len < longest:
        raise EstimateError(
            f"--seq-len {options.seq_len}: queries have up to {longest} tokens: add "
            f"--cutoff {options.seq_len}, or leave --seq-len out"
        )
    return int(options.seq_len or longest_tokens(workload, longest))


def asked_gpus(options: argparse.Namespace, catalog: Catalog) -> list[Gpu]:
    """The GPUs that are meant, with the memory that is.

    Raises:
        UnknownGpuError: one is in no catalog, and its memory was not given.
    """
    if options.gpu == "all":
        found = [gpu for gpu in catalog.gpus if gpu.kind == "cuda"]
    else:
        keys = [key.strip() for key in options.gpu.split(",") if key.strip()]
        if "all" in keys:
            raise EstimateError(f"--gpu {options.gpu}: all has every GPU in it: give it alone")
        found = [_gpu(key, catalog, options.memory_gib) for key in dict.fromkeys(keys)]
    if not found:
        raise EstimateError(
            f"--gpu {options.gpu!r} names none: give keys of 'catalog gpus', or all"
        )
    for gpu in found:
        if gpu.kind != "cuda":
            raise EstimateError(f"--gpu {gpu.key}: only CUDA GPUs are simulated; measure it")
    if options.memory_gib is None:
        return found
    if len(found) > 1:
        raise EstimateError("--memory-gib is the memory of one GPU: name it with --gpu")
    return [_with_memory(found[0], options.memory_gib, is_known=found[0] in catalog.gpus)]


def _with_memory(gpu: Gpu, memory_gib: float, *, is_known: bool) -> Gpu:
    """A GPU with another memory than the catalog's is another GPU: of that name has no offer."""
    usable = round(memory_gib * 2**30)
    key = f"{gpu.key}-{memory_gib:g}GiB" if is_known else gpu.key
    return gpu.model_copy(update={"key": key, "usable_memory_bytes": usable})


def _gpu(key: str, catalog: Catalog, memory_gib: float | None) -> Gpu:
    try:
        return catalog.gpu(key)
    except UnknownGpuError as error:
        if memory_gib is None:
            raise UnknownGpuError(
                f"{error}; or give --memory-gib for one that is not in it"
            ) from None
    try:
        # Of a GPU that does not exist yet there is memory to tell, and no time.
        return Gpu(
            key=key,
            kind="cuda",
            device_names=(key,),
            source="asked for",
            recorded=dt.date.today(),  # noqa: DTZ011 - a note, not a time
        )
    except ValidationError as error:
        raise EstimateError(f"--gpu {key!r}: {plain(error)}") from None


def _draws(options: argparse.Namespace, model: Model) -> int:
    if options.routing_draws is None:
        return 0
    if model.experts is None:
        raise EstimateError(f"--routing-draws: {model.name} has no experts: leave it out")
    if options.routing_draws > MOST_DRAWS:
        raise EstimateError(
            f"--routing-draws {options.routing_draws}: each is traced: give at most {MOST_DRAWS}"
        )
    return int(options.routing_draws)


def asked_recipe(
    options: argparse.Namespace, *, method: Method = "lora", precision: Precision | None = None
) -> Recipe:
    """The recipe that options state.

    Args:
        options: those of a recipe.
        method: unless one is stated, or a named recipe.
        precision: alike; absent for the recipe's own.

    Raises:
        EstimateError: there is no such recipe; a line for each reason.
    """
    fields: dict[str, Any] = {}
    if options.recipe is not None:
        try:
            fields = dict(written_out({"named": options.recipe}))  # type: ignore[call-overload]
        except ValueError as error:
            raise EstimateError(f"--recipe: {error}") from None
    given = {
        "method": options.method or (None if fields else method),
        "lora_rank": options.lora_rank,
        "lora_targets": None if options.lora_targets is None else options.lora_targets.split(","),
        "gradient_checkpointing": None
        if options.gradient_checkpointing is None
        else options.gradient_checkpointing == "on",
        "attention": options.attention,
        "experts": options.experts,
        "optimizer": options.optimizer,
        "precision": options.precision or (None if fields else precision),
    }
    fields |= {name: value for name, value in given.items() if value is not None}
    if fields["method"] != "full":
        fields.setdefault("lora_rank", LORA_RANK)
    try:
        return Recipe.model_validate(fields)
    except ValidationError as error:
        raise EstimateError(plain(error)) from None
