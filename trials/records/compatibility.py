"""Compatibility of recipes with models and devices, and defaults that depend on them. No torch."""

from collections.abc import Collection

from gpu_catalog.gpu import Gpu
from trials.recipes.fields import FUSED_LOSSES, Experts
from trials.recipes.optional_packages import EXTRAS
from trials.recipes.recipe import Recipe
from trials.records.model import Model

LIGER_FAMILIES = ("granite", "llama", "mistral", "qwen2", "qwen3", "smollm3")
"""Families whose layers liger-kernel replaces by RMSNorm, rotary embedding and SwiGLU alone."""
MASKED_IMAGE_FAMILIES = ("gemma3", "paligemma", "shieldgemma2")
"""Families of one size of image whose image tokens attend to one another in both directions."""
GRID_FAMILIES = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v"),
    *("glm4v_moe", "glm46v", "glm_ocr", "exaone4_5", "paddleocr_vl", "ernie4_5_vl_moe"),
)
"""Families whose towers take images of any size, as patches with a grid."""
UNQUANTISED_TOWER_FAMILIES = ("ernie4_5_vl_moe",)
"""Families whose tower fails with quantised matrices, which bitsandbytes' integration makes."""
PADDED_FAMILIES = {"gemma4": 280, "lfm2_vl": 256}
"""Families whose processors pad images of any size to as many tokens, which is the most \
(max_soft_tokens; max_image_tokens)."""
DIVIDED_FAMILIES = ("llava_next", "llava_next_video", "llava_onevision")
"""Families that take an image of any size in tiles, and the whole of it as another tile."""
PACKED_IMAGES = "pixtral"
"""Family of a tower that attends to all images of a batch, of any size, as one sequence."""
ALL_TOKENS_FAMILIES = ("llama4", "llama4_text")
"""Families whose class multiplies all tokens by every expert, and has no other implementation."""
LOGITS_FAMILIES = ALL_TOKENS_FAMILIES
"""Families whose class returns logits without hidden states: TRL's loss in chunks fails on them."""
ROUTER_LOSS_FAMILIES = (
    *("ernie4_5_moe", "flex_olmo", "gpt_oss", "jamba", "laguna", "mellum", "minimax"),
    *("minimax_m2", "minimax_m3_vl_text", "mixtral", "olmoe", "qwen2_moe", "qwen3_5_moe_text"),
    *("qwen3_moe", "qwen3_next", "qwen4_exp_text"),
    *("qwen3_5_moe", "qwen3_vl_moe"),  # with images
)
"""Families to whose loss TRL's trainers add transformers' load-balancing loss by default.

Others whose configurations have a coefficient lack a part: TRL's fused head stops at them, they
return no router logits, or transformers has no such loss for them.
"""
EAGER_FAMILIES = ("gpt_oss",)
"""Families without scaled_dot_product_attention in transformers, which loads them as eager."""
AMPERE = 8.0  # the first compute capability with bf16, FlashAttention-2 and the grouped product


def with_defaults(recipe: Recipe, model: Model, gpu: Gpu) -> Recipe:
    """Fill in every axis of a recipe that applies to this model on this device.

    Axes without a counterpart in the model (attention of a pure Mamba model, experts of a dense
    one) become absent, so that one recipe serves several models of a sweep.
    """
    targets = recipe.lora_targets
    if recipe.method != "full" and targets is None:
        targets = _default_targets(recipe, model)
    splits = recipe.method == "qlora" or bool(set(targets or ()) - {"attention", "router"})
    is_looped = splits and not recipe.quantised_experts and model.family not in ALL_TOKENS_FAMILIES
    experts = recipe.experts or ("looped" if is_looped else fused_experts(model))
    kernel = "eager" if model.family in EAGER_FAMILIES else "sdpa"
    mamba = recipe.mamba or ("mamba-ssm" if gpu.kind == "cuda" else "reference")
    return Recipe.model_validate(
        recipe.model_dump()
        | {
            "lora_targets": targets,
            "attention": (recipe.attention or kernel) if model.has_attention else None,
            "experts": experts if model.experts is not None else None,
            "quantised_experts": recipe.quantised_experts and model.experts is not None,
            "mamba": mamba if model.has_mamba else None,
            "router_loss": adds_router_loss(recipe, model),
        }
    )


def fused_experts(model: Model) -> Experts:
    """Product of experts that transformers' class has by default, on fused matrices."""
    return "all-tokens" if model.family in ALL_TOKENS_FAMILIES else "grouped"


def _default_targets(recipe: Recipe, model: Model) -> tuple[str, ...]:
    if model.experts is None:
        return ("all-linear",)
    # Fused experts leave no linear layers for adapters.
    has_other = model.family in ALL_TOKENS_FAMILIES
    is_fused = recipe.has_fused_experts or recipe.quantised_experts or has_other
    return ("attention",) if is_fused else ("experts", "router")


