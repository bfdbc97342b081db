"""Recipes and models that several GPUs are simulated and measured for."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from trials.recipes.fields import REENTRANT
from trials.recipes.parallel import WEIGHTS_DIVIDED, ZERO_STRATEGIES, Parallel
from trials.recipes.recipe import Recipe
from trials.recipes.zero_settings import BY_LAYOUT

SPLIT_FAMILIES = ("llama", "mistral", "qwen2", "smollm3")
"""Families whose plan in transformers (``base_model_tp_plan``) divides linear layers alone.

In other plans fused layers or experts need more than the two styles.
"""
SPLIT_WITH_ADAPTERS = (*SPLIT_FAMILIES, "qwen3")
"""Families that LoRA is divided for: the plan may also sum the gradients of norms of queries and
keys, which LoRA freezes."""
SPLIT_SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""Sizes in a configuration that the GPUs of a group divide."""
ELSEWHERE = "use fsdp2"


def unsupported(recipe: Recipe, config: Mapping[str, Any], parallel: Parallel) -> str | None:
    """Reason why a recipe is not simulated on several GPUs, with an alternative; None if it is.

    Args:
        recipe: recipe of the training.
        config: configuration of the language model as transformers has it.
        parallel: layout.
    """
    of_one_gpu = {
        "activation_offloading is not simulated on several GPUs: leave it out": (
            recipe.activation_offloading
        ),
        "gradient_checkpointing reentrant is not simulated on several GPUs: use true": (
            recipe.gradient_checkpointing == REENTRANT
        ),
        f"offload_optimizer is not for {parallel.strategy}: leave it out, and {BY_LAYOUT}": (
            recipe.offload_optimizer
        ),
    }
    reason = next((text for text, applies in of_one_gpu.items() if applies), None)
    if reason is not None or not parallel.is_sharded:
        return reason
    if parallel.degree is not None and (reason := _not_split(recipe, config, parallel.degree)):
        return reason
    name = parallel.strategy
    if parallel.zero_stage is not None:
        return _not_by_deepspeed(recipe, name, parallel.zero_stage)
    problems = {
        f"optimizer {recipe.optimizer} is not simulated with {name}: use adamw": (
            not simulates_optimizer(recipe.optimizer, name)
        ),
        f"quantisation int8 is not simulated with {name}: use nf4": recipe.quantisation == "int8",
        f"reference separate is not simulated with {name}: use precomputed or adapter-off": (
            recipe.reference == "separate"
        ),
        f"dora is not simulated with {name}: leave it out": recipe.dora,
        f"precision fp16 is not simulated with {name}: use bf16-mixed, or strategy ddp": (
            recipe.precision == "fp16"
        ),
    }
    return next((text for text, applies in problems.items() if applies), None)


def simulates_optimizer(optimizer: str, strategy: str) -> bool:
    """Whether the update by an optimizer is simulated with a strategy; ``auto`` may be ``ddp``."""
    if strategy in ZERO_STRATEGIES:
        return optimizer == "adamw"
    is_plain = optimizer.startswith(("adamw", "sgd")) and "8bit" not in optimizer
    return is_plain or strategy in {"ddp", "auto"}


def unmeasured(recipe: Recipe, config: Mapping[str, Any], parallel: Parallel) -> str | None:
    """Reason why a recipe is not measured on several GPUs, with an alternative; None if it is.

    Its arguments are those of ``unsupported``.
    """
    problems = {
        f"compile {recipe.compile} is not measured on several GPUs: leave it out": (
            recipe.compile is not None
        ),
        f"task {recipe.task} is not measured on several GPUs: use sft": recipe.task != "sft",
        f"method qlora is not measured with {parallel.strategy}: use lora, or strategy ddp": (
            recipe.method == "qlora" and parallel.shards > 1 and parallel.degree is None
        ),
    }
    reason = next((text for text, applies in problems.items() if applies), None)
    if reason is None and (reason := unsupported(recipe, config, parallel)) is not None:
        return reason.replace("not simulated", "not measured")
    return reason


def _not_split(recipe: Recipe, config: Mapping[str, Any], degree: int) -> str | None:
    """Reason why a model is not trained by ``tp``, with an alternative; None if it is.

    Args:
        recipe: recipe of the training.
        config: configuration of the model as transformers has it.
        degree: number of GPUs of a group.
    """
    families = SPLIT_WITH_ADAPTERS if recipe.method == "lora" else SPLIT_FAMILIES
    return next(chain(_of_recipe(recipe), _of_model(config, degree, families)), None)


def _not_by_deepspeed(recipe: Recipe, name: str, stage: int) -> str | None:
    """Reason why a recipe is not trained by a stage of ZeRO, with an alternative; None if it is.

    Args:
        recipe: recipe of the training.
        name: name of the strategy.
        stage: the stage.
    """
    divides_weights = stage == WEIGHTS_DIVIDED
    problems = {
        f"precision {recipe.precision} is not simulated with {name}, which holds weights in bf16 "
        "and updates a copy in fp32: use bf16": recipe.precision != "bf16",
        f"optimizer {recipe.optimizer} is not simulated with {name}: use adamw": (
            not simulates_optimizer(recipe.optimizer, name)
        ),
        f"adapter_dtype {recipe.adapter_dtype} is not simulated with {name}, which trains all "
        "weights in one dtype: leave it out": recipe.has_own_adapter_dtype,
        f"method qlora is not simulated with {name}: use deepspeed-zero2, or fsdp2": (
            divides_weights and recipe.method == "qlora"
        ),
        f"task {recipe.task} is not simulated with {name}: {ELSEWHERE}": recipe.task != "sft",
        f"loss {recipe.loss} is not simulated with {name}, which would gather the head for it: use "
        "full-logits, or deepspeed-zero2": divides_weights and recipe.loss != "full-logits",
        f"liger_kernels are not simulated with {name}: leave them out, or {ELSEWHERE}": (
            recipe.liger_kernels
        ),
        f"dora is not simulated with {name}: leave it out": recipe.dora,
        f"experts looped are not simulated with {name}: use grouped, or {ELSEWHERE}": (
            recipe.experts == "looped"
        ),
    }
    return next((text for text, applies in problems.items() if applies), None)


def _of_recipe(recipe: Recipe) -> Iterator[str]:
    if recipe.method == "qlora":
        yield "method qlora is not simulated with tp: use lora, or ddp"
    if recipe.task != "sft":
        yield f"task {recipe.task} is not simulated with tp: {ELSEWHERE}"
    if recipe.liger_kernels:
        yield f"liger_kernels are not simulated with tp: leave them out, or {ELSEWHERE}"
    if recipe.trained_layers is not None:
        yield f"trained_layers is not simulated with tp: leave it out, or {ELSEWHERE}"


def _of_model(config: Mapping[str, Any], degree: int, families: Sequence[str]) -> Iterator[str]:
    family = config.get("model_type")
    if family not in families:
        remedy = (
            f"use lora, or {ELSEWHERE.removeprefix('use ')}"
            if family in SPLIT_WITH_ADAPTERS
            else ELSEWHERE
        )
        names = ", ".join(families)
        yield f"model_type {family} is not simulated with tp, only {names}: {remedy}"
        return
    for name in SPLIT_SIZES:
        size = config.get(name)
        if not isinstance(size, int):
            yield f"tp needs {name}, which the model's configuration does not state: {ELSEWHERE}"
        elif size % degree:
            yield (
                f"{name} {size} of the model cannot be divided among the {degree} GPUs of a group "
                f"of tp: use a degree that divides it, or {ELSEWHERE.removeprefix('use ')}"
            )
