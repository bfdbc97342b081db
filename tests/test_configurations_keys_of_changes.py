"""Keys that make a change in a trainer's configuration: our own reading of them agrees."""

from typing import Any

import pytest
import yaml

from orchestrator.configurations.configuration import configuration_of
from orchestrator.configurations.keys_of_changes import EXPANDABLE_SEGMENTS, KEYS, keys_text
from orchestrator.configurations.trainers.axolotl import AXOLOTL
from orchestrator.configurations.trainers.llama_factory import LLAMA_FACTORY
from orchestrator.configurations.trainers.trl import TRL
from orchestrator.estimating.question import FLAGS
from orchestrator.spec.recipe_options import WORDS

MODEL = "Qwen/Qwen2.5-0.5B"
BARE: dict[str, Any] = {
    "axolotl": {
        "base_model": MODEL,
        "adapter": "lora",
        "lora_r": 8,
        "lora_alpha": 16,
        "lora_target_linear": True,
        "gradient_checkpointing": True,
    },
    "LLaMA-Factory": {"model_name_or_path": MODEL, "stage": "sft", "do_train": True},
    "TRL": {"model_name_or_path": MODEL, "use_peft": True},
}
TRAINERS = {trainer.name: trainer for trainer in (AXOLOTL, LLAMA_FACTORY, TRL)}


def keys_in(text: str) -> dict[str, Any]:
    """Keys and values of the line, as YAML has them."""
    keys = text.removeprefix("In f.yaml: ").removesuffix(".").split(", ")
    return dict(yaml.safe_load("\n".join(keys)))


@pytest.mark.parametrize(
    ("trainer", "option", "value"),
    [(trainer, *words) for trainer, keys in KEYS.items() for words in keys],
)
def test_a_configuration_with_the_keys_is_read_as_the_change(
    trainer: str, option: str, value: str
) -> None:
    """The batches are always among them."""
    keys = keys_in(keys_text("f.yaml", trainer, f"{option} {value} --batch-size 2", (2, 8)))
    read = configuration_of(TRAINERS[trainer], BARE[trainer] | keys, "f.yaml")
    assert read.refusals == ()
    name = option.removeprefix("--").replace("-", "_")
    is_older = trainer != "TRL" and (name, value) == ("gradient_checkpointing", "on")
    assert read.options[name] == ("reentrant" if is_older else WORDS.get(value, value))
    assert (read.options["batch_size"], read.options["effective_batch"]) == (2, 16)


@pytest.mark.parametrize("trainer", KEYS)
def test_length_and_allocator_have_their_places(trainer: str) -> None:
    """The allocator's setting is no key of any trainer, and its option takes no value."""
    (name,) = FLAGS
    option = f"--{name.replace('_', '-')}"
    text = keys_text("f.yaml", trainer, f"{option} --seq-len 256", (2, 8))
    before, setting, end = text.partition(f", {EXPANDABLE_SEGMENTS}")
    assert (bool(setting), end) == (True, ".")
    keys = keys_in(before)
    assert configuration_of(TRAINERS[trainer], BARE[trainer] | keys, "f.yaml").tokens == 256


def test_a_change_that_the_trainer_lacks_is_named() -> None:
    """LLaMA-Factory computes all logits."""
    text = keys_text("f.yaml", "LLaMA-Factory", "--loss chunked --method qlora", (2, 8))
    assert text.endswith("LLaMA-Factory has no key for --loss chunked.")
    assert "quantization_bit: 4" in text
