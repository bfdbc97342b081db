"""Task files of trainings by DeepSpeed, as transformers reads them, and one as TRL runs it."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders.exported_jobs import job_variables
from builders.task_scripts import scripts
from builders.trainings import OF_EIGHT, training_of
from test_exporting_patched_configuration import TRAINERS, TRL, micro_key, written
from test_exporting_with_trl import FULL, made_model

from orchestrator.configurations.configuration import Configuration
from orchestrator.configurations.estimate_options import as_recipe
from orchestrator.configurations.layouts.deepspeed import deepspeed_of
from orchestrator.exporting.deepspeed_file import file_text
from orchestrator.exporting.patched_configuration import patched
from orchestrator.exporting.requirements import install_lines
from orchestrator.exporting.task_file import task_file
from orchestrator.exporting.training import ExportError, TrainingJob
from orchestrator.exporting.training_script import training_script
from trials.recipes.parallel import ZERO_STRATEGIES, Parallel, ZeroStrategy
from trials.recipes.zero_settings import ZeroSettings
from trials.records.model import find_model

SETTINGS = ZeroSettings(overlap_comm=True, reduce_bucket_size="auto", sub_group_size=1_000_000)


def by_deepspeed(
    strategy: ZeroStrategy,
    fields: dict[str, Any] | None = None,
    zero: ZeroSettings | None = None,
    *,
    gpus: int = 2,
    **changed: Any,
) -> TrainingJob:
    """A training on two GPUs by a stage of ZeRO."""
    layout = Parallel(gpus=gpus, strategy=strategy, zero=zero)
    shared = {"gpus": gpus, "strategy": strategy, "zero": layout.zero_settings}
    recipe = {"effective_batch": 16, "precision": "bf16", **(fields or {})}
    return training_of(recipe, placements=(OF_EIGHT,), **shared, **changed)


@pytest.mark.parametrize("zero", [None, SETTINGS, ZeroSettings(offload="optimizer")])
@pytest.mark.parametrize("strategy", ZERO_STRATEGIES)
def test_the_file_states_the_layout_that_was_estimated(
    strategy: ZeroStrategy, zero: ZeroSettings | None
) -> None:
    """It is read back as it is read from a user."""
    training = by_deepspeed(strategy, zero=zero)
    stated = deepspeed_of(json.loads(file_text(training)), "file")
    assert (stated.strategy, stated.zero) == (strategy, training.zero)


def test_the_command_names_the_file_and_installs_deepspeed() -> None:
    """Processes of several nodes have files of their own, which a shared folder holds."""
    training = by_deepspeed("deepspeed-zero2", FULL)
    script = scripts("skypilot", task_file(training, "skypilot").text)[-1]
    assert "cat > \"$OUTPUT/deepspeed.json\" << 'JSON'" in script
    assert '--deepspeed "$OUTPUT/deepspeed.json" ' in script
    assert "--bf16 True " in script
    assert "--mixed_precision no " in script
    assert "'deepspeed>=0.19.8'" in install_lines(training)
    assert "nvcc" not in task_file(training, "dstack").text
    on_host = by_deepspeed("deepspeed-zero2", FULL, zero=ZeroSettings(offload="optimizer"))
    assert "nvcc: true" in task_file(on_host, "dstack").text  # compiles DeepSpeed's AdamW
    place = replace(OF_EIGHT, provider="aws", instance="p4d.24xlarge", instances=2)
    nodes = replace(training, nodes=2, placements=(place,))
    script = scripts("skypilot", task_file(nodes, "skypilot").text)[-1]
    assert 'cat > "$OUTPUT/deepspeed-$NODE_RANK.json"' in script
    assert '--deepspeed "$OUTPUT/deepspeed-$NODE_RANK.json" ' in script


def test_one_gpu_that_offloads_has_a_launcher(tmp_path: Path) -> None:
    """DeepSpeed needs the variables of one; accelerate starts a single process without them."""
    offload = ZeroSettings(offload="optimizer")
    training = by_deepspeed("deepspeed-zero2", FULL, offload, gpus=1)
    one = "torchrun --standalone --nproc_per_node 1"
    assert f"\n{one} -m trl.scripts.sft \\\n" in training_script(training)
    by_file = by_deepspeed("deepspeed-zero2", {}, offload, gpus=1)
    assert f'\n{one} "$OUTPUT/train.py" \\\n' in training_script(by_file)
    expected = {
        "TRL": f'{one} -m trl.scripts.sft --config "$CONFIG"',
        "axolotl": "--launcher torchrun -- --nproc_per_node=1",
        "LLaMA-Factory": "FORCE_TORCHRUN=1 NPROC_PER_NODE=1 llamafactory-cli",
    }
    for trainer, words in expected.items():
        folder = tmp_path / trainer
        folder.mkdir()
        configuration = configured(trainer, folder, offload=True)
        job = job_of(configuration, gpus=1, zero=with_offload(SETTINGS))
        alone = replace(job, recipe=job.recipe.model_copy(update={"effective_batch": 8}))
        own = patched(configuration, alone, 256)
        script = training_script(replace(alone, configuration=own))
        assert words in script
        assert "--multi_gpu" not in script


def test_a_task_asks_for_the_memory_that_the_host_holds() -> None:
    """In whole GiB; dstack chooses among instances by it, and Slurm needs room for processes."""
    zero = ZeroSettings(offload="optimizer")
    training = by_deepspeed("deepspeed-zero2", FULL, zero=zero, host_gib=310.4)
    resources = {
        target: yaml.safe_load(task_file(training, target).text)["resources"]
        for target in ("skypilot", "dstack")
    }
    assert [place["memory"] for place in resources["skypilot"]["ordered"]] == ["311+"]
    assert resources["dstack"]["memory"] == "311GB.."
    assert "#SBATCH --mem=439G\n" in task_file(training, "slurm").text
    without = by_deepspeed("deepspeed-zero2", FULL)
    assert "memory" not in yaml.safe_load(task_file(without, "dstack").text)["resources"]
    assert "#SBATCH --mem=128G\n" in task_file(without, "slurm").text


def with_offload(zero: ZeroSettings) -> ZeroSettings:
    """Settings by which the host holds the optimizer."""
    return zero.model_copy(update={"offload": "optimizer"})


def configured(
    trainer: str, folder: Path, name: str = "ds/z2.json", *, offload: bool = False
) -> Configuration:
    """A configuration that trains by a file of DeepSpeed beside it."""
    zero = with_offload(SETTINGS) if offload else SETTINGS
    content = {
        "comment": "ends a line of YAML: \u2028",
        "zero_optimization": {"stage": 2, **zero.given()},
        "bf16": {"enabled": "auto"},
        "train_micro_batch_size_per_gpu": 2,
        "train_batch_size": 16,
        "optimizer": {"type": "AdamW", "params": {"eps": 1e-8}},
    }
    (folder / "ds").mkdir()
    (folder / "ds" / "z2.json").write_text(
        json.dumps(content, ensure_ascii=False), encoding="utf-8"
    )
    lines = f"{micro_key(trainer)}: 2\ngradient_accumulation_steps: 4\ndeepspeed: {name}\n"
    return written(folder, TRAINERS[trainer] + lines)


def job_of(configuration: Configuration, **changed: Any) -> TrainingJob:
    """The training of a configuration on two GPUs, as an estimate prices it."""
    training = by_deepspeed("deepspeed-zero2", zero=SETTINGS)
    # The engine has one dtype.
    engine = {"precision": "bf16", "adapter_dtype": "bf16"}
    batch = {"effective_batch": 16, "gradient_accumulation": 1}
    recipe = as_recipe(configuration).model_copy(update=engine | batch)
    epochs = configuration.options["epochs"]
    return replace(training, recipe=recipe, epochs=epochs, micro_batch=4, **changed)


def test_a_task_leaves_the_files_alone_that_are_where_it_starts(tmp_path: Path) -> None:
    """A script or a file of DeepSpeed of the user's may have the same name."""
    folder, output = tmp_path / "job", tmp_path / "out"
    for place in (folder, output, folder / "ds"):
        place.mkdir()
    for name in ("train.py", "deepspeed.json", "ds/z2.json"):
        (folder / name).write_text("mine", encoding="utf-8")
    configuration = configured("TRL", tmp_path)
    training = job_of(configuration)
    own = replace(training, configuration=patched(configuration, training, 256))
    for job in (by_deepspeed("deepspeed-zero2", {"loss": "full-logits"}), own):
        stubs = "trl() { :; }; accelerate() { :; }"
        given = {"OUTPUT": str(output), "MODEL": "m", "DATASET": "d"}
        subprocess.run(
            ["bash", "-euc", f"{stubs}\n{training_script(job)}"],
            cwd=folder,
            env={"PATH": os.environ["PATH"], **given},
            check=True,
        )
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    assert {name: path.read_text("utf-8") for name, path in files.items()} == dict.fromkeys(
        ("train.py", "deepspeed.json", "ds/z2.json"), "mine"
    )
    assert {"train.py", "deepspeed.json", "configuration.yaml"} <= {
        path.name for path in output.iterdir()
    }


