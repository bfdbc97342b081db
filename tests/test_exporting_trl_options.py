"""Recipes as options of TRL's command line, and recipes that it cannot express."""

import os
import re
import shlex
import subprocess
from typing import Any

import pytest
from builders.trainings import OF_EIGHT, SPOT, training_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.exporting.training import ExportError, TrainingJob
from orchestrator.exporting.training_script import save_steps, training_script
from orchestrator.exporting.trl_options import trl_options
from trials.records.model import find_model

FULL = {"method": "full", "lora_rank": None, "lora_targets": None}
QLORA = {"method": "qlora"}


def command(training: TrainingJob) -> list[str]:
    """Words of the command in the exported script, without its variables."""
    script = training_script(training)
    (line,) = re.findall(r"^(?:trl \w+|python \S+) .*", script.replace("\\\n", " "), re.MULTILINE)
    return shlex.split(line.partition("${LAST")[0])


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    micro_batch=st.integers(1, 32),
    micro_batches=st.integers(1, 32),
    epochs=st.integers(1, 20),
    is_given=st.booleans(),
    method=st.sampled_from([{}, FULL, QLORA]),
)
def test_the_effective_batch_and_the_epochs_never_change(
    micro_batch: int, micro_batches: int, epochs: int, *, is_given: bool, method: dict[str, Any]
) -> None:
    """Whether the recipe fixes the effective batch or the accumulation."""
    axis = "gradient_accumulation" if is_given else "effective_batch"
    value = micro_batches if is_given else micro_batch * micro_batches
    training = training_of({**method, axis: value}, micro_batch=micro_batch, epochs=epochs)
    words = command(training)
    numbers = {name: int(words[words.index(f"--{name}") + 1]) for name in COUNTED}
    assert numbers == {
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": micro_batches,
        "num_train_epochs": epochs,
    }
    assert training.effective_batch == micro_batch * micro_batches


COUNTED = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs")


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"task": "orpo", "loss": "full-logits"}, "orpo"),
        ({"task": "grpo", "loss": "chunked"}, "grpo"),
        ({"loss": "liger"}, "liger"),
        ({"loss": "cce"}, "cce"),
        ({"optimizer": "adamw_loop"}, "adamw_loop"),
        ({"compile": "layers"}, "layers"),
        ({"offload_optimizer": True, "precision": "bf16"}, "offload_optimizer"),
        ({"task": "dpo", "reference": "separate"}, "separate"),
        ({"lora_targets": ("lm_head",)}, "lm_head"),
        ({"lora_targets": ("all-linear", "embed_tokens")}, "embed_tokens"),
        ({"effective_batch": 5}, "effective batch 5"),
    ],
)
def test_a_recipe_that_trl_cannot_express_is_refused_by_name(
    fields: dict[str, Any], word: str
) -> None:
    """One line, which names the field's value."""
    with pytest.raises(ExportError) as caught:
        training_script(training_of(fields))
    (line,) = str(caught.value).splitlines()
    assert word in line


def test_gpus_whose_micro_batches_do_not_divide_the_effective_batch_are_refused() -> None:
    """24 examples are no whole number of 8 on each of two GPUs: they would train on 32."""
    layout = {"gpus": 2, "strategy": "ddp", "placements": (OF_EIGHT,)}
    with pytest.raises(ExportError, match="micro-batch 8 on 2 GPUs does not divide"):
        training_script(training_of({"effective_batch": 24}, micro_batch=8, **layout))
    whole = training_of({"effective_batch": 24}, micro_batch=6, **layout)
    assert command(whole)
    assert whole.effective_batch == 24


@pytest.mark.parametrize("name", ["mixtral-8x7b", "blackmamba-2.8b"])
def test_experts_apart_are_refused(name: str) -> None:
    """A layer of transformers has its experts in one parameter."""
    fields = {"lora_targets": ("experts", "router"), "experts": "looped"}
    with pytest.raises(ExportError, match="looped"):
        training_script(training_of(fields, model=find_model(name)))


def test_another_number_of_active_experts_is_refused() -> None:
    """TRL trains the model as its configuration has it."""
    fields = {"lora_targets": ("attention",), "experts": "grouped"}
    model = find_model("mixtral-8x7b")
    assert trl_options(training_of(fields, model=model))
    with pytest.raises(ExportError, match="active_experts 8"):
        trl_options(training_of(fields, model=model, active_experts=8))


def test_the_loss_of_the_routers_is_switched_off_where_the_recipe_has_none() -> None:
    """TRL adds it by default; a dense model has none."""
    fields = {"lora_targets": ("attention",), "experts": "grouped", "router_loss": False}
    options = trl_options(training_of(fields, model=find_model("mixtral-8x7b")))
    assert options["router_aux_loss_coef"] == "0.0"
    assert "router_aux_loss_coef" not in trl_options(training_of())


