"""Options of TRL's command line that are a recipe, and recipes that it cannot express."""

from orchestrator.exporting.training import ExportError, TrainingJob
from trials.recipes.fields import REENTRANT, WEIGHTED, Attention, Dtype, Optimizer, Task
from trials.recipes.recipe import Recipe
from trials.records.model import Model

Options = dict[str, str | tuple[str, ...]]

COMMANDS: tuple[Task, ...] = ("sft", "dpo", "kto", "reward")
"""Tasks that are a command of TRL 1.16."""
DTYPES: dict[Dtype, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
OPTIMIZERS: dict[Optimizer, str] = {
    "adamw": "adamw_torch_fused",
    "adamw_foreach": "adamw_torch",
    "adamw_8bit": "adamw_bnb_8bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "paged_adamw_32bit": "paged_adamw_32bit",
    "torchao_adamw_8bit": "adamw_torch_8bit",
    "torchao_adamw_4bit": "adamw_torch_4bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
}
"""Optimizers as transformers' Trainer names them."""
SYNC_EACH_BATCH = '{"gradient_accumulation_kwargs": {"sync_each_batch": true}}'
ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
ATTENTION_FAMILIES = (
    *("llama", "mistral", "mixtral", "olmoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    *("gemma", "gemma2", "granite", "smollm3"),
)
"""Families whose attention has exactly the layers of ``ATTENTION_LINEARS``."""


def trl_options(training: TrainingJob) -> Options:
    """Options by name, without ``--``; the model, data and folders are the task file's.

    Raises:
        ExportError: TRL does not train by this recipe; a line for each reason.
    """
    recipe = training.recipe
    reasons = refusals(training)
    if reasons:
        raise ExportError("\n".join(reasons))
    options: Options = {
        "num_train_epochs": str(training.epochs),
        "per_device_train_batch_size": str(training.micro_batch),
        "gradient_accumulation_steps": str(training.accumulation),
        "max_length": str(training.seq_len),
        **_precision(recipe),
        **_kernels(recipe),
        "optim": OPTIMIZERS[recipe.optimizer],
        "max_grad_norm": f"{recipe.max_grad_norm or 0:g}",
        **_data(training),
        **_adapters(recipe),
        **(_of_shards(training) if training.is_sharded else {}),
        # By DeepSpeed, which has no autocast, this is the dtype of its engine.
        **({"bf16": "True"} if training.is_by_deepspeed else {}),
    }
    if training.model.experts is not None and recipe.router_loss is False:
        options["router_aux_loss_coef"] = "0.0"
    if recipe.reference == "precomputed":
        options["precompute_ref_log_probs"] = "True"
    return options


def _precision(recipe: Recipe) -> Options:
    return {
        "dtype": DTYPES[recipe.base_dtype],
        "bf16": str(recipe.autocast == "bf16"),
        "fp16": str(recipe.autocast == "fp16"),
    }


def _of_shards(training: TrainingJob) -> Options:
    """Gradients are reduced after every micro-batch, and 4-bit weights are of a dtype to shard."""
    recipe, options = training.recipe, Options()
    if training.accumulation > 1:
        options["accelerator_config"] = SYNC_EACH_BATCH
    if recipe.method == "qlora":
        options["bnb_4bit_quant_storage"] = DTYPES[recipe.compute_dtype]
    return options


def _kernels(recipe: Recipe) -> Options:
    attention: Attention | None = recipe.attention
    options: Options = {"gradient_checkpointing": str(bool(recipe.gradient_checkpointing))}
    if recipe.gradient_checkpointing == REENTRANT:
        options["gradient_checkpointing_kwargs"] = '{"use_reentrant": true}'
    if attention is not None:
        options["attn_implementation"] = attention
    switches = {
        "activation_offloading": recipe.activation_offloading,
        "use_liger_kernel": recipe.liger_kernels,
        "torch_compile": recipe.compile is not None,
    }
    return options | {name: "True" for name, is_on in switches.items() if is_on}


def _data(training: TrainingJob) -> Options:
    options: Options = {}
    if training.recipe.packing:
        options |= {"packing": "True", "packing_strategy": "bfd"}
    if training.groups_by_length:
        options["train_sampling_strategy"] = "group_by_length"
    named = {
        "dataset_config": training.subset,
        "dataset_train_split": training.split,
        "dataset_text_field": training.text_field,
    }
    return options | {name: value for name, value in named.items() if value is not None}


def _adapters(recipe: Recipe) -> Options:
    if recipe.method == "full":
        return {}
    options: Options = {
        "use_peft": "True",
        "lora_r": str(recipe.lora_rank),
        "lora_alpha": str(recipe.lora_alpha),
        "lora_dropout": f"{recipe.lora_dropout or 0:g}",
        "lora_target_modules": _targets(recipe),
    }
    if recipe.dora:
        options["use_dora"] = "True"
    if recipe.modules_to_save:
        options["lora_modules_to_save"] = recipe.modules_to_save
    if recipe.task == "reward":
        options["lora_task_type"] = "SEQ_CLS"
    if recipe.quantisation == "int8":
        options["load_in_8bit"] = "True"
    elif recipe.quantisation is not None:
        options |= {"load_in_4bit": "True", "bnb_4bit_quant_type": recipe.quantisation}
        options["use_bnb_nested_quant"] = str(recipe.double_quantisation)
    return options


def _targets(recipe: Recipe) -> tuple[str, ...]:
    names = recipe.lora_targets or ()
    linears = [n for name in names for n in (ATTENTION_LINEARS if name == "attention" else (name,))]
    targets = tuple(dict.fromkeys(linears))
    if len(targets) == 1 and targets != ("all-linear",):
        # TRL passes a single name on as text, which PEFT reads as a pattern of the full name.
        return (rf"(.*\.)?{targets[0].replace('.', chr(92) + '.')}",)
    return targets


def refusals(training: TrainingJob) -> list[str]:
    """Reasons why TRL does not train by a recipe, each with a remedy."""
    recipe, model = training.recipe, training.model
    wrong = [*_refused_fields(recipe), *_refused_adapters(recipe, model)]
    of_all = training.micro_batch * training.gpus
    if recipe.effective_batch is not None and recipe.effective_batch % of_all:
        several = f" on {training.gpus} GPUs" if training.gpus > 1 else ""
        wrong.append(
            f"micro-batch {training.micro_batch}{several} does not divide the effective batch "
            f"{recipe.effective_batch}, which a trainer needs: give --batch-size one that does"
        )
    if model.family == "blackmamba":
        wrong.append(f"model {model.name}: transformers has no such model: TRL cannot train it")
    if training.active_experts != model.active_experts:
        wrong.append(
            f"active_experts {training.active_experts}: TRL trains {model.name} with its own "
            f"{model.active_experts}: leave it out"
        )
    return wrong


def _refused_fields(recipe: Recipe) -> list[str]:
    reasons = {
        f"task {recipe.task}: it is no command of TRL 1.16: use {', '.join(COMMANDS)}": (
            recipe.task not in COMMANDS
        ),
        f"loss {recipe.loss}: TRL 1.16 computes the loss in chunks: use loss: chunked": (
            recipe.loss in ("liger", "cce", *WEIGHTED)
        ),
        f"optimizer {recipe.optimizer}: transformers' Trainer has none: use adamw_foreach": (
            recipe.optimizer not in OPTIMIZERS
        ),
        "offload_optimizer: a configuration of DeepSpeed is not exported: leave it out": (
            recipe.offload_optimizer
        ),
        "compile layers: transformers' Trainer compiles the model: use compile: model": (
            recipe.compile == "layers"
        ),
        "experts looped: transformers keeps the experts of a layer in one parameter: use experts: "
        "grouped with lora_targets: [attention]": recipe.experts == "looped",
        "oft_block_size: TRL's command line has LoRA alone: use lora_rank": (
            recipe.oft_block_size is not None
        ),
        "loss full-logits: TRL's trainer of task reward has no value head: leave it out": (
            recipe.has_value_head
        ),
        "trained_layers: TRL's command line trains all layers: leave it out": (
            recipe.trained_layers is not None
        ),
        "quantised_experts: TRL has no such option: leave it out": recipe.quantised_experts,
        "reference separate: TRL's command has none beside adapters: use adapter-off": (
            recipe.reference == "separate" and recipe.method != "full"
        ),
    }
    return [reason for reason, applies in reasons.items() if applies]


def _refused_adapters(recipe: Recipe, model: Model) -> list[str]:
    targets = set(recipe.lora_targets or ())
    wrong = []
    if recipe.experts != "looped":
        wrong += [
            f"lora_targets {name}: TRL's command line does not name these parameters: use attention"
            for name in ("experts", "router")
            if name in targets
        ]
    if "attention" in targets and model.family not in ATTENTION_FAMILIES:
        wrong.append(
            f"lora_targets attention: the layers of {model.family} are not listed: give their names"
        )
    if "all-linear" in targets and len(targets) > 1:
        others = ", ".join(sorted(targets - {"all-linear"}))
        wrong.append(
            f"lora_targets all-linear with {others}: TRL's command line takes all-linear alone"
        )
    if "lm_head" in targets and recipe.loss == "chunked":
        wrong.append(
            "lora_targets lm_head: TRL's loss does not see adapters of the head: use "
            "modules_to_save: [lm_head]"
        )
    has_copies = bool(recipe.copied_modules)
    if recipe.method == "qlora" and recipe.adapter_dtype == "fp32" and has_copies:
        wrong.append(
            "adapter_dtype fp32: TRL makes all that is trained on quantised weights bf16, also "
            f"{', '.join(recipe.copied_modules)}: use adapter_dtype: bf16"
        )
    if recipe.kbit_preparation and recipe.task == "reward":
        wrong.append("kbit_preparation does not go with the exported task reward: leave it out")
    return wrong
