"""Exported trainings as TRL itself reads them, and one as TRL runs it."""

import json
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from builders.data import rows, train_tokenizer
from builders.exported_jobs import job_variables
from builders.trainings import OF_EIGHT, SPOT, training_of
from peft import LoraConfig
from tokenizers import Tokenizer
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from trainer_reference.models import write_model
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import (
    DPOConfig,
    KTOConfig,
    ModelConfig,
    RewardConfig,
    ScriptArguments,
    SFTConfig,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)

from orchestrator.exporting.training import PatchedConfiguration, TrainingJob
from orchestrator.exporting.training_script import training_script
from trials.recipes.recipe import Recipe
from trials.records.model import find_model

# TRL's own defaults are fields that transformers deprecates.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

CONFIGS = {"sft": SFTConfig, "dpo": DPOConfig, "kto": KTOConfig, "reward": RewardConfig}
TORCH = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}
FULL = {"method": "full", "lora_rank": None, "lora_targets": None}


def parsed(training: TrainingJob, folder: Path) -> tuple[Any, ModelConfig]:
    """Arguments of the trainer and of the model that TRL reads from the exported command."""
    script = training_script(training).replace("\\\n", " ")
    (line,) = re.findall(r"^(?:trl \w+|python \S+) (.*)", script, re.MULTILINE)
    words = shlex.split(line.partition("${LAST")[0])
    words = [str(folder) if word == "$OUTPUT" else word for word in words]
    parser = TrlParser((ScriptArguments, CONFIGS[training.recipe.task], ModelConfig))
    _, arguments, model = parser.parse_args_and_config([*words, "--use_cpu", "True"])
    return arguments, model


def launched(training: TrainingJob, folder: Path) -> tuple[Any, Any]:
    """Arguments of ``accelerate launch`` and of the trainer in the exported command."""
    script = training_script(training).replace("\\\n", " ")
    (line,) = re.findall(r"^trl sft (.*)", script, re.MULTILINE)
    words = shlex.split(line.partition("${LAST")[0])
    words = [str(folder) if word == "$OUTPUT" else word for word in words]
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    _, arguments, _, passed_on = parser.parse_args_and_config(
        [*words, "--use_cpu", "True"], return_remaining_strings=True
    )
    words = [*passed_on, "--dynamo_backend", "no", "sft.py"]
    return launch_command_parser().parse_args(words), arguments


def test_accelerate_launches_a_process_for_each_gpu(tmp_path: Path) -> None:
    """TRL passes on what it does not know itself; the trainer sets the precision."""
    training = training_of({"effective_batch": 16}, gpus=4, placements=(OF_EIGHT,))
    launch, _ = launched(training, tmp_path)
    assert (launch.multi_gpu, launch.num_processes) == (True, 4)
    assert (launch.num_machines, launch.mixed_precision) == (1, "no")


