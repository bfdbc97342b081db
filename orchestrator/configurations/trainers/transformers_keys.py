"""Class of each key of transformers' ``TrainingArguments``, which other trainers extend."""

from typing import Literal

from orchestrator.configurations.key_classes import (
    Config,
    Key,
    Reading,
    assumed,
    irrelevant,
    refused,
    shared,
    table_of,
    used,
)
from orchestrator.configurations.trainers.axolotl_keys import (
    KEPT_CACHE,
    LOADING,
    LOGGING,
    NO_EVALUATION,
    NOT_SIMULATED,
    ONE_MICRO_BATCH,
    RESUMES,
    SAVING,
    SEVERAL_GPUS,
)
from trials.recipes.fields import REENTRANT

LEARNING = irrelevant("learning, not speed")
EVALUATION = irrelevant("evaluation, which the estimate leaves out")
OF_PROCESSES = irrelevant("only on several GPUs")

CHECKPOINTING_KWARGS = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
SAMPLING = {"random": False, "sequential": False, "group_by_length": True}

TRAINING_ARGUMENTS: dict[str, Key] = {
    "per_device_train_batch_size": shared("batch_size, effective_batch"),
    "gradient_accumulation_steps": shared("effective_batch"),
    "num_train_epochs": shared("epochs"),
    "max_steps": shared("examples, epochs"),
    "optim": shared("optimizer"),
    "max_grad_norm": shared("max_grad_norm"),
    "bf16": shared("precision"),
    "fp16": shared("precision"),
    "gradient_checkpointing": shared("gradient_checkpointing"),
    "activation_checkpointing": shared("gradient_checkpointing"),
    "gradient_checkpointing_kwargs": shared("gradient_checkpointing"),
    "activation_checkpointing_kwargs": shared("gradient_checkpointing"),
    "train_sampling_strategy": used("group_by_length", SAMPLING),
    "torch_compile": used("compile", {True: "model", False: None}),
} | table_of(
    (
        LEARNING,
        """
        learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon lr_scheduler_type
        lr_scheduler_kwargs warmup_steps seed data_seed label_smoothing_factor
        optim_args full_determinism log_level log_level_replica metric_for_best_model
        greater_is_better ignore_data_skip length_column_name label_names
        """,
    ),
    (
        LOGGING,
        """
        logging_first_step logging_nan_inf_filter logging_steps logging_strategy report_to
        run_name disable_tqdm log_on_each_node trackio_bucket_id trackio_space_id
        trackio_static_space_id include_num_input_tokens_seen project
        """,
    ),
    (
        SAVING,
        """
        output_dir save_on_each_node save_only_model save_steps save_strategy save_total_limit
        hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token
        push_to_hub load_best_model_at_end restore_callback_states_from_checkpoint
        """,
    ),
    (
        LOADING,
        """
        dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context
        dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory
        dataloader_prefetch_factor remove_unused_columns do_train skip_memory_metrics
        torch_compile_backend torch_compile_mode use_cache enable_jit_checkpoint debug
        average_tokens_across_devices
        """,
    ),
    (assumed(NO_EVALUATION), "do_eval eval_strategy do_predict"),
    (
        EVALUATION,
        """
        per_device_eval_batch_size eval_accumulation_steps eval_delay eval_do_concat_batches
        eval_on_start eval_steps eval_use_gather_object prediction_loss_only batch_eval_metrics
        include_for_metrics bf16_full_eval fp16_full_eval
        """,
    ),
    (RESUMES, "resume_from_checkpoint"),
    (assumed("no noise, which takes next to no time"), "neftune_noise_alpha"),
    (assumed("tf32 off: only products in fp32 are faster with it"), "tf32"),
    (refused(SEVERAL_GPUS), "parallelism_config"),
    (assumed(ONE_MICRO_BATCH), "auto_find_batch_size"),
    (assumed(KEPT_CACHE), "torch_empty_cache_steps"),
    (shared("strategy"), "deepspeed fsdp fsdp_config accelerator_config"),
    (
        OF_PROCESSES,
        """
        ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters
        ddp_static_graph ddp_timeout local_rank
        """,
    ),
    (refused(NOT_SIMULATED), "optim_target_modules use_cpu liger_kernel_config"),
)
"""Class of each key of ``TrainingArguments`` in transformers 5.23."""

OTHER_VERSIONS: dict[str, Key] = {"group_by_length": used("group_by_length")} | table_of(
    (LEARNING, "warmup_ratio"),
    (LOGGING, "logging_* trackio_* include_tokens_per_second"),
    (SAVING, "overwrite_output_dir save_* hub_* push_to_hub_*"),
    (LOADING, "dataloader_*"),
    (assumed(NO_EVALUATION), "evaluation_strategy predict_with_generate"),
    (EVALUATION, "eval_*"),
    (refused(SEVERAL_GPUS), "tp_size"),
    (OF_PROCESSES, "ddp_* fsdp_* ray_*"),
    (refused(NOT_SIMULATED), "jit_mode_eval lomo use_liger_kernel_config"),
)
"""Class of each key that other versions of transformers have, or of its subclasses."""


def check_types(config: Config, reading: Reading, bf16: str = "bf16") -> None:
    """Refuse bf16 and fp16 together, as ``TrainingArguments`` does (training_args.py:1784).

    Args:
        config: keys of the file.
        reading: of the file.
        bf16: key that asks for bf16.
    """
    if config.get(bf16) and config.get("fp16"):
        text = f"excludes {bf16}, and transformers refuses both: remove one of them"
        reading.refuse("fp16", config["fp16"], text)


def checkpoints(config: Config, reading: Reading, *, by_default: bool) -> bool:
    """Whether layers are checkpointed; the newer of two names decides (training_args.py:1533)."""
    for name in CHECKPOINTING_KWARGS:
        more = config.get(name)
        if isinstance(more, dict) and (more.get("every_n_layers") or 1) != 1:
            reading.refuse(name, more, "every layer or none is simulated: remove every_n_layers")
    names = ("activation_checkpointing", "gradient_checkpointing")
    stated = (config[name] for name in names if config.get(name) is not None)
    return bool(next(stated, by_default))


def checkpointing_of(config: Config, *, older: bool) -> bool | Literal["reentrant"]:
    """Implementation of a trainer's checkpoints.

    Args:
        config: keys of the file.
        older: whether it is PyTorch's reentrant one where the file states none.
    """
    keywords = [config.get(name) for name in CHECKPOINTING_KWARGS]
    stated = next((words for words in keywords if isinstance(words, dict)), {})
    return REENTRANT if stated.get("use_reentrant", older) else True
