"""Configurations of TRL: of its command line (``trl sft --config``), or of a Python file."""

from dataclasses import replace

from orchestrator.configurations.key_classes import (
    ABSENT,
    Config,
    Key,
    Reading,
    assumed,
    entry_of,
    refused,
    shared,
    table_of,
    used,
)
from orchestrator.configurations.layouts.several_gpus import read_training_arguments
from orchestrator.configurations.trainer import Trainer
from orchestrator.configurations.trainers.attention_kernels import attention_of
from orchestrator.configurations.trainers.axolotl_keys import (
    LOADING,
    NOT_SIMULATED,
    PADDED,
    TOKENS,
)
from orchestrator.configurations.trainers.lora_targets import (
    PEFT_DEFAULT,
    fused_experts,
    targets_of,
)
from orchestrator.configurations.trainers.optimizers import optimizer_of
from orchestrator.configurations.trainers.training_length import length_of
from orchestrator.configurations.trainers.transformers_keys import (
    LEARNING,
    OTHER_VERSIONS,
    TRAINING_ARGUMENTS,
    check_types,
    checkpointing_of,
    checkpoints,
)
from orchestrator.configurations.trainers.trl_tasks import (
    GRPO,
    LOSSES,
    TRAINER_CLASS,
    TRAINING_DATA,
    refuse_keys_of_other_tasks,
    task_of,
)
from trials.recipes.fields import WITH_DROPOUT

ATTENTION = {
    "eager": "eager",
    "sdpa": "sdpa",
    "flash_attention_2": "flash_attention_2",
    "kernels-community/flash-attn2": "flash_attention_2",
}
NOT_READ = assumed("not read: lengths and examples come from --dataset, or are assumed")
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "auto": "bf16"}

KEYS: dict[str, Key] = (
    TRAINING_ARGUMENTS
    | {
        "model_name_or_path": used("model"),
        "attn_implementation": shared("attention"),
        "dtype": shared("precision"),
        "use_peft": shared("method"),
        "load_in_4bit": shared("method, quantisation"),
        "load_in_8bit": shared("method, quantisation"),
        "bnb_4bit_quant_type": shared("quantisation"),
        "use_bnb_nested_quant": shared("double_quantisation"),
        "lora_r": shared("lora_rank"),
        "lora_alpha": shared("lora_alpha"),
        "lora_dropout": shared("lora_dropout"),
        "lora_target_modules": shared("lora_targets"),
        "lora_target_parameters": shared("lora_targets"),
        "lora_modules_to_save": shared("modules_to_save"),
        "padding_free": assumed(PADDED),
        "use_dora": shared("dora"),
        "max_length": shared("seq_len, cutoff"),
        "packing": used("packing"),
        "activation_offloading": used("activation_offloading"),
        "use_liger_kernel": shared("liger_kernels, loss"),
        "loss_type": shared("task, loss"),
        "precompute_ref_log_probs": shared("reference"),
        "disable_dropout": shared("lora_dropout"),
        "router_aux_loss_coef": shared("router_loss"),
        "pad_to_multiple_of": shared("pad_to_multiple"),
        # trl/trainer/sft_trainer.py:1601
        "label_smoothing_factor": refused(
            "takes all logits and a second forward pass, not simulated: use 0",
            idle=(None, False, 0, 0.0),
        ),
        "dataset_name": NOT_READ,
        "datasets": NOT_READ,
    }
    | table_of(
        (
            LEARNING,
            """
            use_rslora lora_task_type beta loss_weights ld_alpha f_divergence_type discopop_tau
            f_alpha_divergence_coef label_smoothing desirable_weight undesirable_weight
            center_rewards_coefficient ref_model_mixup_alpha ref_model_sync_steps
            """,
        ),
        (
            TOKENS,
            """
            dataset_text_field eos_token pad_token chat_template_path completion_only_loss
            assistant_only_loss truncation_mode max_completion_length padding_value
            """,
        ),
        (
            LOADING,
            """
            dataset_config dataset_train_split dataset_test_split dataset_streaming streaming
            dataset_num_proc dataset_kwargs shuffle_dataset model_revision trust_remote_code
            bnb_4bit_quant_storage eval_packing test_split_size env ignore_bias_buffers
            is_encoder_decoder generate_during_eval precompute_ref_batch_size
            """,
        ),
        (
            refused(
                "of GRPO, whose files are not read: give --task grpo without --config", idle=()
            ),
            GRPO,
        ),
        (refused(NOT_SIMULATED), "model_init_kwargs use_weighting sync_ref_model"),
        (
            refused("only best-fit packing is simulated", idle=(None, "bfd", "bfd_split")),
            "packing_strategy",
        ),
    )
)
"""Class of each key of a YAML file, by the dataclasses of TRL 1.16's commands."""

