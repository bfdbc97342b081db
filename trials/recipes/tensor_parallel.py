"""Models and recipes that tensor parallelism is simulated and measured for."""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from trials.recipes.recipe import Recipe

SPLIT_FAMILIES = ("llama", "mistral", "qwen2")
"""Families whose plan in transformers (``base_model_tp_plan``) divides linear layers alone.

In other plans norms of queries and keys, fused layers or experts need more than the two styles.
"""
SPLIT_SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""Sizes in a configuration that the GPUs of a group divide."""
ELSEWHERE = "use fsdp2"


def not_split(recipe: Recipe, config: Mapping[str, Any], degree: int) -> str | None:
    """Reason why a model is not trained by ``tp``, with an alternative; None if it is.

    Args:
        recipe: recipe of the training.
        config: configuration of the model as transformers has it.
        degree: number of GPUs of a group.
    """
    return next(chain(_of_recipe(recipe), _of_model(config, degree)), None)


def _of_recipe(recipe: Recipe) -> Iterator[str]:
    if recipe.method == "lora":
        yield (
            "method lora is not simulated with tp: PEFT's adapters stay whole beside parts of a "
            "layer, whose results have other shapes: use method full, or fsdp2"
        )
    elif recipe.method != "full":
        yield f"method {recipe.method} is not simulated with tp: use method full, or ddp"
    if recipe.task != "sft":
        yield f"task {recipe.task} is not simulated with tp: {ELSEWHERE}"
    if recipe.liger_kernels:
        yield f"liger_kernels are not simulated with tp: leave them out, or {ELSEWHERE}"
    if recipe.trained_layers is not None:
        yield f"trained_layers is not simulated with tp: leave it out, or {ELSEWHERE}"


def _of_model(config: Mapping[str, Any], degree: int) -> Iterator[str]:
    family = config.get("model_type")
    if family not in SPLIT_FAMILIES:
        families = ", ".join(SPLIT_FAMILIES)
        yield f"model_type {family} is not simulated with tp, only {families}: {ELSEWHERE}"
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
