"""Configurations of axolotl: what each key comes to."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.cli.main import main
from orchestrator.configurations.configuration import (
    Configuration,
    ConfigurationError,
    configuration_of,
)
from orchestrator.configurations.estimate_options import with_configuration
from orchestrator.configurations.keys_reference import keys_reference
from orchestrator.configurations.read_file import TRAINERS, read_configuration
from orchestrator.configurations.trainer import Trainer
from orchestrator.estimating.estimate_request import EstimateRequest
from orchestrator.request import request_of
from orchestrator.spec.recipe_options import recipe_of, recipe_text

BASE: dict[str, Any] = {
    "base_model": "NousResearch/Meta-Llama-3-8B",
    "sequence_len": 1024,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_epochs": 3,
    "bf16": True,
    "attn_implementation": "flash_attention_2",
}
CHECKPOINTED = BASE | {"gradient_checkpointing": True}
NEWER = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
LORA = BASE | {
    "adapter": "lora",
    "lora_r": 16,
    "lora_alpha": 8,
    "lora_dropout": 0.05,
    "lora_target_linear": True,
}
QLORA = LORA | {"adapter": "qlora", "load_in_4bit": True}
WHOLE: dict[str, dict[str, Any]] = {
    "axolotl": QLORA,
    "LLaMA-Factory": {"model_name_or_path": "a/b", "do_train": True, "bf16": True},
    "TRL": {"model_name_or_path": "a/b", "use_peft": True},
}
LIGER = "axolotl.integrations.liger.LigerPlugin"
CCE = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"


def read(folder: Path, values: dict[str, Any]) -> Configuration:
    """Write a configuration and read it."""
    file = folder / "config.yml"
    file.write_text(yaml.safe_dump(values), "utf-8")
    return read_configuration(file)


def classes(configuration: Configuration) -> dict[str, str]:
    """Class of each key."""
    return {line.key: line.key_class for line in configuration.lines}


@pytest.mark.parametrize(
    ("values", "options"),
    [
        (BASE, {"method": "full", "precision": "bf16", "optimizer": "adamw", "task": "sft"}),
        (BASE, {"batch_size": 2, "effective_batch": 8, "epochs": 3, "max_grad_norm": 1.0}),
        (BASE, {"loss": "full-logits", "gradient_checkpointing": False, "packing": False}),
        (BASE | {"max_steps": 50}, {"steps": 50, "epochs": 1}),
        (BASE | {"bf16": False, "attn_implementation": "sdpa"}, {"precision": "fp32"}),
        (BASE | {"bf16": False, "float16": True}, {"precision": "bf16"}),
        (LORA | {"bf16": False, "float16": True}, {"adapter_dtype": "fp32"}),
        (BASE | {"optimizer": "adamw_torch"}, {"optimizer": "adamw_foreach"}),
        (BASE | {"optimizer": "adamw_bnb_8bit"}, {"optimizer": "adamw_8bit"}),
        (BASE | {"optimizer": "adamw_torch_4bit"}, {"optimizer": "torchao_adamw_4bit"}),
        (BASE | {"gradient_checkpointing": True}, {"gradient_checkpointing": "reentrant"}),
        (CHECKPOINTED | NEWER, {"gradient_checkpointing": True}),
        (BASE | {"gradient_checkpointing": "offload"}, {"activation_offloading": True}),
        (BASE | {"attn_implementation": "eager"}, {"attention": "eager"}),
        (BASE | {"attn_implementation": None, "sdp_attention": True}, {"attention": "sdpa"}),
        (BASE | {"sample_packing": True}, {"packing": True}),
        (BASE | {"group_by_length": True}, {"group_by_length": True}),
        (BASE | {"torch_compile": True}, {"compile": "model"}),
        (BASE | {"plugins": [CCE]}, {"loss": "cce"}),
        (BASE | {"plugins": [LIGER], "liger_fused_linear_cross_entropy": True}, {"loss": "liger"}),
        (
            BASE
            | {"plugins": [LIGER]}
            | dict.fromkeys(("liger_rope", "liger_rms_norm", "liger_glu_activation"), True),
            {"liger_kernels": True, "loss": "full-logits"},
        ),
        (BASE | {"liger_rope": True}, {"liger_kernels": False}),
        (BASE | {"model_config": {"output_router_logits": True}}, {"router_loss": True}),
        (LORA, {"method": "lora", "lora_rank": 16, "lora_alpha": 8, "lora_dropout": 0.05}),
        (LORA, {"precision": "bf16-mixed", "lora_targets": ("all-linear",)}),
        (LORA | {"bf16": False, "fp16": True}, {"precision": "fp16"}),
        (LORA | {"bf16": True, "fp16": True}, {"precision": "bf16-mixed"}),
        (
            LORA | {"lora_target_linear": False, "lora_target_modules": ["q_proj", "up_proj"]},
            {"lora_targets": ("q_proj", "up_proj")},
        ),
        (
            LORA
            | {
                "lora_target_linear": False,
                "lora_target_modules": r"model.layers.[\d]+.(mlp|self_attn).(up|down|q)_proj",
            },
            {"lora_targets": ("q_proj", "up_proj", "down_proj")},
        ),
        (LORA | {"lora_modules_to_save": ["lm_head"]}, {"modules_to_save": ("lm_head",)}),
        (LORA | {"peft_use_dora": True}, {"dora": True}),
        (LORA | {"load_in_8bit": True}, {"method": "qlora", "quantisation": "int8"}),
        (QLORA, {"method": "qlora", "quantisation": "nf4", "double_quantisation": True}),
        (BASE, {"experts": "grouped"}),
        (LORA | {"bf16": "full"}, {"precision": "bf16", "adapter_dtype": "fp32"}),
        (LORA | {"load_in_4bit": "false", "lora_r": "4"}, {"method": "lora", "lora_rank": 4}),
        (QLORA, {"experts": "grouped", "quantised_experts": None}),
        (
            QLORA
            | {
                "quantize_moe_experts": True,
                "lora_target_linear": False,
                "lora_target_modules": ["q_proj"],
            },
            {"experts": "grouped", "quantised_experts": True, "lora_targets": ("q_proj",)},
        ),
        (
            QLORA | {"bnb_config_kwargs": {"bnb_4bit_use_double_quant": False}},
            {"double_quantisation": False, "kbit_preparation": False},
        ),
        (
            LORA | {"rl": "dpo"},
            {"task": "dpo", "lora_dropout": 0.0, "gradient_checkpointing": False},
        ),
        (BASE | {"rl": "ipo", "gradient_checkpointing": None}, {"gradient_checkpointing": True}),
        (LORA | {"rl": "kto"}, {"task": "kto"}),
        (LORA | {"rl": "orpo"}, {"task": "orpo"}),
        (LORA | {"rl": "simpo"}, {"task": "orpo"}),
        (BASE | {"attn_implementation": "flex_attention"}, {"attention": "flash_attention_2"}),
        (BASE | {"flash_attn_cross_entropy": True}, {"loss": "full-logits"}),
        (BASE | {"optimizer": "adopt_adamw"}, {"optimizer": "adamw_foreach"}),
        (LORA | {"optimizer": "lion_8bit"}, {"optimizer": "adamw"}),
        (LORA | {"gemma4_hybrid_attn_impl": True}, {"attention": "sdpa"}),
        (
            LORA | {"gptq": True},
            {"method": "qlora", "quantisation": "nf4", "double_quantisation": True},
        ),
        (
            LORA | {"base_model": "nvidia/Qwen3-8B-NVFP4"},
            {"method": "qlora", "double_quantisation": False, "quantised_experts": True},
        ),
        (
            LORA
            | {
                "lora_target_linear": False,
                "lora_dropout": 0,
                "lora_target_modules": ["q_proj"],
                "lora_target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
                "plugins": ["axolotl.integrations.kernels.KernelsPlugin"],
                "use_scattermoe": True,
                "experts_implementation": "scattermoe",
            },
            {"lora_targets": ("q_proj", "experts"), "experts": "grouped"},
        ),
        (LORA | {"reward_model": True}, {"task": "reward"}),
        (
            LORA | {"rl": "dpo", "precompute_ref_log_probs": True},
            {"reference": "precomputed"},
        ),
    ],
)
def test_keys_set_the_options_of_the_estimate(
    tmp_path: Path, values: dict[str, Any], options: dict[str, Any]
) -> None:
    """A file becomes the recipe and the batches that axolotl runs with it."""
    configuration = read(tmp_path, values)
    configuration.check()
    assert {name: configuration.options.get(name) for name in options} == options


@pytest.mark.parametrize(
    ("values", "key"),
    [
        (BASE | {"fsdp": ["full_shard"]}, "fsdp"),
        (BASE | {"deepspeed": 3}, "deepspeed"),
        (BASE | {"deepcompile": True}, "deepcompile"),
        (BASE | {"tensor_parallel_size": 2}, "tensor_parallel_size"),
        (BASE | {"optimizer": "muon"}, "optimizer"),
        (BASE | {"rl": "grpo"}, "rl"),
        (BASE | {"processor_type": "AutoProcessor"}, "processor_type"),
        (BASE | {"attn_implementation": "sage"}, "attn_implementation"),
        (BASE | {"adapter": "llama-adapter"}, "adapter"),
        (BASE | {"adapter": "qlora", "lora_r": 8}, "adapter"),
        (BASE | {"load_in_4bit": True}, "load_in_4bit"),
        (BASE | {"bf16": False, "fp16": True}, "fp16"),
        (BASE | {"bf16": False, "bfloat16": True, "fp16": True}, "fp16"),
        (BASE | {"plugins": ["axolotl.integrations.spectrum.SpectrumPlugin"]}, "plugins"),
        (BASE | {"experts_implementation": "batched_mm"}, "experts_implementation"),
        (BASE | {"nvfp4_merge_aware": True}, "nvfp4_merge_aware"),
        (BASE | {"optimizer": "ademamix"}, "optimizer"),
        (BASE | {"optimizer": "lion_8bit"}, "optimizer"),
        (BASE | {"gptq": True}, "gptq"),
        (QLORA | {"gptq": True}, "gptq"),
        (BASE | {"base_model": "a/Llama-3-8B-AWQ"}, "base_model"),
        (LORA | {"base_model": "a/Qwen2.5-7B-GPTQ-Int8"}, "base_model"),
        (LORA | {"lora_target_parameters": ["mlp.gate.weight"]}, "lora_target_parameters"),
        (
            QLORA
            | {
                "quantize_moe_experts": True,
                "lora_target_linear": False,
                "bnb_config_kwargs": {"bnb_4bit_quant_type": "fp4"},
            },
            "quantize_moe_experts",
        ),
        (BASE | {"unfrozen_parameters": ["lm_head"]}, "unfrozen_parameters"),
        (LORA | {"unfrozen_parameters": ["^lm_head.*"]}, "unfrozen_parameters"),
        (BASE | {"num_epochs": 0}, "num_epochs"),
        ({**BASE, "gradient_accumulation_steps": None, "batch_size": "a"}, "batch_size"),
        (BASE | {"micro_batch_size": "auto"}, "micro_batch_size"),
        (BASE | {"sequence_len": "long"}, "sequence_len"),
        (LORA | {"lora_r": None}, "lora_r"),
        (BASE | {"quantize_moe_experts": True}, "quantize_moe_experts"),
        (BASE | {"overrides_of_model_kwargs": {"dtype": "a"}}, "overrides_of_model_kwargs"),
        (BASE | {"rl": "dpo", "dpo_use_weighting": True}, "dpo_use_weighting"),
        (LORA | {"quantize_moe_experts": True}, "quantize_moe_experts"),
        (QLORA | {"quantize_moe_experts": True}, "quantize_moe_experts"),
        (LORA | {"lora_r": "eight"}, "lora_r"),
        (LORA | {"sample_packing": True, "rl": "dpo"}, "recipe"),
        (LORA | {"lora_target_linear": False, "lora_target_modules": "(("}, "lora_target_modules"),
        (BASE | {"model_type": "AutoModelForImageTextToText"}, "model_type"),
    ],
)
def test_what_would_be_wrong_is_refused_by_name(
    tmp_path: Path, values: dict[str, Any], key: str
) -> None:
    """A refusal names the file and the key."""
    configuration = read(tmp_path, values)
    assert classes(configuration)[key] == "refused"
    with pytest.raises(ConfigurationError, match=key):
        configuration.check()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"lora_r": -8}, "lora_r: -8: must be at least 1"),
        ({"lora_r": "8.5"}, "lora_r: 8.5: must be a whole number"),
        ({"lora_dropout": 5}, "lora_dropout: 5: must be less than 1"),
        ({"sequence_len": -4096}, "sequence_len: -4096: must be a whole number of at least 1"),
        (
            {"lora_r": None, "lora_rr": 8},
            "lora_r: is missing: the rank of the adapters: did you mean it by 'lora_rr'?",
        ),
    ],
)
def test_a_mistake_has_its_key_its_value_and_a_remedy(
    tmp_path: Path, changes: dict[str, Any], line: str
) -> None:
    """In the words of the file, in one line."""
    configuration = read(tmp_path, LORA | changes)
    assert configuration.refusals == (f"{configuration.file}: {line}",)


def test_a_misspelt_key_is_named(tmp_path: Path) -> None:
    """Axolotl ignores it, and so the verdict may be another; one that is like no key is not."""
    values = LORA | {"gradient_checkpoiting": True, "my_own_note": 1}
    said = {line.key: line.meaning for line in read(tmp_path, values).lines}
    assert said["gradient_checkpoiting"].endswith("did you mean 'gradient_checkpointing'?")
    assert said["my_own_note"] == "ignored: axolotl 0.19 has no such key"


def test_misspelt_keys_are_reported_beside_the_one_that_is_missing(tmp_path: Path) -> None:
    """All mistakes of a file at once, though axolotl only ignores keys that it does not have."""
    values = LORA | {"lora_r": None, "lora_rank": 32, "micro_batchsize": 2}
    with pytest.raises(ConfigurationError) as caught:
        read(tmp_path, values).check()
    said = str(caught.value)
    assert "lora_r: is missing: the rank of the adapters: did you mean it by 'lora_rank'?" in said
    assert "lora_rank: 32: ignored: axolotl 0.19 has no such key: did you mean 'lora_r'?" in said
    assert "did you mean 'micro_batch_size'?" in said


def test_every_key_is_in_one_class(tmp_path: Path) -> None:
    """Keys are used, irrelevant or assumed: so is that it ignores one that it does not have."""
    values = LORA | {"learning_rate": 1e-4, "wandb_project": "p", "val_set_size": 0.1, "fsdp": None}
    configuration = read(tmp_path, values | {"no_such_key": 1})
    by_key = classes(configuration)
    assert set(values) <= set(by_key)
    expected = {"adapter": "used", "learning_rate": "irrelevant", "wandb_project": "irrelevant"}
    expected |= {"val_set_size": "assumed", "fsdp": "irrelevant", "no_such_key": "assumed"}
    assert {key: by_key[key] for key in expected} == expected
    _, remarks = with_configuration(configuration, {})
    assert "no_such_key: ignored: axolotl 0.19 has no such key" in remarks


def test_a_file_of_the_data_cuts_examples_and_pads_as_the_file_states(tmp_path: Path) -> None:
    """Without data a row has the stated length; with data that length is the limit."""
    plain = read(tmp_path, BASE)
    options, remarks = with_configuration(plain, {"dataset": None})
    assert (options["seq_len"], options["model"]) == (1024, "llama-3.1-8b")
    assert any("upper bound" in text for text in remarks)
    _, remarks = with_configuration(plain, {"packing": True})
    assert not any("upper bound" in text for text in remarks)  # shorter examples share its rows
    options, _ = with_configuration(plain, {"length_histogram": "l.csv"})
    assert (options["cutoff"], options.get("seq_len")) == (1024, None)
    padded = read(tmp_path, BASE | {"pad_to_sequence_len": True})
    options, _ = with_configuration(padded, {"length_histogram": "l.csv"})
    assert (options["seq_len"], options["pad_to_multiple"]) == (1024, 1024)


def test_options_of_the_command_line_replace_those_of_the_file(tmp_path: Path) -> None:
    """An override is said; adapters go with the method; the effective batch stays."""
    configuration = read(tmp_path, QLORA)
    given = {"method": "full", "batch_size": 8, "model": "llama-tiny", "epochs": None}
    options, remarks = with_configuration(configuration, given)
    assert (options["method"], options["batch_size"], options["effective_batch"]) == ("full", 8, 8)
    assert options["model"] == "llama-tiny"
    assert not {"lora_rank", "quantisation"} & {k for k, v in options.items() if v is not None}
    assert any(text.startswith("--batch-size") for text in remarks)
    with pytest.raises(ConfigurationError, match="--recipe"):
        with_configuration(configuration, {"recipe": "paper-mixtral"})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [", "YAML"),
        ("", "no keys"),
        ("- 1", "no keys"),
        ("compute_environment: LOCAL_MACHINE", "accelerate"),
        ("export_dir: out", "trains nothing"),
        ("colour: red", "no trainer"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    """The error says what the file is instead."""
    file = tmp_path / "config.yml"
    file.write_text(text, "utf-8")
    with pytest.raises(ConfigurationError, match=reason):
        read_configuration(file)
    with pytest.raises(ConfigurationError, match="no such file"):
        read_configuration(tmp_path / "none.yml")


def test_the_command_explains_and_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--explain-config`` prints the table, also of a file that is refused; an estimate ends."""
    read(tmp_path, LORA | {"deepcompile": True})
    file = str(tmp_path / "config.yml")
    assert main(["estimate", "--config", file, "--explain-config"]) == 0
    assert "| deepcompile " in capsys.readouterr().out
    assert main(["estimate", "--config", file]) == 1
    assert "deepcompile: true" in capsys.readouterr().err


