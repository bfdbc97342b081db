"""Configurations of LLaMA-Factory and TRL: what each key comes to."""

from typing import Any

import pytest

from orchestrator.configurations.configuration import (
    Configuration,
    ConfigurationError,
    configuration_of,
)
from orchestrator.configurations.estimate_options import with_configuration
from orchestrator.configurations.read_file import TRAINERS, trainer_of
from orchestrator.configurations.trainers.llama_factory import LLAMA_FACTORY
from orchestrator.configurations.trainers.trl import TRL
from orchestrator.estimating.estimate_request import EstimateRequest
from orchestrator.request import request_of
from orchestrator.spec.recipe_options import recipe_of

FACTORY: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen3-4B-Instruct-2507",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_target": "all",
    "bf16": True,
}
FULL = FACTORY | {"finetuning_type": "full"}
FREEZE = FACTORY | {"finetuning_type": "freeze"}
OFT = FACTORY | {"finetuning_type": "oft"}
CHECKPOINTING = "activation_checkpointing_kwargs"
SFT: dict[str, Any] = {"model_name_or_path": "Qwen/Qwen2.5-0.5B", "learning_rate": 1e-4}
PEFT = SFT | {"use_peft": True}


def read(values: dict[str, Any]) -> Configuration:
    """Read a configuration as the trainer that it is for."""
    return configuration_of(trainer_of(values, "f.yaml"), values, "f.yaml", TRAINERS)


