"""Tasks of TRL's configurations, and Python files that are read without running them."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.configurations.configuration import (
    Configuration,
    ConfigurationError,
    configuration_of,
)
from orchestrator.configurations.estimate_options import with_configuration
from orchestrator.configurations.read_file import read_configuration
from orchestrator.configurations.trainers.trl import TRL, TRL_IN_PYTHON
from orchestrator.estimating.estimate_request import EstimateRequest
from orchestrator.request import request_of
from orchestrator.spec.recipe_options import recipe_of

BARE: dict[str, Any] = {"model_name_or_path": "Qwen/Qwen2.5-0.5B"}
PEFT = BARE | {"use_peft": True}
DPO = PEFT | {"beta": 0.1}

LOADED = 'AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B"'
BATCHES = 'trl.DPOConfig("out", beta=0.2, per_device_train_batch_size=LENGTH)'
ADAPTED = """
SFTTrainer(model="a/b")
SFTConfig(model_init_kwargs={"dtype": "bfloat16"})
LoraConfig(r=4, target_modules="all-linear")
"""
QUANTISED = f"""
{LOADED}, quantization_config=q)
SFTConfig()
LoraConfig()
q = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)
prepare_model_for_kbit_training(m)
"""


def read(values: dict[str, Any]) -> Configuration:
    """Read a configuration of TRL's command line."""
    return configuration_of(TRL, values, "f.yaml")


def refusals(configuration: Configuration) -> set[str]:
    """Keys that are refused."""
    return {line.key for line in configuration.lines if line.key_class == "refused"}


@pytest.mark.parametrize(
    ("values", "task"),
    [
        (BARE, "sft"),
        (BARE | {"packing": True}, "sft"),
        (BARE | {"loss_type": "nll"}, "sft"),
        (BARE | {"beta": 0.1}, "dpo"),
        (BARE | {"loss_type": ["sigmoid", "sft"]}, "dpo"),
        (BARE | {"loss_type": "kto"}, "kto"),
        (BARE | {"desirable_weight": 1.5}, "kto"),
        (BARE | {"center_rewards_coefficient": 0.01}, "reward"),
        (BARE | {"max_completion_length": 256}, "orpo"),
    ],
)
def test_keys_that_one_trainer_has_decide_the_task(values: dict[str, Any], task: str) -> None:
    """The estimate names the task that it assumes."""
    configuration = read(values)
    configuration.check()
    assert configuration.options["task"] == task
    recipe_of(request_of(EstimateRequest, with_configuration(configuration, {})[0]).recipe)


@pytest.mark.parametrize(
    ("values", "options"),
    [
        (DPO, {"lora_dropout": 0.0, "reference": None}),
        (DPO | {"precompute_ref_log_probs": True}, {"reference": "precomputed"}),
        (DPO | {"lora_dropout": 0.0, "disable_dropout": False}, {"lora_dropout": 0.0}),
        (DPO | {"pad_to_multiple_of": "auto"}, {"pad_to_multiple": 1}),
        (DPO | {"pad_to_multiple_of": 64}, {"pad_to_multiple": 64}),
        (PEFT | {"pad_to_multiple_of": 64}, {"lora_dropout": 0.05}),
    ],
)
def test_keys_of_preference_tasks_set_options(
    values: dict[str, Any], options: dict[str, Any]
) -> None:
    """Reference, dropout and padding are those of the trainer."""
    configuration = read(values)
    configuration.check()
    assert {name: configuration.options.get(name) for name in options} == options


@pytest.mark.parametrize(
    ("values", "key"),
    [
        (DPO | {"loss_type": "ppo"}, "loss_type"),
        (BARE | {"desirable_weight": 1, "loss_type": "apo_zero_unpaired"}, "loss_type"),
        (DPO | {"disable_dropout": False}, "disable_dropout"),
        (DPO | {"sync_ref_model": True}, "sync_ref_model"),
        (DPO | {"use_weighting": True}, "use_weighting"),
    ],
)
def test_a_key_of_another_trainer_or_step_is_refused(values: dict[str, Any], key: str) -> None:
    """TRL refuses it too, or its step is not simulated."""
    assert key in refusals(read(values))


def test_a_key_of_earlier_versions_is_read_as_by_these() -> None:
    """With a remark: TRL refuses it today, and many files still have it."""
    earlier = {"torch_dtype": "bfloat16", "group_by_length": True, "warmup_ratio": 0.03}
    configuration = read(PEFT | earlier)
    configuration.check()
    assert configuration.options["precision"] == "bf16-mixed"
    assert configuration.options["group_by_length"] is True
    _, remarks = with_configuration(configuration, {})
    text = "torch_dtype: a key of earlier versions, which TRL 1.16 refuses: renamed to dtype"
    assert text in remarks
    assert sum("which TRL 1.16 refuses" in remark for remark in remarks) == 3