def impossible_on_model(recipe: Recipe, model: Model) -> str | None:
    """Reason why no device can fine-tune this model with this recipe; None when one can."""
    if model.has_vision and recipe.task != "sft":
        return f"task {recipe.task}: not estimated with images: use sft"
    if model.has_vision and recipe.packing:
        return "packing: TRL does not pack examples with images: leave packing out"
    if recipe.liger_kernels and model.family not in LIGER_FAMILIES:
        return (
            f"liger_kernels: not supported for {model.name} ({model.family}), but for "
            f"{', '.join(LIGER_FAMILIES)}: leave liger_kernels out"
        )
    if recipe.router_loss is True and not has_router_loss(model):
        return f"router_loss: {_without_router_loss(model)}: leave router_loss out"
    return (
        _failing_in_class(recipe, model)
        or _impossible_experts(recipe, model)
        or _impossible_on_mamba(recipe, model)
        or _impossible_targets(recipe, model)
    )


def _failing_in_class(recipe: Recipe, model: Model) -> str | None:
    """Reason why a step fails in transformers' class of a model; None if none is known."""
    if model.family in UNQUANTISED_TOWER_FAMILIES and recipe.method == "qlora":
        return (
            f"method qlora is not possible with {model.name} ({model.family}): its tower casts "
            "pixels to the dtype of its first matrix, which is quantised, and fails: use lora or "
            "full"
        )
    if model.family in LOGITS_FAMILIES and recipe.loss in FUSED_LOSSES:
        outcome = "TRL's trainer fails" if recipe.loss == "chunked" else "that is not simulated"
        return (
            f"loss {recipe.loss}: transformers' class of {model.name} ({model.family}) returns "
            f"logits without the hidden states that it takes, and {outcome}: use full-logits"
        )
    return None


def _impossible_experts(recipe: Recipe, model: Model) -> str | None:
    if recipe.experts is None or model.experts is None:
        return None
    if model.family in ALL_TOKENS_FAMILIES and recipe.experts != "all-tokens":
        return (
            f"experts {recipe.experts}: transformers has one implementation of those of "
            f"{model.name} ({model.family}), which multiplies all tokens by every expert: leave "
            "experts out, or use all-tokens"
        )
    if model.family not in ALL_TOKENS_FAMILIES and recipe.experts == "all-tokens":
        return (
            f"experts all-tokens: {model.name} ({model.family}) has no such implementation in "
            "transformers: leave experts out, or use grouped or looped"
        )
    return None


def has_router_loss(model: Model) -> bool:
    """Whether TRL's trainers add the load-balancing loss of a model's routers by default."""
    is_off = model.text.get("router_aux_loss_coef") == 0
    return model.experts is not None and model.family in ROUTER_LOSS_FAMILIES and not is_off


def adds_router_loss(recipe: Recipe, model: Model) -> bool:
    """Whether the loss of a model under a recipe includes that of its routers."""
    if recipe.router_loss == "auto":
        # ORPOTrainer adds it only where the configuration of the model asks for it, LLaMA-Factory's
        # trainers never do.
        adds = recipe.task in {"sft", "grpo"} or recipe.loss == "chunked"
        return has_router_loss(model) and adds
    return recipe.router_loss


def _without_router_loss(model: Model) -> str:
    if model.experts is None:
        return f"{model.name} has no experts"
    if model.family in ROUTER_LOSS_FAMILIES:
        return f"the configuration of {model.name} has router_aux_loss_coef 0"
    return f"transformers and TRL do not both compute it for {model.name} ({model.family})"


def _impossible_on_mamba(recipe: Recipe, model: Model) -> str | None:
    targets = set(recipe.lora_targets or ())
    if recipe.packing and (model.has_mamba or not model.has_attention):
        return (
            f"packing is not possible with {model.name}: position ids do not reach its layers "
            "without attention, whose state would run on from example to example: use padding"
        )
    if model.has_mamba and recipe.method == "qlora":
        return (
            f"method qlora is not possible with {model.name}: Mamba layers use their matrices as "
            "they are, which quantised ones are not: use full or lora"
        )
    # By default a model without experts gets adapters on all its linear layers.
    by_default = set() if model.experts is not None else {"all-linear"}
    mamba_targets = (targets or by_default) - {"attention", "experts", "router"}
    if model.has_mamba and recipe.method == "lora" and mamba_targets:
        return (
            f"adapters on Mamba layers are not possible with {model.name}: these use their "
            "matrices past the adapter: use method full, or lora_targets of attention, experts and "
            "router where it has them"
        )
    return None


def _impossible_targets(recipe: Recipe, model: Model) -> str | None:
    targets = set(recipe.lora_targets or ())
    if model.experts is None and targets & {"experts", "router"}:
        return (
            f"lora_targets {', '.join(recipe.lora_targets or ())}: {model.name} has no experts: "
            f"use {_adaptable(model)}"
        )
    if not model.has_attention and (
        "attention" in targets
        or (recipe.method == "lora" and not targets and recipe.has_fused_experts)
    ):
        return f"lora_targets attention: {model.name} has none: use {_adaptable(model)}"
    return None


