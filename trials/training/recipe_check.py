"""Comparison of a built model with its recipe. Pure, no torch."""

from collections.abc import Iterator

from trials.records.observation import Built, ParameterCounts
from trials.records.recipe import Attention, Dtype, Optimizer, Recipe

DTYPE_NAMES: dict[Dtype, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
OPTIMIZER_CLASSES: dict[Optimizer, str] = {
    "adamw": "torch.optim.adamw.AdamW",
    "adamw_foreach": "torch.optim.adamw.AdamW (foreach)",
    "adamw_loop": "torch.optim.adamw.AdamW (loop)",
    "adamw_8bit": "bitsandbytes.optim.adamw.AdamW8bit",
    "paged_adamw_8bit": "bitsandbytes.optim.adamw.PagedAdamW8bit",
    "paged_adamw_32bit": "bitsandbytes.optim.adamw.PagedAdamW32bit",
    "adafactor": "torch.optim.Adafactor",
    "sgd": "torch.optim.sgd.SGD",
}
OFFLOADED_OPTIMIZER_CLASS = "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam"
# Operators that identify an attention kernel. A recipe with sdpa does not require that of sdpa:
# PyTorch may choose plain products there, and the record says so.
ATTENTION_OPERATORS: dict[Attention, str] = {
    "sdpa": "scaled_dot_product",
    "flash_attention_2": "flash_attn",
}


class RecipeError(RuntimeError):
    """The built model does not follow its recipe; the message lists the differences."""


def departures(recipe: Recipe, built: Built, implied: ParameterCounts) -> list[str]:
    """Differences between a built model and its recipe, one line each; empty for none."""
    return [
        f"{name}: the recipe implies {expected}, the built model has {actual}"
        for name, expected, actual in _compared(recipe, built, implied)
        if expected != actual
    ]


def _compared(
    recipe: Recipe, built: Built, implied: ParameterCounts
) -> Iterator[tuple[str, object, object]]:
    for name in ("total", "trainable", "four_bit"):
        yield f"{name} parameters", getattr(implied, name), getattr(built.parameters, name)
    yield "dtypes", ", ".join(_dtypes(recipe)), ", ".join(built.dtypes)
    product_dtype = DTYPE_NAMES[recipe.compute_dtype]
    yield f"matrix products in {product_dtype}", True, product_dtype in built.product_dtypes
    accumulates = recipe.micro_batches(1) > 1
    yield "gradient accumulation", accumulates, built.micro_batches > 1
    if recipe.max_grad_norm is not None and not recipe.offload_optimizer:  # DeepSpeed has its own
        yield "norm of the gradients", True, "aten::linalg_vector_norm" in built.kernels
    yield "loss", recipe.loss, built.loss
    yield "attention", recipe.attention, built.attention
    for attention, operator in ATTENTION_OPERATORS.items():
        ran = any(operator in kernel for kernel in built.kernels)
        if not (attention == recipe.attention == "sdpa"):
            yield f"{operator} operators", recipe.attention == attention, ran
    yield "experts", recipe.experts, built.experts
    yield "mamba", recipe.mamba, built.mamba
    checkpointed = built.layers if recipe.gradient_checkpointing else 0
    yield "checkpointed layers", checkpointed, built.checkpointed_layers
    wanted = OPTIMIZER_CLASSES[recipe.optimizer]
    yield (
        "optimizer",
        OFFLOADED_OPTIMIZER_CLASS if recipe.offload_optimizer else wanted,
        built.optimizer,
    )


def _dtypes(recipe: Recipe) -> list[str]:
    """Names of the dtypes of weights and adapters without 4-bit weights, sorted."""
    base = "fp32" if recipe.kbit_preparation else recipe.base_dtype
    dtypes = {base, recipe.adapter_dtype or base}
    return sorted(DTYPE_NAMES[dtype] for dtype in dtypes)
