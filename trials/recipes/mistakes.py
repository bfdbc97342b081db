"""Mistakes of a recipe: fields that do not apply, and fields that exclude each other."""

from trials.recipes.fields import (
    REFERRING,
    TARGET_GROUPS,
    TASK_LOSSES,
    WEIGHTED,
    WITH_ALL_LOGITS,
    WITH_DROPOUT,
    RecipeFields,
)

ADAPTER_FIELDS = (
    *("lora_rank", "oft_block_size", "lora_alpha", "lora_dropout", "lora_targets"),
    *("modules_to_save", "adapter_dtype", "dora"),
)


def misplaced(recipe: RecipeFields) -> list[str]:
    """Errors of fields that the method excludes or requires."""
    wrong = []
    method = recipe.method
    if method == "full":
        wrong += [
            f"{name} {_plain(getattr(recipe, name))} does not apply to method full: remove it, "
            "or use method lora or qlora"
            for name in ADAPTER_FIELDS
            if getattr(recipe, name) not in (None, False)
        ]
    elif not recipe.has_adapters:
        wrong.append(f"method {method} needs lora_rank, for example lora_rank: 16")
    quantised_fields = {
        "quantisation": recipe.quantisation is not None,
        "double_quantisation": recipe.double_quantisation is not None,
        "kbit_preparation": recipe.kbit_preparation,
        "quantised_experts": recipe.quantised_experts,
    }
    wrong += [
        f"{name} does not apply to method {method}: remove it, or use method qlora"
        for name, is_given in quantised_fields.items()
        if is_given and method != "qlora"
    ]
    if recipe.quantisation == "int8" and recipe.double_quantisation is not None:
        wrong.append(
            "double_quantisation does not apply to quantisation int8: remove it, or use nf4 or fp4"
        )
    if recipe.examples_per_row is not None and not recipe.packing:
        wrong.append(
            f"examples_per_row {recipe.examples_per_row} does not apply without packing: remove "
            "it, or add packing: true"
        )
    targets = recipe.lora_targets or ()
    wrong += [
        f"{name} {_plain(names)} has a duplicate: remove it"
        for name, names in (("lora_targets", targets), ("modules_to_save", recipe.modules_to_save))
        if len(set(names or ())) < len(names or ())
    ]
    others = set(targets) & set(TARGET_GROUPS) - {"all-linear"}
    if "all-linear" in targets and others:
        wrong.append(
            f"lora_targets {_plain(targets)}: all-linear includes {_plain(tuple(sorted(others)))}: "
            "remove it"
        )
    return wrong


def incompatible(recipe: RecipeFields) -> list[str]:
    """Errors of pairs of fields that no device supports."""
    wrong = []
    if recipe.attention == "flash_attention_2" and recipe.compute_dtype == "fp32":
        wrong.append("attention flash_attention_2 does not support fp32: use bf16 or fp16")
    if recipe.effective_batch is not None and recipe.gradient_accumulation > 1:
        wrong.append(
            f"effective_batch {recipe.effective_batch} and gradient_accumulation "
            f"{recipe.gradient_accumulation} exclude each other: leave one of them out"
        )
    if recipe.quantisation == "int8" and recipe.kbit_preparation and recipe.precision == "bf16":
        wrong.append(
            "kbit_preparation and quantisation int8 compute in fp32 with precision bf16: LLM.int8 "
            "keeps the dtype of its inputs: use precision bf16-mixed"
        )
    if recipe.loss == "cce" and recipe.compute_dtype == "fp32":
        wrong.append("loss cce does not support fp32: use bf16 or fp16, or loss: liger")
    if recipe.router_loss is True and recipe.loss in WEIGHTED:
        wrong.append(f"router_loss: LLaMA-Factory's loss {recipe.loss} has none: remove it")
    if recipe.offload_optimizer:
        wrong += _incompatible_with_offloading(recipe)
    return [
        *wrong,
        *_incompatible_adapters(recipe),
        *_misplaced_layers(recipe),
        *_incompatible_with_compilation(recipe),
        *_incompatible_with_packing(recipe),
        *_incompatible_with_task(recipe),
    ]


