"""The options of ``estimate`` as what they mean."""

import argparse
import datetime as dt
from typing import Any

from pydantic import ValidationError

from gpu_catalog.catalog import Catalog, UnknownGpuError
from gpu_catalog.gpu import Gpu
from orchestrator.estimate import EstimateError, Question, plain
from orchestrator.sweep import Workload, written_out
from trials.models.model import find_model
from trials.recipe import Recipe

BATCH_LIMIT = 65_536  # the largest batch to try
LORA_RANK = 16


def asked_question(options: argparse.Namespace) -> Question:
    """What is asked of every GPU.

    Raises:
        EstimateError: options contradict one another; a line each.
        UnknownModelError: there is no such model.
    """
    return Question(
        model=find_model(options.model),
        recipe=_recipe(options),
        active_experts=options.active_experts,
        seq_len=options.seq_len,
        batch_size=options.batch_size,
        batch_limit=BATCH_LIMIT,
        workload=Workload(queries=options.queries, epochs=options.epochs),
        routing_draws=options.routing_draws or 0,
        expandable_segments=options.expandable_segments,
    )


def asked_gpus(options: argparse.Namespace, catalog: Catalog) -> list[Gpu]:
    """The GPUs that are meant, with the memory that is.

    Raises:
        UnknownGpuError: one is in no catalog, and its memory was not given.
    """
    if options.gpu == "all":
        found = [gpu for gpu in catalog.gpus if gpu.kind == "cuda"]
    else:
        keys = [key.strip() for key in options.gpu.split(",") if key.strip()]
        found = [_gpu(key, catalog, options.memory_gib) for key in dict.fromkeys(keys)]
    for gpu in found:
        if gpu.kind != "cuda":
            raise EstimateError(f"--gpu {gpu.key}: only CUDA GPUs are simulated; measure it")
    if options.memory_gib is None:
        return found
    usable = round(options.memory_gib * 2**30)
    return [gpu.model_copy(update={"usable_memory_bytes": usable}) for gpu in found]


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


def _recipe(options: argparse.Namespace) -> Recipe:
    fields: dict[str, Any] = {}
    if options.recipe is not None:
        try:
            fields = dict(written_out({"named": options.recipe}))  # type: ignore[call-overload]
        except ValueError as error:
            raise EstimateError(f"--recipe: {error}") from None
    given = {
        "method": options.method or (None if fields else "lora"),
        "lora_rank": options.lora_rank,
        "lora_targets": None if options.lora_targets is None else options.lora_targets.split(","),
        "gradient_checkpointing": None
        if options.gradient_checkpointing is None
        else options.gradient_checkpointing == "on",
        "attention": options.attention,
        "experts": options.experts,
        "optimizer": options.optimizer,
        "precision": options.precision,
    }
    fields |= {name: value for name, value in given.items() if value is not None}
    if fields["method"] != "full":
        fields.setdefault("lora_rank", LORA_RANK)
    try:
        return Recipe.model_validate(fields)
    except ValidationError as error:
        raise EstimateError(plain(error)) from None