def test_an_estimate_of_a_file_names_its_recipe(tmp_path: Path) -> None:
    """The estimate takes the recipe of the file, without defaults of another trainer."""
    configuration = read(tmp_path, LORA | {"gradient_checkpointing": True})
    options, _ = with_configuration(configuration, {})
    request = request_of(EstimateRequest, options)
    recipe = recipe_of(request.recipe)
    assert recipe.key == (
        "lora-r16-alpha8-dropout0.05-all-linear-bf16-mixed-checkpointed-flash_attention_2-"
        "grouped-effective8-clip1"
    )
    assert "axolotl" in recipe_text(request.recipe, recipe)


def test_the_reference_lists_every_key() -> None:
    """The page has the tables that the program reads: run docs/configuration_keys.py."""
    page = Path(__file__).parent.parent / "docs" / "reference" / "configurations.md"
    assert page.read_text("utf-8").endswith(keys_reference())


ODD = ([1], {"a": 1}, "x", -1, float("nan"), [None])


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: str(trainer.name))
def test_values_of_any_type_are_read_or_refused(trainer: Trainer) -> None:
    """No value of any key ends in a traceback."""
    for key in trainer.keys:
        for value in ODD:
            configuration = configuration_of(trainer, WHOLE[trainer.name] | {key: value}, "f")
            assert configuration.explanation()
            if not configuration.refusals:
                with_configuration(configuration, {})
