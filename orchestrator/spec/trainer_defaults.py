"""Defaults of TRL's trainer for the fields of a recipe."""

from collections.abc import Collection
from typing import Any, Literal, get_args

from trials.recipes.fields import TASK_LOSSES, Method, Precision, Task
from trials.recipes.parallel import WEIGHTS_DIVIDED, ZERO_STAGES
from trials.recipes.recipe import Recipe
from trials.records.compatibility import LOGITS_FAMILIES, fused_experts
from trials.records.model import Model

RecipeDefaults = Literal["trl", "plain"]
"""Source of absent fields: TRL's trainer, or the defaults of ``Recipe`` itself."""

TRL_VERSION = "1.16"
LORA_RANK = 16  # trl/trainer/model_config.py:107


def trl_defaults(
    method: Method,
    *,
    task: Task = "sft",
    precision: Precision | None = None,
    offload_optimizer: bool = False,
    has_bf16: bool = True,
) -> dict[str, object]:
    """Fields of a recipe as the trainer of TRL 1.16.0 on transformers 5.23.0 sets them.

    Choices that TRL leaves to the user (adapters, quantisation, attention) are not among them;
    ``with_lora_rank`` has the rank of its command line.

    Args:
        method: method of fine-tuning.
        task: task, whose trainer of TRL has the defaults; all inherit those of trl/base_config.py.
        precision: the precision where it is given; else the trainer's.
        offload_optimizer: whether DeepSpeed updates the weights; it holds them in bf16.
        has_bf16: whether the GPU supports bf16; TRL needs ``fp16=True`` on the others.
    """
    if precision is None:
        precision = _precision(method, offload_optimizer=offload_optimizer, has_bf16=has_bf16)
    fields: dict[str, object] = {
        "precision": precision,
        # trl/trainer/base_config.py:62
        "gradient_checkpointing": True,
        # transformers/training_args.py:811: adamw_torch_fused
        "optimizer": "adamw",
        # transformers/training_args.py:849
        "gradient_accumulation": 1,
        # transformers/training_args.py:866
        "max_grad_norm": 1.0,
        # trl/trainer/sft_trainer.py:1144, sft_config.py:283; dpo_trainer.py:918
        "loss": TASK_LOSSES.get(task, "chunked"),
        # trl/trainer/sft_config.py:222
        "packing": False,
        # trl/trainer/sft_trainer.py:1199
        "router_loss": "auto",
    }
    if method == "qlora":
        # TRL does not call PEFT's prepare_model_for_kbit_training.
        fields["kbit_preparation"] = False
        # trl/trainer/sft_trainer.py:908 casts adapters on a quantised model to bf16. Loss scaling
        # does not support bf16 gradients, and DeepSpeed keeps one dtype.
        if precision != "fp16" and not offload_optimizer:
            fields["adapter_dtype"] = "bf16"
    return fields


def _precision(method: Method, *, offload_optimizer: bool, has_bf16: bool) -> Precision:
    if offload_optimizer:
        return "bf16"
    if not has_bf16:
        return "fp16"
    # trl/trainer/base_config.py:108: autocast to bf16, unless fp16 is set.
    # trl/trainer/utils.py:1332: weights are loaded in fp32, also frozen ones. Without frozen
    # weights, both precisions are the same. PEFT 0.21.2 makes adapters fp32 (mapping_func.py:110).
    return "bf16-mixed" if method == "full" else "fp32-mixed-load"


def strategy_defaults(strategy: str) -> dict[str, Any]:
    """Precision and loss of a training by a strategy of several GPUs, where they are not given.

    DeepSpeed holds weights in bf16. Where it divides them, TRL gathers the head for a loss in
    chunks, which is not simulated.
    """
    stage = ZERO_STAGES.get(strategy)
    if stage is None:
        return {}
    return {"precision": "bf16"} | ({"loss": "full-logits"} if stage == WEIGHTS_DIVIDED else {})


def with_trl_defaults(stated: dict[str, Any], *, has_bf16: bool = True) -> dict[str, Any]:
    """Fields of a written-out recipe, with TRL's defaults for those that are absent."""
    if stated.get("method") not in get_args(Method):
        return stated  # Recipe reports it
    precision = stated.get("precision")
    task: Any = stated.get("task")
    defaults = trl_defaults(
        stated["method"],
        task="sft" if task not in get_args(Task) else task,
        precision=precision if precision in get_args(Precision) else None,
        offload_optimizer=stated.get("offload_optimizer") is True,
        has_bf16=has_bf16,
    )
    return with_lora_rank(defaults | stated)


def with_lora_rank(stated: dict[str, Any]) -> dict[str, Any]:
    """Fields of a written-out recipe, with TRL's rank where its method needs one."""
    has_own = stated["method"] == "full" or stated.get("oft_block_size") is not None
    return stated if has_own else {"lora_rank": LORA_RANK} | stated


def fields_of_model(
    recipe: Recipe, model: Model, given: Collection[str], *, is_of_file: bool
) -> dict[str, Any]:
    """Fields of a recipe that follow from the model.

    TRL's loss in chunks fails on models whose class returns no hidden states. So it is no default
    of theirs: their loss is that of the class, as transformers' Trainer computes it.

    Args:
        recipe: recipe of the options.
        model: model to train.
        given: names of the fields that were given.
        is_of_file: whether a trainer's file states the recipe: it leaves fused experts to the
            model's class.
    """
    fields = _expert_fields(recipe, model)
    if is_of_file and recipe.experts == "grouped" and model.experts is not None:
        fields["experts"] = fused_experts(model)
    has_default = "loss" not in given and recipe.loss == "chunked" and recipe.task == "sft"
    if has_default and model.family in LOGITS_FAMILIES:
        fields["loss"] = "full-logits"
    return fields


def _expert_fields(recipe: Recipe, model: Model) -> dict[str, Any]:
    """Fields of a recipe that follow from whether a model has experts.

    A dense model's recipe does not name how experts are run. The experts of transformers 5 are no
    linear layers. PEFT adapts no others unless it is given their names (``target_parameters``), and
    bitsandbytes quantises no others: so by default adapters are on attention, and fused experts
    stay in 16 bits.
    """
    if model.experts is None:
        return {"experts": None, "quantised_experts": False}
    is_stated = recipe.experts is not None or recipe.lora_targets is not None
    is_default = recipe.method != "full" and model.has_attention and not is_stated
    return {"experts": fused_experts(model)} if is_default else {}
