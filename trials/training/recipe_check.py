"""Comparison of a built model with its recipe. Pure, no torch."""

from collections.abc import Iterable, Iterator

from trials.recipes.fields import Attention, Dtype, Optimizer
from trials.recipes.recipe import Recipe
from trials.records.built import Built, ParameterCounts
from trials.records.cell import Cell

DTYPE_NAMES: dict[Dtype, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
OPTIMIZER_CLASSES: dict[Optimizer, str] = {
    "adamw": "torch.optim.adamw.AdamW",
    "adamw_foreach": "torch.optim.adamw.AdamW (foreach)",
    "adamw_loop": "torch.optim.adamw.AdamW (loop)",
    "adamw_8bit": "bitsandbytes.optim.adamw.AdamW8bit",
    "paged_adamw_8bit": "bitsandbytes.optim.adamw.PagedAdamW8bit",
    "paged_adamw_32bit": "bitsandbytes.optim.adamw.PagedAdamW32bit",
    "torchao_adamw_8bit": "torchao.optim.adam.AdamW8bit",
    "torchao_adamw_4bit": "torchao.optim.adam.AdamW4bit",
    "adafactor": "transformers.optimization.Adafactor",
    "sgd": "torch.optim.sgd.SGD",
    "muon": "trials.training.optimizers.muon.Muon",
}
OFFLOADED_OPTIMIZER_CLASS = "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam"
LIGER_LAYERS = ("rms_norm", "rope", "swiglu")
Compared = tuple[str, object, object]
"""A property, its value by the recipe, its value in the built model."""
# Operators that identify an attention kernel. A recipe with sdpa does not require that of sdpa:
# PyTorch may choose plain products there, and the record says so.
ATTENTION_OPERATORS: dict[Attention, str] = {
    "sdpa": "scaled_dot_product",
    "flash_attention_2": "flash_attn",
}


class RecipeError(RuntimeError):
    """The built model does not follow its recipe; the message lists the differences."""


def check_built(
    cell: Cell, built: Built, implied: ParameterCounts, *, is_offloaded: bool = False
) -> None:
    """Check that a built model and its step are those of the recipe.

    ``is_offloaded`` says whether the layout of several GPUs has the update on the host.

    Raises:
        RecipeError: they are not.
    """
    _raise_for(cell, departures(cell.recipe, built, implied, is_offloaded=is_offloaded))


def check_traced(cell: Cell, built: Built, implied: ParameterCounts) -> None:
    """Check the same for a model whose step was traced, but its loss, micro-batches and update.

    Raises:
        RecipeError: they are not.
    """
    _raise_for(cell, _lines(_compared_model(cell.recipe, built, implied)))


def _raise_for(cell: Cell, wrong: list[str]) -> None:
    if wrong:
        raise RecipeError(
            f"{cell.recipe.key} on {cell.model} did not take hold: " + "; ".join(wrong)
        )


def departures(
    recipe: Recipe, built: Built, implied: ParameterCounts, *, is_offloaded: bool = False
) -> list[str]:
    """Differences between a built model and its recipe (``check_built``), one line each."""
    is_offloaded = is_offloaded or recipe.offload_optimizer
    step = _compared_step(recipe, built, is_offloaded=is_offloaded)
    return _lines([*_compared_model(recipe, built, implied), *step])


def _lines(compared: Iterable[Compared]) -> list[str]:
    return [
        f"{name}: the recipe implies {expected}, the built model has {actual}"
        for name, expected, actual in compared
        if expected != actual
    ]


def _compared_model(recipe: Recipe, built: Built, implied: ParameterCounts) -> Iterator[Compared]:
    for name in ("total", "trainable", "four_bit", "eight_bit"):
        yield f"{name} parameters", getattr(implied, name), getattr(built.parameters, name)
    yield "quantisation", recipe.quantisation, ", ".join(built.quantisation) or None
    yield "dtypes", ", ".join(_dtypes(recipe)), ", ".join(built.dtypes)
    product_dtype = DTYPE_NAMES[recipe.compute_dtype]
    yield f"matrix products in {product_dtype}", True, product_dtype in built.product_dtypes
    yield "attention", recipe.attention, built.attention
    for attention, operator in ATTENTION_OPERATORS.items():
        ran = any(operator in kernel for kernel in built.kernels)
        if not (attention == recipe.attention == "sdpa"):
            yield f"{operator} operators", recipe.attention == attention, ran
    if recipe.packing:
        yield "attention within packed examples", True, built.separates_examples
    yield "experts", recipe.experts, built.experts
    yield "mamba", recipe.mamba, built.mamba
    yield "sequences per example", recipe.sequences, built.sequences
    yield "scores per sequence", 1 if recipe.is_scored else 0, built.scores
    has_pass = recipe.reference != "precomputed"
    yield "reference", recipe.reference if has_pass else None, built.reference
    scores_itself = recipe.task == "kto" or bool(recipe.generation_share)
    yield "the model's own log-probabilities", scores_itself, built.scores_itself
    trained = built.layers if recipe.trained_layers is None else abs(recipe.trained_layers)
    checkpointed = min(trained, built.layers) if recipe.gradient_checkpointing else 0
    yield "checkpointed layers", checkpointed, built.checkpointed_layers
    layers = LIGER_LAYERS if recipe.liger_kernels else ()
    yield "load-balancing loss", recipe.router_loss, built.router_loss
    yield "layers of liger-kernel", ", ".join(layers), ", ".join(built.liger_layers)
    offloaded = built.offloaded_activations > 0
    yield "activations on the host", recipe.activation_offloading, offloaded


def _compared_step(recipe: Recipe, built: Built, *, is_offloaded: bool) -> Iterator[Compared]:
    yield "gradient accumulation", recipe.micro_batches(1) > 1, built.micro_batches > 1
    yield "loss", recipe.loss, built.loss
    yield "compiled graphs", recipe.compile is not None, built.compiled_graphs > 0
    if recipe.max_grad_norm is not None and not is_offloaded:  # DeepSpeed has its own
        yield "norm of the gradients", True, "aten::linalg_vector_norm" in built.kernels
    wanted = OPTIMIZER_CLASSES[recipe.optimizer]
    yield (
        "optimizer",
        OFFLOADED_OPTIMIZER_CLASS if is_offloaded else wanted,
        built.optimizer,
    )


def _dtypes(recipe: Recipe) -> list[str]:
    """Names of the dtypes of weights and adapters without quantised weights, sorted."""
    base = "fp32" if recipe.kbit_preparation else recipe.base_dtype
    dtypes = {base, recipe.adapter_dtype or base}
    if recipe.trained_layers is not None:
        dtypes.add(recipe.trained_dtype)
    if recipe.has_value_head:
        dtypes.add("fp32")
    if recipe.dora and recipe.method == "qlora":
        dtypes.add("fp32")  # the magnitudes
    return sorted(DTYPE_NAMES[dtype] for dtype in dtypes)
