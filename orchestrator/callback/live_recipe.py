"""Recipe of a running training, read from its trainer's arguments and its model."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from gpu_catalog.errors import UserError
from orchestrator.configurations.trainers.optimizers import OPTIMIZERS
from orchestrator.configurations.trainers.trl import ATTENTION
from orchestrator.request import validation_lines
from trials.recipes.fields import REENTRANT, Experts, Precision
from trials.recipes.recipe import Recipe

SHORT = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
PRECISIONS: dict[tuple[str | None, str, str | None], Precision] = {
    (None, "fp32", None): "fp32",
    (None, "fp32", "bf16"): "bf16-mixed",
    (None, "fp32", "fp16"): "fp16",
    (None, "bf16", None): "bf16",
    (None, "bf16", "bf16"): "bf16",
    ("fp32", "fp32", None): "fp32",
    ("bf16", "bf16", None): "bf16",
    ("bf16", "fp32", "bf16"): "bf16-mixed",
    ("bf16", "bf16", "bf16"): "bf16-mixed",
    ("fp32", "fp32", "bf16"): "fp32-mixed-load",
    ("fp32", "bf16", "bf16"): "fp32-mixed-load",
    ("fp16", "fp32", "fp16"): "fp16",
}
"""Precision by the dtypes of frozen weights (None for none), of trained ones, and of autocast."""


class LiveRecipeError(UserError):
    """The training is none that can be forecast; a line for each reason."""


def live_recipe(
    args: Any, model: Any, *, experts: Experts | None, examples_per_row: int | None = None
) -> Recipe:
    """Recipe of a training.

    Args:
        args: the trainer's arguments: ``TrainingArguments``, or TRL's ``SFTConfig``.
        model: the model, with its adapters.
        experts: product of the experts of a mixture; None for a dense model.
        examples_per_row: examples in a packed row; None without packing.

    Raises:
        LiveRecipeError: no recipe describes the training.
    """
    wrong = list(_obstacles(args))
    if wrong:
        raise LiveRecipeError("\n".join(wrong))
    is_sft = _is_sft(args)
    fields = {
        **_method(model, has_experts=experts is not None),
        "experts": experts,
        **_precision(args, model),
        "gradient_checkpointing": _checkpointing(args),
        "activation_offloading": bool(getattr(args, "activation_offloading", False)),
        "attention": _attention(model),
        "optimizer": _optimizer(args, model),
        "gradient_accumulation": args.gradient_accumulation_steps,
        "max_grad_norm": args.max_grad_norm or None,
        "liger_kernels": bool(getattr(args, "use_liger_kernel", False)),
        "compile": "model" if args.torch_compile else None,
        "loss": "chunked" if is_sft else "full-logits",
        "router_loss": "auto" if is_sft else False,
        "packing": bool(getattr(args, "packing", False)),
        "examples_per_row": examples_per_row,
    }
    if fields["liger_kernels"] and not is_sft:
        fields["loss"] = "liger"
    try:
        return Recipe.model_validate(fields)
    except ValidationError as error:
        raise LiveRecipeError(validation_lines(error)) from None


def _checkpointing(args: Any) -> bool | str:
    is_older = (args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
    return bool(args.gradient_checkpointing) and (REENTRANT if is_older else True)


def _is_sft(args: Any) -> bool:
    return any(kind.__name__ == "SFTConfig" for kind in type(args).__mro__)


def _obstacles(args: Any) -> Iterable[str]:
    """Reasons against a recipe, a line each."""
    own = {kind.__name__ for kind in type(args).__mro__ if kind.__module__.startswith("trl.")}
    if own and not _is_sft(args):
        yield f"{type(args).__name__}: only SFT is forecast"
    if args.world_size > 1 or args.n_gpu > 1:
        yield "several GPUs are not modelled yet"
    if getattr(args, "deepspeed", None):
        yield "deepspeed: DeepSpeed is not modelled"
    if getattr(args, "padding_free", False) and not getattr(args, "packing", False):
        yield "padding_free is modelled only with packing"


def _method(model: Any, *, has_experts: bool) -> dict[str, Any]:
    """Method, adapters and quantisation."""
    configs = getattr(model, "peft_config", None)
    if not configs:
        return {"method": "full"}
    name = getattr(model, "active_adapter", next(iter(configs)))
    config = configs[name] if isinstance(name, str) else next(iter(configs.values()))
    if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA":
        raise LiveRecipeError(f"{config.peft_type}: only LoRA is modelled")
    if getattr(config, "target_parameters", None):
        raise LiveRecipeError("target_parameters: adapters on parameters are not modelled")
    return {
        "method": "lora",
        "lora_rank": config.r,
        "lora_alpha": int(config.lora_alpha),
        "lora_dropout": float(config.lora_dropout),
        "lora_targets": _targets(model, has_experts=has_experts),
        "dora": bool(config.use_dora),
        "modules_to_save": tuple(sorted(config.modules_to_save or ())) or None,
        **_quantisation(model),
    }


def _quantisation(model: Any) -> dict[str, Any]:
    config = getattr(model.config, "quantization_config", None)
    if config is None:
        return {}
    values = config if isinstance(config, dict) else config.to_dict()
    if values.get("load_in_8bit"):
        return {"method": "qlora", "quantisation": "int8"}
    if not values.get("load_in_4bit"):
        raise LiveRecipeError(f"{values.get('quant_method')}: only bitsandbytes is modelled")
    return {
        "method": "qlora",
        "quantisation": values.get("bnb_4bit_quant_type", "nf4"),
        "double_quantisation": bool(values.get("bnb_4bit_use_double_quant")),
    }


def _targets(model: Any, *, has_experts: bool) -> tuple[str, ...]:
    """Last parts of the names of the adapted layers; ``all-linear`` for all but the head.

    Experts are no linear layers in transformers, so their models have no ``all-linear``.
    """
    adapted, others = set(), set()
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if hasattr(module, "lora_A"):
            adapted.add(last)
        elif hasattr(module, "in_features") and module is not head:
            others.add(name)
    others = {n for n in others if not n.endswith(".base_layer") and ".lora_" not in n}
    return tuple(sorted(adapted)) if others or has_experts else ("all-linear",)


def _precision(args: Any, model: Any) -> dict[str, Any]:
    """Precision by the dtypes of most frozen and of most trained weights."""
    counts: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for parameter in model.parameters():
        dtype = SHORT.get(str(parameter.dtype))
        if dtype is not None:  # quantised weights are integers
            counts[bool(parameter.requires_grad)][dtype] += parameter.numel()
    has_adapters = bool(getattr(model, "peft_config", None))
    trained = counts[True].most_common(1)[0][0]
    frozen = counts[False].most_common(1)[0][0] if has_adapters else None
    autocast = "bf16" if args.bf16 else "fp16" if args.fp16 else None
    precision = PRECISIONS.get((frozen, trained, autocast))
    if precision is None:
        weights = f"{frozen} weights, {trained} adapters" if frozen else f"{trained} weights"
        raise LiveRecipeError(f"{weights} and autocast to {autocast} are not modelled")
    return {"precision": precision, "adapter_dtype": trained if has_adapters else None}


def _attention(model: Any) -> str | None:
    name = getattr(model.config, "_attn_implementation", None)
    if name is None:
        return None
    if name not in ATTENTION:
        raise LiveRecipeError(f"attention {name} is not modelled")
    return ATTENTION[name]


def _optimizer(args: Any, model: Any) -> str:
    name = str(getattr(args.optim, "value", args.optim))
    if name not in OPTIMIZERS:
        raise LiveRecipeError(f"optimizer {name} is not modelled")
    is_on_cpu = next(model.parameters()).device.type == "cpu"
    # PyTorch's AdamW takes its foreach implementation on a GPU alone.
    loops = is_on_cpu and OPTIMIZERS[name] == "adamw_foreach"
    return "adamw_loop" if loops else OPTIMIZERS[name]