def test_a_class_of_a_python_file_decides_which_keys_there_are() -> None:
    """Another trainer's are refused."""
    values = {**BARE, "trainer class": "DPOConfig", "packing": True}
    assert "packing" in refusals(configuration_of(TRL_IN_PYTHON, values, "f.py"))


def test_an_option_names_the_task_of_a_file_that_does_not() -> None:
    """``--task`` replaces the assumed task; its trainer disables dropout."""
    options, _ = with_configuration(read(PEFT), {"task": "reward"})
    assert (options["task"], options["lora_dropout"]) == ("reward", 0.0)
    recipe_of(request_of(EstimateRequest, options).recipe)


def python(tmp_path: Path, text: str) -> Configuration:
    """Read a Python file."""
    file = tmp_path / "train.py"
    file.write_text(text, "utf-8")
    return read_configuration(file)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (
            'SFTTrainer(model="a/b", args=SFTConfig(max_length=512, packing=True))',
            {"model": "a/b", "task": "sft", "packing": True, "method": "full", "precision": None},
        ),
        (f"model = {LOADED})\nSFTConfig()", {"precision": "bf16", "model": "Qwen/Qwen2.5-0.5B"}),
        (
            f'model = {LOADED}, dtype=torch.float32, attn_implementation="eager")\nSFTConfig()',
            {"precision": None, "attention": "eager"},
        ),
        (
            'LENGTH = 64\nname = "a/b"\nDPOTrainer(model=name)\n' + BATCHES,
            {"task": "dpo", "batch_size": 64},
        ),
        (
            ADAPTED,
            {"lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.0, "precision": "bf16-mixed"},
        ),
        (
            QUANTISED,
            {
                "method": "qlora",
                "quantisation": "fp4",
                "double_quantisation": True,
                "kbit_preparation": True,
            },
        ),
        ('RewardTrainer(model="a/b", args=RewardConfig(logging_steps=n))', {"task": "reward"}),
    ],
)
def test_literals_of_a_python_file_are_its_configuration(
    tmp_path: Path, text: str, options: dict[str, Any]
) -> None:
    """Absent values are the defaults of PEFT, bitsandbytes and transformers, not the command's."""
    configuration = python(tmp_path, text)
    configuration.check()
    assert {name: configuration.options.get(name) for name in options} == options
    recipe_of(request_of(EstimateRequest, with_configuration(configuration, {})[0]).recipe)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('SFTTrainer(model="a/b", args=SFTConfig(max_length=n))', "max_length"),
        ('n = 1\nn = 2\nSFTTrainer(model="a/b", args=SFTConfig(max_length=n))', "max_length"),
        ('SFTTrainer(model="a/b", args=SFTConfig(**more))', "**"),
        ("SFTTrainer(model=args.model, args=SFTConfig())", "model_name_or_path"),
        ('SFTTrainer(model="a/b", optimizers=(o, None), args=SFTConfig())', "optimizers"),
        ('SFTTrainer(model="a/b", args=SFTConfig())\nLoraConfig(bias="all")', "bias"),
    ],
)
def test_a_computed_value_is_refused_by_its_key(tmp_path: Path, text: str, key: str) -> None:
    """The file is not run, so the value is unknown."""
    assert key in refusals(python(tmp_path, text))


@pytest.mark.parametrize("text", ["(", "print(1)", "SFTConfig()\nDPOConfig()"])
def test_a_python_file_without_one_configuration_is_an_error(tmp_path: Path, text: str) -> None:
    """The error is one line."""
    with pytest.raises(ConfigurationError, match=r"train\.py"):
        python(tmp_path, text)


def test_a_file_of_grpo_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """The options that estimate its update are named."""
    with pytest.raises(ConfigurationError, match=r"GRPO.*--task grpo without --config"):
        python(tmp_path, 'GRPOTrainer(model="a/b", args=GRPOConfig(max_steps=200))')


def test_a_trainers_model_is_read_by_place_as_by_name(tmp_path: Path) -> None:
    """It is the first argument of TRL's trainers."""
    assert python(tmp_path, 'SFTTrainer("a/b", args=SFTConfig())').model_name == "a/b"


def test_a_python_file_is_not_run(tmp_path: Path) -> None:
    """Its statements have no effect."""
    text = f'open("{tmp_path}/ran", "w")\nSFTTrainer(model="a/b", args=SFTConfig())'
    python(tmp_path, text).check()
    assert not (tmp_path / "ran").exists()
