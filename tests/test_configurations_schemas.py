"""Tables of keys beside the trainers' own schemas, whose sources are read, not run."""

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from orchestrator.configurations.key_classes import entry_of
from orchestrator.configurations.trainer import Trainer
from orchestrator.configurations.trainers.axolotl import AXOLOTL
from orchestrator.configurations.trainers.llama_factory import LLAMA_FACTORY
from orchestrator.configurations.trainers.transformers_keys import TRAINING_ARGUMENTS
from orchestrator.configurations.trainers.trl import TRL
from orchestrator.configurations.trainers.trl_tasks import CLASSES, OWN_KEYS

SOURCES = Path(__file__).parent.parent / ".venv-trainers" / "trainers"
INSTALLED = Path(str(find_spec("trl").origin)).parent.parent  # type: ignore[union-attr]

SCHEMAS = {
    "axolotl": (
        "axolotl/utils/schemas/config.py AxolotlInputConfig",
        "axolotl/utils/schemas/training.py HyperparametersConfig",
        "axolotl/utils/schemas/peft.py LoraConfig",
        "axolotl/utils/schemas/model.py ModelInputConfig",
        "axolotl/utils/schemas/model.py ModelOutputConfig",
        "axolotl/utils/schemas/deprecated.py DeprecatedParameters",
        "axolotl/integrations/kernels/args.py KernelsArgs",
        "axolotl/integrations/liger/args.py LigerArgs",
        "axolotl/integrations/cut_cross_entropy/args.py CutCrossEntropyArgs",
    ),
    "LLaMA-Factory": (
        "llamafactory/hparams/model_args.py BaseModelArguments",
        "llamafactory/hparams/model_args.py QuantizationArguments",
        "llamafactory/hparams/data_args.py DataArguments",
        "llamafactory/hparams/finetuning_args.py FreezeArguments",
        "llamafactory/hparams/finetuning_args.py LoraArguments",
        "llamafactory/hparams/finetuning_args.py OFTArguments",
        "llamafactory/hparams/finetuning_args.py FinetuningArguments",
    ),
    "TRL": (
        "trl/trainer/sft_config.py SFTConfig",
        "trl/trainer/dpo_config.py DPOConfig",
        "trl/trainer/kto_config.py KTOConfig",
        "trl/trainer/reward_config.py RewardConfig",
        "trl/experimental/orpo/orpo_config.py ORPOConfig",
        "trl/trainer/base_config.py _BaseConfig",
        "trl/trainer/model_config.py ModelConfig",
        "trl/trainer/grpo_config.py GRPOConfig",
        "trl/scripts/grpo.py GRPOScriptArguments",
        "trl/scripts/utils.py ScriptArguments",
        "trl/scripts/utils.py DatasetMixtureConfig",
        "transformers/training_args.py TrainingArguments",
    ),
}
DEFAULTS = {
    "axolotl": {"sequence_len": 512, "bf16": "auto", "optimizer": "adamw_torch_fused"}
    | {"gradient_accumulation_steps": 1, "micro_batch_size": 1, "num_epochs": 1.0},
    "LLaMA-Factory": {"cutoff_len": 2048, "lora_rank": 8, "lora_target": "all", "lora_dropout": 0}
    | {"finetuning_type": "lora", "stage": "sft", "double_quantization": True}
    | {"disable_gradient_checkpointing": False, "quantization_type": "nf4"}
    | {"freeze_trainable_layers": 2, "freeze_trainable_modules": "all"}
    | {"oft_block_size": 32, "oft_rank": 0, "oft_target": "all", "use_llama_pro": False},
    "TRL": {"max_length": 1024, "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05}
    | {"dtype": "float32", "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": False}
    | {"packing": False, "packing_strategy": "bfd"},
}
"""Defaults that the tables rely on."""


def fields(schema: str, sources: Path) -> Iterator[tuple[str, object]]:
    """Names of a schema's fields with their defaults; those that are no literals are None."""
    path, name = schema.split()
    tree = ast.parse((sources / path).read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    yield line.target.id, default(line.value)


def default(value: ast.expr | None) -> object:
    """Default of a field: the value itself, or ``default=`` of a call."""
    if isinstance(value, ast.Call):
        value = next((word.value for word in value.keywords if word.arg == "default"), None)
    try:
        return None if value is None else ast.literal_eval(value)
    except ValueError:
        return None


@pytest.mark.trainers
@pytest.mark.parametrize("trainer", [AXOLOTL, LLAMA_FACTORY], ids=lambda t: str(t.name))
def test_every_field_of_the_schemas_has_a_class(trainer: Trainer) -> None:
    """No key of a trainer's own schema is unknown, and the defaults are those relied on."""
    if not SOURCES.is_dir():
        pytest.skip("make trainers installs the trainers")
    theirs = fields_of(trainer, SOURCES)
    assert sorted(n for n in theirs if entry_of(trainer.keys, n) is None) == []


def test_the_keys_of_trl_are_those_of_its_dataclasses() -> None:
    """One that none of them has is refused, as its commands do; ``env`` is of their parser."""
    theirs = fields_of(TRL, INSTALLED).keys() | {"env"}
    assert TRL.keys.keys() - {"vllm_*"} == {n for n in theirs if not n.startswith("vllm_")}
    assert not (TRL.renamed.keys() | TRL.earlier.keys()) & theirs
    assert {re.findall(r"\w+", name)[0] for name in TRL.renamed.values()} <= theirs


def fields_of(trainer: Trainer, sources: Path) -> dict[str, object]:
    """Fields of all schemas of a trainer, whose defaults are those relied on."""
    schemas = [dict(fields(schema, sources)) for schema in SCHEMAS[trainer.name]]
    assert all(schemas), "a class of the schemas has another name"
    theirs = {name: value for schema in schemas for name, value in schema.items()}
    ours = DEFAULTS[trainer.name]
    assert {name: theirs[name] for name in ours} == ours
    return theirs


def test_the_keys_of_each_task_are_those_of_its_trainer() -> None:
    """A key is refused for a task exactly if TRL's configuration of that task lacks it."""
    classes = {schema.split()[1]: schema for schema in SCHEMAS["TRL"]}
    theirs = {task: dict(fields(classes[name], INSTALLED)) for name, task in CLASSES.items()}
    shared = set.intersection(*map(set, theirs.values())) | set(TRAINING_ARGUMENTS)
    for task, own in OWN_KEYS.items():
        assert own == theirs[task].keys() - shared, task