def _misplaced_layers(recipe: RecipeFields) -> list[str]:
    layers = recipe.trained_layers
    reasons = {
        f"trained_layers {layers} does not apply to method {recipe.method}: remove it, or use "
        "method full": layers is not None and recipe.method != "full",
        "trained_layers 0 trains nothing: use another number": layers == 0,
        f"trained_layers {layers} does not support task {recipe.task}: leave it out": (
            layers is not None and recipe.task != "sft"
        ),
        "spread_layers needs trained_layers, the positive number of layers": (
            recipe.spread_layers and (layers or 0) <= 0
        ),
    }
    return [reason for reason, applies in reasons.items() if applies]


def _incompatible_with_rotations(recipe: RecipeFields) -> list[str]:
    if recipe.oft_block_size is None:
        return []
    wrong = [
        f"oft_block_size {recipe.oft_block_size} and {name} exclude each other: leave one of them "
        "out"
        for name in ("lora_rank", "lora_alpha", "lora_dropout", "dora")
        if getattr(recipe, name) not in (None, False)
    ]
    if "experts" in (recipe.lora_targets or ()) and recipe.has_fused_experts:
        wrong.append(f"oft_block_size does not go with {recipe.experts} experts: {_other(recipe)}")
    return wrong


def _other(recipe: RecipeFields) -> str:
    """Alternative to adapters on fused experts; those of ``all-tokens`` have no other form."""
    return "use experts: looped" if recipe.experts == "grouped" else "adapt other layers"


def _incompatible_adapters(recipe: RecipeFields) -> list[str]:
    wrong = _incompatible_with_rotations(recipe)
    if recipe.quantised_experts and recipe.experts == "looped":
        wrong.append(
            "quantised_experts does not go with experts looped, whose linear layers method qlora "
            "quantises anyway: use experts: grouped"
        )
    if recipe.quantised_experts and "experts" in (recipe.lora_targets or ()):
        wrong.append(
            "quantised_experts does not go with adapters on the experts, which are not simulated "
            "on their quantised matrices: use other lora_targets, or experts: looped"
        )
    if "experts" in (recipe.lora_targets or ()) and recipe.has_fused_experts:
        wrong += [
            f"{name} does not go with adapters on {recipe.experts} experts, which PEFT folds into "
            f"their weights: leave it out, or {_other(recipe)}"
            for name in ("lora_dropout", "dora")
            if getattr(recipe, name)
        ]
    if recipe.adapter_dtype == "bf16" and recipe.precision == "fp16":
        wrong.append("adapter_dtype bf16 does not go with precision fp16: use fp32")
    if recipe.dora and recipe.quantisation == "int8":
        wrong.append("dora does not support quantisation int8: use quantisation: nf4")
    if recipe.copied_modules and recipe.precision == "fp16" and not recipe.kbit_preparation:
        name = "modules_to_save" if recipe.modules_to_save else "task reward with adapters"
        wrong.append(
            f"{name} does not go with precision fp16: the copies of "
            f"{_plain(recipe.copied_modules)} are fp16, as the frozen weights are, and loss "
            "scaling does not support fp16 gradients: use bf16-mixed, fp32-mixed-load or fp32"
        )
    if recipe.is_scored and (recipe.adapter_dtype, recipe.precision) == ("bf16", "fp32"):
        wrong.append(
            "adapter_dtype bf16 does not go with task reward in precision fp32: PEFT's copy of the "
            "score is bf16, and its inputs are fp32: use adapter_dtype: fp32"
        )
    return wrong


def _incompatible_with_compilation(recipe: RecipeFields) -> list[str]:
    return [
        f"compile {recipe.compile} with {name}: its hooks do not reach into compiled code: leave "
        "one of them out"
        for name in ("offload_optimizer", "activation_offloading")
        if recipe.compile is not None and getattr(recipe, name)
    ]


