"""Tasks of TRL's trainers: the keys that only some of them have, and their losses."""

from orchestrator.configurations.key_classes import Config, Reading
from trials.recipes.fields import Task

TRAINER_CLASS = "trainer class"
"""Key that stands for the class of a Python file's configuration."""
TRAINING_DATA = "train_dataset"
"""Argument of a trainer in a Python file, read as TRL's ``datasets``."""

CLASSES: dict[str, Task] = {
    "SFTConfig": "sft",
    "DPOConfig": "dpo",
    "KTOConfig": "kto",
    "RewardConfig": "reward",
    "ORPOConfig": "orpo",
}

_NAMES: dict[Task, str] = {
    "sft": """
        router_aux_loss_coef chat_template_path dataset_text_field dataset_kwargs eos_token
        truncation_mode shuffle_dataset packing packing_strategy padding_free
        pad_to_multiple_of eval_packing completion_only_loss assistant_only_loss loss_type
        activation_offloading pad_token
    """,
    "dpo": """
        router_aux_loss_coef disable_dropout truncation_mode padding_free pad_to_multiple_of
        precompute_ref_log_probs precompute_ref_batch_size loss_type loss_weights ld_alpha
        f_divergence_type f_alpha_divergence_coef label_smoothing beta use_weighting
        discopop_tau activation_offloading sync_ref_model ref_model_mixup_alpha
        ref_model_sync_steps pad_token
    """,
    "kto": """
        router_aux_loss_coef disable_dropout pad_to_multiple_of precompute_ref_log_probs
        precompute_ref_batch_size loss_type beta desirable_weight undesirable_weight
        activation_offloading sync_ref_model ref_model_mixup_alpha ref_model_sync_steps
    """,
    "reward": """
        chat_template_path disable_dropout eos_token pad_to_multiple_of
        center_rewards_coefficient activation_offloading pad_token
    """,
    "orpo": """
        max_completion_length beta disable_dropout padding_value generate_during_eval
        is_encoder_decoder
    """,
}
GRPO = """
    cache_implementation cast_lm_head_to_fp32 chat_template_kwargs delta ds3_gather_for_generation
    entropy_coef entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target epsilon
    epsilon_high generation_batch_size generation_kwargs importance_sampling_level
    log_completions log_completions_hub_repo log_multimodal log_unique_prompts
    mask_truncated_completions max_tool_calling_iterations min_p multi_objective_aggregation
    num_completions_to_print num_generations num_generations_eval num_iterations
    off_policy_mask_threshold repetition_penalty reward_funcs reward_model_name_or_path
    reward_weights sapo_temperature_neg sapo_temperature_pos scale_rewards steps_per_generation
    temperature top_entropy_quantile top_k top_p transformers_continuous_batching_config
    use_adaptive_entropy use_bias_correction_kl use_transformers_continuous_batching
    use_transformers_paged use_vllm vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos
    vllm_*
"""
"""Keys that only GRPO's configuration and command have."""
OWN_KEYS = {task: frozenset(names.split()) for task, names in _NAMES.items()}
"""Keys that a trainer's configuration has and some other's has not (trl/trainer/*_config.py)."""

LOSSES: dict[Task, tuple[str, ...]] = {
    "sft": ("nll", "chunked_nll"),
    # All are functions of a few numbers of each pair (trl/trainer/dpo_trainer.py:1386).
    "dpo": (
        *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard"),
        *("aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
    ),
    "kto": ("kto",),  # without a KL term, apo_zero_unpaired has a pass less
    "reward": (),
    "orpo": (),
}
"""Losses of each task that cost the same."""


def task_of(config: Config, reading: Reading) -> Task:
    """Task by the class of a Python file's configuration, else by the keys of a YAML file."""
    if (stated := str(config.get(TRAINER_CLASS))) in CLASSES:
        return CLASSES[stated]
    fitting = [task for task in OWN_KEYS if _fits(task, config)] or ["sft"]
    task = fitting[0]
    command = f"'trl {task}'" if task != "orpo" else "ORPOTrainer"
    others = f": give --task for {' or '.join(fitting[1:])}" if len(fitting) > 1 else ""
    reading.assume("trainer", f"{task}, by the keys, as {command} trains{others}")
    return task


def _fits(task: Task, config: Config) -> bool:
    loss = config.get("loss_type")
    losses = loss if isinstance(loss, list) else [loss]
    return not any(_lacks(task, str(name)) for name in config) and (
        loss is None or any(name in LOSSES[task] for name in losses)
    )


def _lacks(task: Task, name: str) -> bool:
    """Whether only other trainers have a key."""
    return name not in OWN_KEYS[task] and any(name in own for own in OWN_KEYS.values())


def refuse_keys_of_other_tasks(task: Task, config: Config, reading: Reading) -> None:
    """Refuse the keys that the task's trainer does not have, as TRL itself does."""
    for name, value in config.items():
        if _lacks(task, str(name)):
            reading.refuse(str(name), value, f"no key of TRL's trainer of task {task}: remove it")