KEYS_OF_PYTHON: dict[str, Key] = {
    TRAINER_CLASS: shared("task"),
    TRAINING_DATA: NOT_READ,
    "torch_dtype": shared("precision"),
    "prepare_model_for_kbit_training": used("kbit_preparation"),
    "bnb_4bit_compute_dtype": refused(
        "only 16 bits are simulated", idle=(None, "bfloat16", "float16", "auto")
    ),
    "bias": refused("only the adapters are trained: use none", idle=(None, "none")),
} | table_of(
    (LEARNING, "init_lora_weights"),
    (LOADING, "device_map"),
    (
        refused(NOT_SIMULATED),
        """
        layers_to_transform rank_pattern compute_loss_func optimizers optimizer_cls_and_kwargs
        """,
    ),
)
"""Class of each key that only the classes and functions of a Python file have."""


EARLIER_KEYS: dict[str, Key] = {
    "torch_dtype": shared("precision"),
    "max_prompt_length": TOKENS,
} | {
    name: key
    for name in (
        *("warmup_ratio", "group_by_length", "logging_dir", "include_tokens_per_second"),
        *("overwrite_output_dir", "save_safetensors", "evaluation_strategy"),
    )
    if (key := entry_of(OTHER_VERSIONS, name)) is not None
}
"""Class of each key that only TRL before 1.16, or transformers before 5.23, has."""
RENAMED = {
    "max_seq_length": "max_length",  # TRL 0.16
    "use_liger": "use_liger_kernel",  # TRL 0.18
    "evaluation_strategy": "eval_strategy",  # transformers 4.41
    "torch_dtype": "dtype",  # transformers 4.56
    "group_by_length": "train_sampling_strategy: group_by_length",  # transformers 5
    "warmup_ratio": "warmup_steps (a ratio below 1)",  # transformers 5.15
}
"""Today's names of keys that earlier versions of TRL and transformers had."""


def derive(config: Config, reading: Reading) -> None:
    """Add the options that keys set together; absent fields have TRL's defaults anyway."""
    options = reading.options
    options["task"] = task_of(config, reading)
    refuse_keys_of_other_tasks(options["task"], config, reading)
    _method(config, reading)
    _precision(config, reading)
    optimizer_of(config, "optim", reading)
    attention_of(config, ATTENTION, reading)
    _loss(config, reading)
    _preference(config, reading)
    saves = checkpoints(config, reading, by_default=True)
    options["gradient_checkpointing"] = saves and checkpointing_of(config, older=False)
    read_training_arguments(config, reading)
    norm = config.get("max_grad_norm", 1.0)
    options["max_grad_norm"] = norm or "none"
    length = config.get("max_length", 1024)  # trl/trainer/sft_config.py:203
    options["sequence_len"] = length
    if options.get("packing") and config.get("packing_strategy") == "bfd_split":
        options["long_examples"] = "split"
    multiple = config.get("pad_to_multiple_of")
    options["pad_to_multiple"] = 1 if multiple in (None, "auto") else multiple
    length_of(
        reading,
        micro=("per_device_train_batch_size", config.get("per_device_train_batch_size", 8)),
        accumulation=("gradient_accumulation_steps", config.get("gradient_accumulation_steps", 1)),
        epochs=("num_train_epochs", config.get("num_train_epochs", 3)),
        steps=("max_steps", config.get("max_steps")),
    )