@pytest.mark.parametrize("trainer", list(TRAINERS))
def test_a_configuration_has_the_content_of_its_file_in_a_task(
    trainer: str, tmp_path: Path
) -> None:
    """Wherever the file is, with the batches of the export; the rest stays, such as 1e-8."""
    file = tmp_path / "ds" / "z2.json"
    configuration = configured(trainer, tmp_path, str(file))
    training = job_of(configuration)
    own = patched(configuration, training, 256)
    content = json.loads(file.read_text("utf-8"))
    batches = dict.fromkeys(("train_micro_batch_size_per_gpu", "train_batch_size"), "auto")
    assert yaml.safe_load(own.text)["deepspeed"] == content | batches
    task = task_file(replace(training, configuration=own), "skypilot")
    script = scripts("skypilot", task.text)[-1]
    (line,) = (line for line in script.splitlines() if line.startswith("deepspeed: "))
    assert f"+{line}" in own.diff.splitlines()
    package = "[deepspeed]==" if trainer == "axolotl" else "'deepspeed>=0.19.8'"
    assert package in yaml.safe_load(task.text)["setup"]
    stack = yaml.safe_load(task_file(replace(training, configuration=own), "dstack").text)
    assert stack.get("nvcc", False) is (trainer == "axolotl")


def test_a_configuration_that_has_the_content_keeps_it_but_for_batches(tmp_path: Path) -> None:
    """Numbers would stop the trainer, whose micro-batch is another."""
    zero = {"stage": 2, **SETTINGS.given()}
    batches = "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n"
    text = f"{TRL}{batches}deepspeed: {json.dumps({'zero_optimization': zero})}\n"
    configuration = written(tmp_path, text)
    assert patched(configuration, job_of(configuration), 256).diff == ""
    text = text.replace('{"zero_opt', '{"gradient_accumulation_steps": 2, "zero_opt')
    configuration = written(tmp_path, text)
    after = yaml.safe_load(patched(configuration, job_of(configuration), 256).text)
    assert after["deepspeed"] == {"gradient_accumulation_steps": "auto", "zero_optimization": zero}