def test_accelerate_divides_the_model_as_the_estimate_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its plugin shards every layer, gathers in the autocast type, and reduces each micro-batch."""
    fields = {"effective_batch": 16, "precision": "bf16-mixed"}
    training = training_of(fields, gpus=4, strategy="fsdp2", placements=(OF_EIGHT,))
    launch, arguments = launched(training, tmp_path)
    assert (launch.use_fsdp, launch.multi_gpu, launch.num_processes) == (True, False, 4)
    accumulation = arguments.accelerator_config.gradient_accumulation_kwargs
    assert accumulation == {"sync_each_batch": True}
    environment = prepare_multi_gpu_env(launch)
    names = ("ACCELERATE_", "FSDP_")
    for name, value in environment.items():
        if name.startswith(names):
            monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    plugin.set_mixed_precision(environment["ACCELERATE_MIXED_PRECISION"])  # as Accelerator does
    assert (plugin.fsdp_version, plugin.reshard_after_forward) == (2, True)
    assert plugin.mixed_precision_policy.param_dtype == torch.bfloat16
    assert plugin.mixed_precision_policy.reduce_dtype == torch.bfloat16
    assert plugin.auto_wrap_policy is transformer_auto_wrap_policy
    assert not plugin.activation_checkpointing
    assert not isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    on_host, _ = launched(replace(training, shards_on_host=True), tmp_path)
    left_to_host = "FSDP_OFFLOAD_PARAMS"
    monkeypatch.setenv(left_to_host, prepare_multi_gpu_env(on_host)[left_to_host])
    assert isinstance(FullyShardedDataParallelPlugin().cpu_offload, CPUOffloadPolicy)


def read_back(arguments: Any, model: ModelConfig) -> dict[str, Any]:
    """Fields of a recipe that TRL would train by."""
    adapters, quantised = get_peft_config(model), get_quantization_config(model)
    autocast = "bf16" if arguments.bf16 else "fp16" if arguments.fp16 else None
    fields: dict[str, Any] = {
        "weights": f"torch.{model.dtype}",
        "autocast": autocast,
        "gradient_checkpointing": arguments.gradient_checkpointing,
        "activation_offloading": arguments.activation_offloading,
        "attention": model.attn_implementation,
        "optimizer": str(getattr(arguments.optim, "value", arguments.optim)),
        "max_grad_norm": arguments.max_grad_norm or None,
        "liger_kernels": arguments.use_liger_kernel,
        "compile": arguments.torch_compile,
        "packing": getattr(arguments, "packing", False),
        "precomputed": getattr(arguments, "precompute_ref_log_probs", False),
        "quantisation": None,
        "double": None,
    }
    if quantised is not None:
        fields["quantisation"] = "int8" if quantised.load_in_8bit else quantised.bnb_4bit_quant_type
        fields["double"] = None if quantised.load_in_8bit else quantised.bnb_4bit_use_double_quant
    if adapters is not None:
        names = ("r", "lora_alpha", "lora_dropout", "use_dora", "modules_to_save")
        fields |= {name: getattr(adapters, name) for name in names}
    return fields


def expected(recipe: Recipe) -> dict[str, Any]:
    """The same fields by the recipe."""
    optimizers = {"adamw": "adamw_torch_fused", "adamw_8bit": "adamw_bnb_8bit"}
    fields: dict[str, Any] = {
        "weights": TORCH[recipe.base_dtype],
        "autocast": recipe.autocast,
        "gradient_checkpointing": recipe.gradient_checkpointing,
        "activation_offloading": recipe.activation_offloading,
        "attention": recipe.attention,
        "optimizer": optimizers.get(recipe.optimizer, recipe.optimizer),
        "max_grad_norm": recipe.max_grad_norm,
        "liger_kernels": recipe.liger_kernels,
        "compile": recipe.compile is not None,
        "packing": recipe.packing,
        "precomputed": recipe.reference == "precomputed",
        "quantisation": recipe.quantisation,
        "double": recipe.double_quantisation,
    }
    if recipe.method != "full":
        fields |= {
            "r": recipe.lora_rank,
            "lora_alpha": recipe.lora_alpha,
            "lora_dropout": recipe.lora_dropout,
            "use_dora": recipe.dora,
            "modules_to_save": list(recipe.modules_to_save) if recipe.modules_to_save else None,
        }
    return fields


@pytest.mark.parametrize(
    "fields",
    [
        {},
        FULL,
        {"method": "qlora", "quantisation": "nf4"},
        {"method": "qlora", "quantisation": "fp4", "double_quantisation": False},
        {"method": "qlora", "quantisation": "int8"},
        {"precision": "bf16-mixed", "dora": True, "lora_alpha": 7, "lora_dropout": 0.1},
        {"precision": "fp16"},
        {**FULL, "precision": "fp16"},
        {"precision": "fp32", "gradient_checkpointing": False, "max_grad_norm": None},
        {**FULL, "precision": "bf16", "optimizer": "adamw_8bit"},
        {"optimizer": "paged_adamw_8bit", "modules_to_save": ("embed_tokens", "lm_head")},
        {"packing": True, "attention": "flash_attention_2", "precision": "bf16-mixed"},
        {"activation_offloading": True, "liger_kernels": True, "attention": "eager"},
        {**FULL, "compile": "model"},
        {"task": "dpo", "reference": "precomputed"},
        {"task": "kto"},
        {"task": "reward"},
    ],
)
def test_trl_reads_the_recipe_field_by_field(fields: dict[str, Any], tmp_path: Path) -> None:
    """Also the effective batch, the epochs and the tokens of a row."""
    training = training_of({"effective_batch": 8} | fields)
    arguments, model = parsed(training, tmp_path)
    assert read_back(arguments, model) == expected(training.recipe)
    batch = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    assert (batch, arguments.num_train_epochs, arguments.max_length) == (8, 3, 256)


@pytest.mark.parametrize("targets", [("attention",), ("q_proj",), ("q_proj", "up_proj")])
def test_peft_adapts_the_targets(targets: tuple[str, ...], tmp_path: Path) -> None:
    """A single name, too, which TRL passes on as a pattern."""
    from peft import get_peft_model  # noqa: PLC0415 - only this needs it

    _, model = parsed(training_of({"lora_targets": targets}), tmp_path)
    adapters = get_peft_config(model)
    assert isinstance(adapters, LoraConfig)
    base = AutoModelForCausalLM.from_pretrained(write_model("qwen2", tmp_path))
    names = {n for n, _ in get_peft_model(base, adapters).named_parameters() if "lora_A" in n}
    adapted = {name.partition(".lora_A")[0].rpartition(".")[2] for name in names}
    linears = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert adapted == (linears if targets == ("attention",) else set(targets))


def made_model(folder: Path) -> Path:
    """A tiny model with a tokenizer."""
    path = write_model("llama", folder)
    texts = [f"{row['question']} {row['answer']}" for row in rows(60)]
    train_tokenizer(folder / "tok", texts)
    plain = Tokenizer.from_file(str(folder / "tok" / "tokenizer.json"))
    plain.no_padding()
    plain.no_truncation()
    PreTrainedTokenizerFast(
        tokenizer_object=plain,
        eos_token="</s>",  # noqa: S106 - a token of text
        pad_token="</s>",  # noqa: S106 - as above
    ).save_pretrained(path)
    return path


CONFIGURATION = """\
# of a user
model_name_or_path: {model}
dataset_name: {data}
use_peft: true
max_length: 64
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
num_train_epochs: 3
save_strategy: steps
save_steps: 6
save_total_limit: 2
output_dir: elsewhere
report_to: none
"""


@pytest.mark.parametrize(
    "fields", [{}, {"loss": "full-logits", "precision": "bf16"}, "configuration"]
)
def test_the_exported_training_runs_to_its_end_and_resumes(
    fields: dict[str, Any] | str, tmp_path: Path
) -> None:
    """9 steps: 24 examples, 3 epochs, 2 x 4 a step. A second run begins at the last checkpoint."""
    # A checkpoint after 6 of the 9 steps.
    place = replace(SPOT, checkpoint_minutes=400.0)
    training = training_of(
        {"effective_batch": 8} | (fields if isinstance(fields, dict) else {}),
        model=find_model("llama-tiny"),
        seq_len=64,
        examples=24,
        steps=9,
        placements=(place,),
    )
    model, output = made_model(tmp_path), tmp_path / "out"
    output.mkdir()
    environment = job_variables(tmp_path, model) | {"OUTPUT": str(output)}
    if fields == "configuration":
        text = CONFIGURATION.format(model=model, data=environment["DATASET"])
        own = PatchedConfiguration("mine.yml", "TRL", "1.16", text, "", {})
        training = replace(training, configuration=own)
    script = f"set -euo pipefail\n{training_script(training)}"
    for step in (9, 9):
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        (state,) = output.glob("checkpoint-6/trainer_state.json")
        assert json.loads(state.read_text(encoding="utf-8"))["global_step"] == 6
        last = json.loads((output / "checkpoint-9" / "trainer_state.json").read_text("utf-8"))
        assert (last["global_step"], last["epoch"], last["train_batch_size"]) == (step, 3.0, 2)
    assert (output / "adapter_model.safetensors").exists()