def _method(config: Config, reading: Reading) -> None:
    options = reading.options
    four, eight = bool(config.get("load_in_4bit")), bool(config.get("load_in_8bit"))
    if not config.get("use_peft"):
        options["method"] = "full"
        if four or eight:
            name = "load_in_4bit" if four else "load_in_8bit"
            reading.refuse(name, config[name], "quantised weights cannot be trained: add use_peft")
        return
    options["method"] = "qlora" if four or eight else "lora"
    if eight:
        options["quantisation"] = "int8"
    elif four:
        options["quantisation"] = config.get("bnb_4bit_quant_type", "nf4")
        options["double_quantisation"] = bool(config.get("use_bnb_nested_quant"))
    # trl/trainer/model_config.py:107
    options["lora_rank"] = config.get("lora_r", 16)
    options["lora_alpha"] = config.get("lora_alpha", 32)
    options["lora_dropout"] = float(config.get("lora_dropout", 0.05) or 0)
    options["dora"] = bool(config.get("use_dora"))
    stated = config.get("lora_target_modules")
    if isinstance(stated, list) and len(stated) == 1:  # trl/trainer/model_config.py: __post_init__
        stated = stated[0]
    names = targets_of({"lora_target_modules": stated}, "lora_target_modules", reading)
    if not names:
        reading.assume("lora_target_modules", "q_proj, v_proj: PEFT's own for most models")
    options["lora_targets"] = (names or PEFT_DEFAULT) + fused_experts(config, reading)
    if config.get("lora_modules_to_save"):
        options["modules_to_save"] = tuple(config["lora_modules_to_save"])


def _precision(config: Config, reading: Reading) -> None:
    """Dtypes of weights (``dtype``) and of products (``bf16``, on by default)."""
    options, is_full = reading.options, reading.options["method"] == "full"
    name = "torch_dtype" if "torch_dtype" in config else "dtype"
    dtype = config.get(name, "float32")
    check_types(config, reading)
    if config.get("fp16") and dtype == "float16" and not is_full:
        options["precision"] = "fp16"
        return
    if config.get("fp16"):
        reading.refuse("fp16", config["fp16"], "not simulated: use bf16: true, or dtype: float16")
    elif dtype not in DTYPES:
        reading.refuse(name, dtype, f"not simulated: use one of {', '.join(DTYPES)}")
    elif dtype == "auto":
        reading.mark(name, dtype, "assumed", "bfloat16, as most models have it")
    if config.get("bf16", True) is False:
        if DTYPES.get(dtype) == "bf16" and not is_full:
            reading.refuse("bf16", config["bf16"], "adapters without autocast are not simulated")
        options["precision"] = DTYPES.get(dtype, "fp32")
    elif DTYPES.get(dtype) == "bf16":
        options["precision"] = "bf16" if is_full else "bf16-mixed"


def _loss(config: Config, reading: Reading) -> None:
    options = reading.options
    if config.get("router_aux_loss_coef") == 0:
        options["router_loss"] = False
    # trl/trainer/sft_trainer.py:1144 computes every loss in tiles, also with liger-kernel
    options["liger_kernels"] = bool(config.get("use_liger_kernel"))
    stated = config.get("loss_type")
    losses = LOSSES[options["task"]]
    for loss in stated if isinstance(stated, list) else [stated]:
        if loss is not None and loss not in losses:
            reading.refuse("loss_type", stated, f"not simulated: use one of {', '.join(losses)}")


def _preference(config: Config, reading: Reading) -> None:
    """Reference and dropout of the tasks that compare or score sequences."""
    options = reading.options
    if options["task"] in WITH_DROPOUT:
        return
    if config.get("precompute_ref_log_probs"):
        options["reference"] = "precomputed"
    if options["task"] == "reward":
        text = "longer examples are cut; TRL's RewardTrainer leaves them out"
        reading.mark("max_length", config.get("max_length", ABSENT), "assumed", text)
    if not options.get("lora_dropout"):
        return
    if config.get("disable_dropout") is False:
        text = "dropout in this task is not simulated: use lora_dropout: 0"
        reading.refuse("disable_dropout", config["disable_dropout"], text)
    elif "lora_dropout" in config:
        text = "the trainer disables it"
        reading.mark("lora_dropout", config["lora_dropout"], "irrelevant", text)
    options["lora_dropout"] = 0.0


TRL = Trainer(
    name="TRL",
    version="1.16",
    keys=KEYS,
    unknown=refused("TRL 1.16 has no such key with transformers 5.23, and refuses it", idle=()),
    shapes={
        "fsdp": (str, list, bool),
        "fsdp_config": (dict,),
        "lora_dropout": (int, float),
        "max_grad_norm": (int, float),
        "lora_target_modules": (str, list),
        "lora_modules_to_save": (list,),
        "lora_target_parameters": (list,),
        "dtype": (str,),
        "torch_dtype": (str,),
        "loss_type": (str, list),
    },
    derive=derive,
    earlier=EARLIER_KEYS,
    renamed=RENAMED,
)
TRL_IN_PYTHON = replace(TRL, keys=KEYS | KEYS_OF_PYTHON)