def test_a_configuration_that_trains_otherwise_is_refused(tmp_path: Path) -> None:
    """By another layout, or with other settings."""
    configuration = configured("TRL", tmp_path)
    alone = job_of(configuration, gpus=1, strategy=None, zero=None)
    with pytest.raises(ExportError, match="trains by DeepSpeed, and the price is for one GPU"):
        patched(configuration, alone, 256)
    with pytest.raises(ExportError, match="by deepspeed-zero2, and the price is for ddp"):
        patched(configuration, job_of(configuration, strategy="ddp", zero=None), 256)
    with pytest.raises(ExportError, match="other settings of DeepSpeed than --deepspeed"):
        patched(configuration, job_of(configuration, zero=ZeroSettings()), 256)


WITHOUT_GPU = """\
import os

import transformers.utils
from accelerate.state import DistributedType, PartialState

if "LOCAL_RANK" in os.environ:  # not the launcher
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_CPU)
transformers.utils.is_torch_bf16_gpu_available = lambda: True
"""
"""A job's ``sitecustomize``: its processes are those of GPUs, but on CPUs, which have bf16 too.

With ``--use_cpu`` accelerate would start DeepSpeed after the model is made.
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "fields", "gpus"),
    [
        ("deepspeed-zero2", FULL, 2),  # by TRL's command
        ("deepspeed-zero2", {}, 2),  # the rest by a Python file
        ("deepspeed-zero3", FULL | {"loss": "full-logits"}, 2),
        ("deepspeed-zero3", {"loss": "full-logits"}, 2),
        ("deepspeed-zero2", FULL, 1),
        ("deepspeed-zero2", {}, 1),
    ],
)
def test_processes_train_by_deepspeed_and_resume(
    strategy: ZeroStrategy, fields: dict[str, Any], gpus: int, tmp_path: Path
) -> None:
    """6 steps: 24 examples, 2 epochs, batches of 8; then two from a checkpoint.

    One process offloads, by an AdamW that DeepSpeed compiles.
    """
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    training = by_deepspeed(
        strategy,
        {"effective_batch": 8, **fields},
        None if gpus > 1 else ZeroSettings(offload="optimizer"),
        gpus=gpus,
        model=find_model("llama-tiny"),
        seq_len=64,
        examples=24,
        epochs=2,
        steps=6,
    )
    script = yaml.safe_load(task_file(training, "skypilot").text)["run"]
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_GPU, encoding="utf-8")
    own = {"PYTHONPATH": str(tmp_path), "DS_ACCELERATOR": "cpu", "OUTPUT": str(bucket)}
    variables = job_variables(tmp_path, made_model(tmp_path), options="") | own
    words = ["bash", "-c", re.sub(r"save_steps \d+", "save_steps 4", script)]
    earlier = bucket / "checkpoint-4" / "trainer_state.json"
    written_at = set()
    for _ in range(2):
        # The second run lacks the last two steps, and would write the fourth's again from none.
        shutil.rmtree(bucket / "checkpoint-6", ignore_errors=True)
        done = subprocess.run(
            words, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        last = json.loads((bucket / "checkpoint-6" / "trainer_state.json").read_text("utf-8"))
        assert (last["global_step"], last["train_batch_size"]) == (6, 2)
        written_at.add(earlier.stat().st_mtime_ns)
    assert len(written_at) == 1
    assert len([*(bucket / "checkpoint-6" / "global_step6").glob("*optim_states.pt")]) == gpus