@pytest.mark.parametrize(
    ("values", "options"),
    [
        (FACTORY, {"method": "lora", "lora_rank": 8, "lora_alpha": 16, "lora_dropout": 0.0}),
        (FACTORY, {"lora_targets": ("all-linear",), "precision": "bf16-mixed", "epochs": 3}),
        (FACTORY, {"gradient_checkpointing": "reentrant", "batch_size": 8, "loss": "full-logits"}),
        (FACTORY | {"gradient_accumulation_steps": 4}, {"effective_batch": 32}),
        (FACTORY | {"max_steps": 10}, {"steps": 10, "epochs": 1}),
        (FACTORY | {"lora_target": "q_proj, v_proj"}, {"lora_targets": ("q_proj", "v_proj")}),
        (FACTORY | {"additional_target": "lm_head"}, {"modules_to_save": ("lm_head",)}),
        (FACTORY | {"use_dora": True}, {"dora": True}),
        (FACTORY | {"quantization_bit": 4}, {"method": "qlora", "quantisation": "nf4"}),
        (FACTORY | {"quantization_bit": 4, "double_quantization": False}, {"loss": "full-logits"}),
        (FACTORY | {"quantization_bit": 8}, {"quantisation": "int8", "double_quantisation": None}),
        (FACTORY | {"disable_gradient_checkpointing": True}, {"gradient_checkpointing": False}),
        (FACTORY | {"flash_attn": "fa2"}, {"attention": "flash_attention_2"}),
        (FACTORY | {"enable_liger_kernel": True}, {"liger_kernels": True, "loss": "liger"}),
        (FACTORY | {"neat_packing": True}, {"packing": True}),
        (FACTORY | {"flash_attn": "fa3"}, {"attention": "flash_attention_2"}),
        (FACTORY | {"use_unsloth_gc": True}, {"gradient_checkpointing": "reentrant"}),
        (FACTORY | {"use_reentrant_gc": False}, {"gradient_checkpointing": True}),
        (
            FACTORY | {"model_name_or_path": "a/Llama-3-8B-Instruct-GPTQ"},
            {"method": "qlora", "quantisation": "nf4", "double_quantisation": True},
        ),
        (
            FACTORY | {"quantization_bit": 4, "quantization_method": "hqq"},
            {"quantisation": "nf4", "double_quantisation": False},
        ),
        (PEFT | {"fp16": True, "dtype": "float16"}, {"precision": "fp16"}),
        (PEFT | {"optim": "lion_32bit"}, {"optimizer": "adamw"}),
        (SFT | {"padding_free": True, "auto_find_batch_size": True}, {"packing": None}),
        (FACTORY | {"packing": True}, {"packing": False}),
        (FACTORY | {"moe_aux_loss_coef": 0.1}, {"router_loss": True}),
        (FACTORY | {"quantization_bit": 4}, {"experts": "grouped"}),
        (FACTORY | {"quantization_bit": "4"}, {"method": "qlora"}),
        (FACTORY | {"lora_target": ["q_proj"]}, {"lora_targets": ("q_proj",)}),
        (FACTORY | {"lora_target": ["all"]}, {"lora_targets": ("all-linear",)}),
        (FACTORY | {"additional_target": ["lm_head"]}, {"modules_to_save": ("lm_head",)}),
        (FACTORY | {"num_train_epochs": 1.5}, {"epochs": 2}),
        (PEFT | {"lora_target_modules": ["all-linear"]}, {"lora_targets": ("all-linear",)}),
        (SFT | {"attn_implementation": "flash_attention_3"}, {"attention": "flash_attention_2"}),
        (SFT | {"gradient_checkpointing": "false"}, {"gradient_checkpointing": False}),
        (PEFT | {"load_in_4bit": "False", "lora_r": "8"}, {"method": "lora", "lora_rank": 8}),
        (PEFT | {"load_in_4bit": True}, {"experts": "grouped", "quantised_experts": None}),
        (FACTORY | {"optim": "paged_adamw_8bit"}, {"optimizer": "paged_adamw_8bit"}),
        (FULL, {"method": "full", "precision": "bf16-mixed", "lora_rank": None}),
        (FACTORY | {"stage": "rm"}, {"task": "reward", "loss": "full-logits"}),
        (FULL | {"stage": "rm"}, {"task": "reward", "reference": None}),
        (FREEZE, {"method": "full", "trained_layers": 2, "precision": "bf16-mixed"}),
        (
            FREEZE | {"use_llama_pro": True, "freeze_trainable_layers": 8},
            {"trained_layers": 8, "spread_layers": True, "lora_rank": None},
        ),
        (OFT, {"method": "lora", "oft_block_size": 32, "lora_targets": ("all-linear",)}),
        (OFT, {"precision": "bf16-mixed", "lora_rank": None, "lora_alpha": None}),
        (
            OFT | {"quantization_bit": 4, "oft_block_size": 64, "lora_dropout": 0.1},
            {"method": "qlora", "oft_block_size": 64, "lora_dropout": None},
        ),
        (FULL | {"use_muon": True, "optim": "adafactor"}, {"optimizer": "muon"}),
        (FACTORY | {"use_muon": True, "loraplus_lr_ratio": 16.0}, {"optimizer": "adamw"}),
        (FULL | {"use_eaft_loss": True, "enable_liger_kernel": True}, {"loss": "eaft"}),
        (FACTORY | {"use_dft_loss": True, "use_eaft_loss": True}, {"loss": "dft"}),
        (FACTORY | {"use_dft_loss": True, "stage": "pt"}, {"loss": "full-logits"}),
        (FULL | {"pure_bf16": True}, {"precision": "bf16"}),
        (FULL | {"bf16": False}, {"precision": "fp32"}),
        (FACTORY | {"bf16": False}, {"precision": "bf16", "adapter_dtype": "fp32"}),
        (FACTORY | {"bf16": False, "pure_bf16": True}, {"precision": "bf16"}),
        (
            FACTORY | {"stage": "dpo", "lora_dropout": 0.1},
            {"task": "dpo", "loss": "full-logits", "reference": None, "lora_dropout": 0.0},
        ),
        (FACTORY | {"stage": "dpo", "pref_loss": "simpo"}, {"reference": "precomputed"}),
        (FACTORY | {"stage": "kto", "pref_loss": "simpo"}, {"task": "kto", "reference": None}),
        (FULL | {"stage": "dpo", "pure_bf16": True, "bf16": False}, {"precision": "bf16"}),
        (FULL | {"stage": "dpo", "pref_loss": "orpo"}, {"precision": "bf16-mixed"}),
        (SFT, {"method": "full", "batch_size": 8, "epochs": 3, "task": "sft"}),
        (PEFT, {"method": "lora", "lora_rank": 16, "lora_alpha": 32, "lora_dropout": 0.05}),
        (PEFT | {"lora_target_modules": "all-linear"}, {"lora_targets": ("all-linear",)}),
        (PEFT | {"load_in_4bit": True}, {"method": "qlora", "double_quantisation": False}),
        (PEFT | {"load_in_8bit": True}, {"quantisation": "int8"}),
        (PEFT | {"dtype": "bfloat16"}, {"precision": "bf16-mixed"}),
        (SFT | {"dtype": "bfloat16"}, {"precision": "bf16"}),
        (SFT | {"bf16": False}, {"precision": "fp32"}),
        (SFT | {"packing": True, "label_smoothing_factor": 0.0}, {"packing": True}),
        (SFT | {"gradient_checkpointing": False}, {"gradient_checkpointing": False}),
        (SFT | {"activation_checkpointing": False}, {"gradient_checkpointing": False}),
        (SFT | {"train_sampling_strategy": "group_by_length"}, {"group_by_length": True}),
        (SFT | {"use_liger_kernel": True}, {"liger_kernels": True}),
        (SFT | {"router_aux_loss_coef": 0.0}, {"router_loss": False}),
        (
            SFT | {"attn_implementation": "kernels-community/flash-attn2"},
            {"attention": "flash_attention_2"},
        ),
        (PEFT | {"lora_modules_to_save": ["lm_head"]}, {"modules_to_save": ("lm_head",)}),
    ],
)
def test_keys_set_the_options_of_the_estimate(
    values: dict[str, Any], options: dict[str, Any]
) -> None:
    """A file becomes the recipe and the batches that its trainer runs with it."""
    configuration = read(values)
    configuration.check()
    assert {name: configuration.options.get(name) for name in options} == options
    recipe_of(request_of(EstimateRequest, with_configuration(configuration, {})[0]).recipe)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        (FACTORY | {"stage": "rm", "lora_dropout": 0.1}, "lora_dropout"),
        (FACTORY | {"stage": "ppo"}, "stage"),
        (FULL | {"stage": "dpo"}, "stage"),
        (FACTORY | {"stage": "dpo", "pref_loss": "apo"}, "pref_loss"),
        (FACTORY | {"stage": "dpo", "ref_model": "a/b"}, "ref_model"),
        (FACTORY | {"stage": "dpo", "neat_packing": True}, "neat_packing"),
        (FACTORY | {"do_train": False}, "do_train"),
        (FACTORY | {"finetuning_type": "lomo"}, "finetuning_type"),
        (FREEZE | {"freeze_trainable_modules": "mlp"}, "freeze_trainable_modules"),
        (FREEZE | {"bf16": False}, "bf16"),
        (FACTORY | {"use_llama_pro": True}, "use_llama_pro"),
        (OFT | {"oft_rank": 4}, "oft_rank"),
        (OFT | {"module_dropout": 0.1}, "module_dropout"),
        (FACTORY | {"deepspeed": ["z3.json"]}, "deepspeed"),
        (FACTORY | {"use_apollo": True}, "use_apollo"),
        (FACTORY | {"image_max_pixels": 5}, "image_max_pixels"),
        (FACTORY | {"no_such_key": 5}, "no_such_key"),
        (FACTORY | {"pure_bf16": True, "fp16": True}, "fp16"),
        (FACTORY | {"fp16": True}, "fp16"),
        (PEFT | {"bf16": True, "fp16": True, "dtype": "float16"}, "fp16"),
        (FACTORY | {"quantization_bit": 3}, "quantization_bit"),
        (FACTORY | {"quantization_bit": 8, "quantization_method": "hqq"}, "quantization_method"),
        (FULL | {"quantization_bit": 4}, "quantization_bit"),
        (FACTORY | {"model_name_or_path": "a/Llama-3-8B-AQLM-2Bit"}, "model_name_or_path"),
        (FULL | {"model_name_or_path": "a/Llama-AWQ"}, "model_name_or_path"),
        (FACTORY | {"flash_attn": "sage"}, "flash_attn"),
        (SFT | {"load_in_4bit": True}, "load_in_4bit"),
        (SFT | {"fp16": True}, "fp16"),
        (SFT | {"dtype": "float8"}, "dtype"),
        (SFT | {"attn_implementation": "sage"}, "attn_implementation"),
        (SFT | {"fp16": True, "dtype": "float16"}, "fp16"),
        (SFT | {"loss_type": "dft"}, "loss_type"),
        (SFT | {"packing_strategy": "wrapped"}, "packing_strategy"),
        (SFT | {"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        (SFT | {"num_generations": 4}, "num_generations"),
        (SFT | {"activation_checkpointing_kwargs": {"every_n_layers": 2}}, CHECKPOINTING),
        (PEFT | {"dtype": "auto", "bf16": False}, "bf16"),
    ],
)
def test_what_would_be_wrong_is_refused_by_name(values: dict[str, Any], key: str) -> None:
    """A refusal names the key."""
    refused = [line.key for line in read(values).lines if line.key_class == "refused"]
    assert key in refused