def test_reentrant_checkpoints_are_asked_for() -> None:
    """TRL's are the others."""
    fields = {"gradient_checkpointing": "reentrant", **QLORA, "quantisation": "int8"}
    options = trl_options(training_of(fields))
    assert options["gradient_checkpointing"] == "True"
    assert options["gradient_checkpointing_kwargs"] == '{"use_reentrant": true}'
    plain = trl_options(training_of(fields | {"gradient_checkpointing": True}))
    assert "gradient_checkpointing_kwargs" not in plain


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"precision": "bf16"}, "torch.bfloat16"),
        ({**QLORA, "adapter_dtype": "fp32"}, "torch.float32"),
        ({**QLORA, "kbit_preparation": True}, "prepare_model_for_kbit_training("),
        ({"loss": "full-logits"}, "compute_loss = Trainer.compute_loss"),
    ],
)
def test_what_the_command_line_lacks_is_a_python_file(fields: dict[str, Any], part: str) -> None:
    """It compiles, and takes the same options."""
    script = training_script(training_of(fields))
    (python,) = re.findall(r"<< 'PYTHON'\n(.*?)^PYTHON$", script, re.MULTILINE | re.DOTALL)
    compile(python, "train.py", "exec")
    assert part in python
    assert command(training_of(fields))[:2] == ["python", "$OUTPUT/train.py"]


def test_only_such_recipes_are_a_python_file() -> None:
    """All else is TRL's own command."""
    for fields in ({}, FULL, QLORA, {"task": "dpo"}, {"precision": "bf16-mixed"}):
        assert command(training_of(fields))[0] == "trl"


def shown_gpus(training: TrainingJob, given: dict[str, str]) -> str:
    """GPUs that the trainer of a task sees where the scheduler shows some."""
    (line,) = re.findall(
        r"^export CUDA_VISIBLE_DEVICES=.*", training_script(training), re.MULTILINE
    )
    words = ["bash", "-euc", f"{line}\nprintenv CUDA_VISIBLE_DEVICES"]
    environment = {"PATH": os.environ["PATH"], **given}
    return subprocess.run(
        words, env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_a_machine_of_several_gpus_trains_on_one() -> None:
    """TRL takes all that it sees, and each would add to the effective batch."""
    assert shown_gpus(training_of(placements=(SPOT, OF_EIGHT)), {}) == "0"
    assert "CUDA_VISIBLE_DEVICES" not in training_script(training_of(placements=(SPOT,)))


@pytest.mark.parametrize(
    ("assigned", "shown"),
    [("", "0,1"), ("3,5", "3,5"), ("0,1,2,3,4,5,6,7", "0,1"), ("GPU-a,GPU-b,GPU-c", "GPU-a,GPU-b")],
)
def test_the_gpus_of_a_scheduler_are_kept(assigned: str, shown: str) -> None:
    """Slurm and Ray assign some of a node's; others may be at work on the first ones."""
    training = training_of({"effective_batch": 16}, gpus=2, placements=(OF_EIGHT,))
    assert shown_gpus(training, {"CUDA_VISIBLE_DEVICES": assigned}) == shown


def test_copies_on_several_gpus_share_the_effective_batch() -> None:
    """One process for each GPU; a machine with more shows as many as train."""
    training = training_of({"effective_batch": 16}, gpus=4, placements=(OF_EIGHT,))
    words = command(training)
    assert words[:2] == ["trl", "sft"]
    assert words[words.index("--num_processes") + 1] == "4"
    assert words[words.index("--gradient_accumulation_steps") + 1] == "2"
    assert training.effective_batch == 16
    assert shown_gpus(training, {}) == "0,1,2,3"
    whole = training_of({"effective_batch": 16}, gpus=8, placements=(OF_EIGHT,))
    assert "CUDA_VISIBLE_DEVICES" not in training_script(whole)


def test_a_divided_model_is_that_of_the_estimate() -> None:
    """Gradients are reduced after every micro-batch; 4-bit weights are stored to be sharded."""
    layout = {"gpus": 4, "strategy": "fsdp2", "placements": (OF_EIGHT,)}
    words = command(training_of({"effective_batch": 16, "precision": "bf16-mixed"}, **layout))
    assert words[:5] == ["trl", "sft", "--use_fsdp", "--fsdp_version", "2"]
    assert words[words.index("--mixed_precision") + 1] == "bf16"
    assert "sync_each_batch" in words[words.index("--accelerator_config") + 1]
    assert "--bnb_4bit_quant_storage" not in words
    qlora = {"method": "qlora", "effective_batch": 8, "precision": "bf16"}
    words = command(training_of(qlora, **layout))
    assert words[words.index("--mixed_precision") + 1] == "no"
    assert words[words.index("--bnb_4bit_quant_storage") + 1] == "bfloat16"
    assert "--accelerator_config" not in words


def test_checkpoints_are_written_as_often_as_the_price_assumes() -> None:
    """375 steps in 10 hours, half an hour of work between two checkpoints."""
    assert save_steps(training_of(placements=(SPOT,))) == round(375 / 20)
    assert save_steps(training_of(placements=(OF_EIGHT,))) == round(375 / 10)