def _adaptable(model: Model) -> str:
    """Alternative to targets that a model lacks."""
    if model.experts is not None:
        return "experts and router"
    if not model.has_mamba:
        return "attention, all-linear or names"
    return "attention" if model.has_attention else "method full"


def has_square_mask(recipe: Recipe, model: Model) -> bool:
    """Whether a mask has a row and a column for each token, or image patch, of a batch."""
    masks_images = model.tower_family == PACKED_IMAGES and recipe.attention != "flash_attention_2"
    return recipe.has_square_mask or masks_images


def has_own_mask(model: Model, seq_len: int, *, has_images: bool) -> bool:
    """Whether attention takes a mask even if nothing is padded.

    By it tokens of an image attend to one another, or tokens to their chunk of a sequence alone.
    """
    by_key = model.text.get("use_bidirectional_attention") == "vision"
    chunk = model.text.get("attention_chunk_size")
    if isinstance(chunk, int) and seq_len >= chunk:
        return True
    return has_images and (by_key or model.family in MASKED_IMAGE_FAMILIES)


def incompatibility(
    recipe: Recipe, model: Model, gpu: Gpu, packages: Collection[str] | None = None
) -> str | None:
    """Reason why a device cannot run a recipe, with an alternative; None when it can.

    Args:
        recipe: with every field that applies filled in.
        model: model to fine-tune.
        gpu: device that would run it.
        packages: extras that can be imported there; None when unknown.
    """
    return (
        impossible_on_model(recipe, model)
        or _device_incompatibility(recipe, gpu)
        or _missing(recipe, gpu, packages)
    )


def has_bf16(gpu: Gpu) -> bool:
    """Whether a device supports bf16, as far as is known."""
    return gpu.compute_capability is None or float(gpu.compute_capability) >= AMPERE


def _device_incompatibility(recipe: Recipe, gpu: Gpu) -> str | None:
    if gpu.kind == "rocm":
        return (
            "times of AMD GPUs are neither measured nor modelled: the catalog has their memory and "
            "prices alone"
        )
    reasons = _cpu_reasons(recipe, gpu) if gpu.kind == "cpu" else _cuda_reasons(recipe, gpu)
    return "; ".join(reasons) or None


def _cpu_reasons(recipe: Recipe, gpu: Gpu) -> list[str]:
    needs_cuda = {
        "attention flash_attention_2": (recipe.attention == "flash_attention_2", "sdpa or eager"),
        "mamba mamba-ssm": (recipe.mamba == "mamba-ssm", "reference"),
        f"optimizer {recipe.optimizer}": (recipe.optimizer.startswith("paged"), _unpaged(recipe)),
        "liger_kernels": (recipe.liger_kernels, "liger_kernels: false"),
        f"loss {recipe.loss}": (recipe.loss in {"liger", "cce"}, "full-logits or chunked"),
    }
    reasons = [
        f"{name} needs a CUDA GPU, {gpu.key} is none: use {instead}"
        for name, (wanted, instead) in needs_cuda.items()
        if wanted
    ]
    if recipe.offload_optimizer:
        reasons.append(
            f"offload_optimizer: on {gpu.key} the optimizer's state is on the host anyway"
        )
    if recipe.compile is not None:
        reasons.append(
            f"compile {recipe.compile}: on {gpu.key} memory is counted by operator, and compiled "
            "code has none: leave it out"
        )
    if recipe.activation_offloading:
        reasons.append(
            f"activation_offloading: on {gpu.key} activations are on the host anyway: leave it out"
        )
    return reasons


def _unpaged(recipe: Recipe) -> str:
    return "adamw_8bit" if recipe.optimizer == "paged_adamw_8bit" else "adamw"


def _cuda_reasons(recipe: Recipe, gpu: Gpu) -> list[str]:
    if has_bf16(gpu):
        return []
    needs_ampere = {
        "attention flash_attention_2": (recipe.attention == "flash_attention_2", "attention: sdpa"),
        f"precision {recipe.precision}": (recipe.compute_dtype == "bf16", "precision: fp16"),
        "experts grouped": (recipe.experts == "grouped", "experts: looped"),
    }
    return [
        f"{name} needs compute capability {AMPERE} or higher, {gpu.key} has "
        f"{gpu.compute_capability}: use {instead}"
        for name, (wanted, instead) in needs_ampere.items()
        if wanted
    ]


def _missing(recipe: Recipe, gpu: Gpu, packages: Collection[str] | None) -> str | None:
    missing = [] if packages is None else [e for e in recipe.extras if e not in packages]
    if not missing:
        return None
    extras = ",".join(sorted({EXTRAS[package] for package in missing}))
    return (
        f"{', '.join(missing)} cannot be imported on the node with {gpu.key}: install it there "
        f"(pip install 'finetune-cost[{extras}]')"
    )