def test_the_trainer_of_a_file_is_recognised_by_its_keys() -> None:
    """Both trainers have model_name_or_path; LLaMA-Factory has keys of its own."""
    assert trainer_of(FACTORY, "f") is LLAMA_FACTORY
    assert trainer_of(SFT, "f") is TRL


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model_class": "llm"}, "own training loop is"),
        ({"dist_config": {"name": "fsdp2"}}, "own training loop on several GPUs is"),
    ],
)
def test_a_file_of_llama_factorys_version_1_is_refused_by_name(
    keys: dict[str, Any], words: str
) -> None:
    """The message says which file is read."""
    with pytest.raises(ConfigurationError, match=f"version 1, whose {words} not simulated"):
        trainer_of({"model": "Qwen/Qwen3-0.6B", "micro_batch_size": 1} | keys, "f")


def test_absent_keys_have_the_defaults_of_trl() -> None:
    """A file of TRL states the recipe that TRL's defaults give to the same options."""
    options, _ = with_configuration(read(PEFT), {})
    recipe = recipe_of(request_of(EstimateRequest, options).recipe)
    assert (recipe.precision, recipe.loss) == ("fp32-mixed-load", "chunked")
    assert (recipe.gradient_checkpointing, recipe.router_loss) == (True, "auto")


@pytest.mark.parametrize(
    ("values", "key", "hint"),
    [
        (SFT | {"max_seq_length": 512}, "max_seq_length", "renamed to max_length"),
        (SFT | {"sequence_len": 512}, "sequence_len", "of axolotl; that of TRL is max_length"),
        (SFT | {"adapter": "lora"}, "adapter", "a key of axolotl"),
        (SFT | {"num_generations": 8}, "num_generations", "of GRPO"),
        (FACTORY | {"lora_r": 8}, "lora_r", "that of LLaMA-Factory is lora_rank"),
        (SFT | {"lora_aplha": 8}, "lora_aplha", "did you mean 'lora_alpha'?"),
    ],
)
def test_a_key_of_another_version_or_trainer_has_the_name_of_ours(
    values: dict[str, Any], key: str, hint: str
) -> None:
    """So that a file of an older script is mended at once."""
    (line,) = (line for line in read(values).lines if line.key == key)
    assert (line.key_class, hint in line.meaning) == ("refused", True), line.meaning