def _unknown_to_grpo(recipe: RecipeFields) -> list[str]:
    own = "separate" if recipe.method == "full" else "adapter-off"
    if recipe.task != "grpo" or recipe.reference in (None, own, "adapter-off"):
        return []
    return [
        (
            f"reference {recipe.reference}: TRL's trainer of task grpo has none with method "
            f"{recipe.method}: use reference: {own}, or leave it out"
        )
    ]


def _incompatible_with_task(recipe: RecipeFields) -> list[str]:
    task, wrong = recipe.task, []
    if recipe.reference is not None and task not in (*REFERRING, "grpo"):
        wrong.append(
            f"reference {recipe.reference} does not apply to task {task}: remove it, or use task: "
            "dpo, kto or grpo"
        )
    if recipe.generation_share is not None and task != "grpo":
        wrong.append(
            f"generation_share {recipe.generation_share:g} does not apply to task {task}, which "
            "generates nothing: remove it, or use task: grpo"
        )
    if recipe.router_loss is True and task == "reward":
        wrong.append("router_loss: TRL's trainer of task reward has none: remove it")
    if task == "sft":
        return wrong
    loss = TASK_LOSSES[task]
    if recipe.router_loss is True and task in WITH_ALL_LOGITS and recipe.loss == "full-logits":
        wrong.append(f"router_loss: LLaMA-Factory's trainer of task {task} has none: remove it")
    if recipe.reference == "adapter-off" and recipe.method == "full":
        wrong.append(
            "reference adapter-off needs adapters, method full has none: use reference: separate "
            "or precomputed"
        )
    if loss is None and recipe.loss not in (None, "full-logits"):
        wrong.append(
            f"loss {recipe.loss} does not apply to task {task}, whose model returns a score "
            "instead of logits: remove it"
        )
    elif recipe.loss != loss and not (recipe.loss == "full-logits" and task in WITH_ALL_LOGITS):
        wrong.append(f"loss {recipe.loss}: TRL's trainer of task {task} has none: use loss: {loss}")
    wrong += _unknown_to_grpo(recipe)
    if recipe.lora_dropout and task not in WITH_DROPOUT:
        wrong.append(
            f"lora_dropout {recipe.lora_dropout:g}: TRL's trainer of task {task} disables dropout: "
            "remove it"
        )
    wrong += [
        f"{name} does not support task {task}: leave it out"
        for name in ("offload_optimizer", "activation_offloading", "liger_kernels", "compile")
        if getattr(recipe, name)
    ]
    return wrong


def _incompatible_with_offloading(recipe: RecipeFields) -> list[str]:
    wrong = []
    if recipe.activation_offloading:
        wrong.append(
            "activation_offloading with offload_optimizer: DeepSpeed runs its own backward pass: "
            "leave one of them out"
        )
    if recipe.optimizer != "adamw":
        wrong.append(
            f"offload_optimizer does not support optimizer {recipe.optimizer}: use adamw, as "
            "DeepSpeed's update on the host does"
        )
    if recipe.precision not in ("bf16", "fp32"):
        wrong.append(
            f"offload_optimizer does not support precision {recipe.precision}: DeepSpeed keeps "
            "trained weights on the GPU in the dtype of products: use bf16 or fp32"
        )
    if recipe.dora and recipe.method == "qlora" and recipe.precision == "bf16":
        wrong.append(
            "offload_optimizer does not support dora on 4-bit weights in bf16: DeepSpeed keeps one "
            "dtype, and the magnitudes are fp32: use method lora, or leave one of them out"
        )
    if recipe.has_own_adapter_dtype:
        wrong.append(
            f"offload_optimizer does not support adapter_dtype {recipe.adapter_dtype} with "
            f"precision {recipe.precision}: leave adapter_dtype out"
        )
    return wrong


def _incompatible_with_packing(recipe: RecipeFields) -> list[str]:
    if not recipe.packing or recipe.task == "sft":
        return []
    return [f"packing does not support task {recipe.task}, whose trainer pads: leave it out"]


def _plain(value: object) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)
