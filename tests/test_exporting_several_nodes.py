"""Task files that start a training on several nodes, and two nodes of this machine that train."""

import json
import os
import shlex
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils.launch import prepare_multi_gpu_env
from builders.exported_jobs import job_variables
from builders.task_scripts import scripts
from builders.trainings import OF_EIGHT, SPOT, training_of
from test_exporting_patched_configuration import TRAINERS, micro_key, written
from test_exporting_task_file import sbatch_options
from test_exporting_with_trl import CONFIGURATION, made_model
from torch.distributed.run import get_args_parser

from orchestrator.configurations.estimate_options import as_recipe
from orchestrator.exporting.patched_configuration import patched
from orchestrator.exporting.task_file import TARGETS, Target, task_file
from orchestrator.exporting.training import ExportError, PatchedConfiguration, TrainingJob
from trials.records.model import find_model

PAIR = replace(
    OF_EIGHT, provider="aws", instance="p4d.24xlarge", usd_per_hour=28.0, instances=2, rdma=True
)
STARTING: tuple[Target, ...] = ("skypilot", "dstack", "slurm")


def of_nodes(**changed: Any) -> TrainingJob:
    """A training on eight GPUs of two nodes, each with eight."""
    fields = {"effective_batch": 16, "precision": "bf16-mixed"}
    layout: dict[str, Any] = {"gpus": 8, "nodes": 2, "strategy": "ddp", "placements": (PAIR,)}
    return replace(training_of(fields, **layout), **changed)


@pytest.mark.parametrize("target", TARGETS)
def test_a_format_starts_all_nodes_or_says_that_it_cannot(target: Target) -> None:
    """Each node shows four of its GPUs, takes its number from the service, and meets the others."""
    if target not in STARTING:
        with pytest.raises(ExportError, match=rf"--to {target}: .*takes 2: use --to one of sky"):
            task_file(of_nodes(), target)
        return
    text = task_file(of_nodes(), target).text
    script = scripts(target, text)[-1]
    assert "{CUDA_VISIBLE_DEVICES:-0,1,2,3}" in script
    assert "--num_machines 2 --num_processes 8 --machine_rank $NODE_RANK " in script
    assert "2 x 1 accumulated x 8 GPUs on 2 nodes (ddp) = 16 examples" in text
    assert "2 x aws p4d.24xlarge" in text
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_each_format_names_the_number_of_instances() -> None:
    """The price limit of dstack is that of one; Slurm starts a task on each."""
    sky = yaml.safe_load(task_file(of_nodes(), "skypilot").text)
    assert sky["num_nodes"] == 2
    assert sky["resources"]["ordered"][0]["network_tier"] == "best"
    stack = yaml.safe_load(task_file(of_nodes(), "dstack").text)
    assert (stack["nodes"], stack["resources"]["gpu"]["count"], stack["max_price"]) == (2, 8, 14.0)
    text = task_file(of_nodes(), "slurm").text
    options = sbatch_options(text)
    assert (options["nodes"], options["ntasks-per-node"]) == ("2", "1")
    assert options["gpus-per-node"] == "a100:4"
    assert "export MODEL DATASET OUTPUT\n" in text


def launched_words(training: TrainingJob) -> list[str]:
    """Options of ``accelerate launch`` in the command of a task, with its variables."""
    script = task_file(training, "skypilot").text.replace("\\\n", " ")
    (line,) = (line for line in script.splitlines() if line.strip().startswith("trl sft"))
    return shlex.split(line.partition(" --model_name")[0])[2:]


def replaced(words: list[str], rank: str, address: str, port: str) -> list[str]:
    """Words with the variables of a node."""
    values = {"$NODE_RANK": rank, "$MASTER_ADDR": address, "$MASTER_PORT": port}
    return [values.get(word, word) for word in words]


def test_accelerate_copies_shards_to_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mesh has two copies of a model in four shards, and the second node's number."""
    words = launched_words(of_nodes(strategy="hsdp", replicas=2))
    words = replaced(words, "1", "10.0.0.1", "29500")
    launch = launch_command_parser().parse_args([*words, "--dynamo_backend", "no", "sft.py"])
    for name, value in prepare_multi_gpu_env(launch).items():
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_")):
            monkeypatch.setenv(name, value)
    mesh = ParallelismConfig()
    assert (mesh.dp_replicate_size, mesh.dp_shard_size) == (2, 4)
    assert mesh.fsdp_dim_names == ["dp_replicate", "dp_shard_cp"]
    assert os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
    assert (launch.nnodes, launch.node_rank, launch.nproc_per_node) == ("2", 1, "4")
    assert launch.rdzv_endpoint == "10.0.0.1:29500"


SHARDING = """\
import accelerate.state
from accelerate.utils import DistributedType

own = accelerate.state.PartialState.__init__


def init(self, *args, **options):
    own(self, *args, **options)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_XPU  # CPUs alone are not divided among


accelerate.state.PartialState.__init__ = init
from accelerate import Accelerator
from transformers import AutoModelForCausalLM
import sys, torch

accelerator = Accelerator(cpu=True)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
tokens = torch.arange(32).view(2, 16)
accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
optimizer.step()
weight = next(model.model.layers[0].parameters())
print(weight.placements, weight.device_mesh.mesh.tolist())
"""


@pytest.mark.long
def test_each_of_two_nodes_has_a_copy_in_shards(tmp_path: Path) -> None:
    """A step of four processes by accelerate itself, launched as the task launches them."""
    training = of_nodes(strategy="hsdp", replicas=2, gpus=4)
    words = launched_words(training)
    (tmp_path / "train.py").write_text(SHARDING, encoding="utf-8")
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *words]
    model, port = made_model(tmp_path), str(free_port())
    nodes = [
        subprocess.Popen(
            [*replaced(command, str(rank), "127.0.0.1", port), "train.py", model],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    logs = [node.communicate(timeout=600)[0] for node in nodes]
    for log in logs:
        assert log.count("(Replicate(), Shard(dim=0)) [[0, 1], [2, 3]]") == 2, log[-3000:]


STARTS = {"axolotl": "axolotl train", "LLaMA-Factory": "FORCE_TORCHRUN=1", "TRL": "trl sft"}


def trained_by(trainer: str, folder: Path) -> tuple[str, str]:
    """Script of a node whose configuration a trainer trains by, and its last command."""
    lines = f"{micro_key(trainer)}: 2\ngradient_accumulation_steps: 1\n"
    configuration = written(folder, TRAINERS[trainer] + lines)
    batch = {"effective_batch": 16, "gradient_accumulation": 1}
    recipe = as_recipe(configuration).model_copy(update=batch)
    training = of_nodes(recipe=recipe, epochs=configuration.options["epochs"])
    own = patched(configuration, training, 256)
    script = scripts("skypilot", task_file(replace(training, configuration=own), "skypilot").text)
    text = script[-1].replace("\\\n", " ")
    (line,) = (line for line in text.splitlines() if line.startswith(STARTS[trainer]))
    for name, value in {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "9"}.items():
        line = line.replace(f"${name}", value)
    return text, line


@pytest.mark.parametrize("trainer", list(TRAINERS))
def test_the_launcher_of_a_trainer_starts_all_nodes(trainer: str, tmp_path: Path) -> None:
    """Torchrun and accelerate read where the nodes meet; LLaMA-Factory has variables for it."""
    script, line = trained_by(trainer, tmp_path)
    assert "CONFIG=$OUTPUT/configuration-$NODE_RANK.yaml" in script
    if trainer == "LLaMA-Factory":
        assert line.startswith("FORCE_TORCHRUN=1 NNODES=2 NPROC_PER_NODE=4 llamafactory-cli train ")
        assert "export NODE_RANK=$SKYPILOT_NODE_RANK MASTER_PORT=29500\n" in script
        assert "export MASTER_ADDR=" in script
    elif trainer == "axolotl":
        words = shlex.split(line.partition(" -- ")[2])
        torchrun = get_args_parser().parse_args([*words, "train.py"])
        assert (torchrun.nnodes, torchrun.node_rank, torchrun.nproc_per_node) == ("2", 1, "4")
        assert (torchrun.master_addr, torchrun.master_port) == ("10.0.0.1", 9)
    else:
        words = shlex.split(line[line.index("--multi_gpu") :])
        launch = launch_command_parser().parse_args([*words, "sft.py"])
        assert (launch.num_machines, launch.num_processes, launch.machine_rank) == (2, 8, 1)
        assert (launch.main_process_ip, launch.main_process_port) == ("10.0.0.1", 9)


COMMANDS = {
    "pip": "true",
    "aws": "true",
    "python3": 'mkdir -p "$3/bin"; touch "$3/bin/activate"',
    "scontrol": "printf 'first\\nsecond\\n'",
    "srun": """\
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do HOME=$FOLDER/$node SLURM_NODEID=$node "$@"; done
""",
    "trl": 'echo "$OUTPUT" "$@" > "$HOME/words"',
}
SERVICES = {
    "skypilot": "SKYPILOT_NODE_RANK={} SKYPILOT_NODE_IPS=$'first\\nsecond'",
    "dstack": "DSTACK_NODE_RANK={} DSTACK_MASTER_NODE_IP=first OUTPUT_BUCKET=s3://bucket",
}


@pytest.mark.parametrize("target", STARTING)
def test_nodes_of_a_service_start_the_command(target: Target, tmp_path: Path) -> None:
    """Each with its number, the first one's address, and the variables of the task."""
    for name, command in COMMANDS.items():
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/bash\n{command}\n", encoding="utf-8")
        file.chmod(0o755)
    text = task_file(of_nodes(dataset="trl-lib/Capybara"), target).text
    scripts_of_nodes = [text.replace("/YOUR_SHARED_FOLDER", str(tmp_path / "shared"))]
    if target in SERVICES:
        given = f"OUTPUT={tmp_path}/out MODEL=Qwen/Qwen2.5-0.5B DATASET=trl-lib/Capybara"
        scripts_of_nodes = [
            f"export HOME=$FOLDER/{rank} {given} {SERVICES[target].format(rank)}\n"
            + scripts(target, text)[-1]
            for rank in range(2)
        ]
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "FOLDER": str(tmp_path),
        "SLURM_JOB_ID": "7012",
        "SLURM_JOB_NODELIST": "[first,second]",
    }
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    for script in scripts_of_nodes:
        subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, check=True)
    port = 29512 if target == "slurm" else 29500
    for rank in range(2):
        words = (tmp_path / str(rank) / "words").read_text("utf-8")
        assert f"--machine_rank {rank} --main_process_ip first --main_process_port {port} " in words
        assert "--model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name trl-lib/Capybara " in words
        output = "shared/finetune-qwen2-5-0-5b" if target == "slurm" else "out"
        assert words.startswith(f"{tmp_path}/{output} sft ")


def free_port() -> int:
    """Port of this machine that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def nodes_run(script: str, folder: Path, variables: dict[str, str]) -> list[str]:
    """Run the script of a task of SkyPilot on two nodes, which mount one bucket; their logs."""
    port = free_port()
    shared = {"OUTPUT": str(folder / "bucket"), "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1"}
    nodes = []
    for rank in range(2):
        home = folder / f"node-{rank}"
        home.mkdir(exist_ok=True)
        own = {"SKYPILOT_NODE_RANK": str(rank), "HF_HOME": str(home / "hf")}
        text = script.replace("MASTER_PORT=29500", f"MASTER_PORT={port}")
        command = f"exec > log 2>&1\n{text}"
        nodes.append(
            subprocess.Popen(["bash", "-c", command], cwd=home, env=variables | shared | own)
        )
    codes = [node.wait(timeout=600) for node in nodes]
    logs = [(folder / f"node-{rank}" / "log").read_text("utf-8") for rank in range(2)]
    assert codes == [0, 0], "\n".join(log[-3000:] for log in logs)
    return logs


@pytest.mark.long
@pytest.mark.parametrize("form", ["command", "python", "configuration"])
def test_two_nodes_train_together_and_resume(form: str, tmp_path: Path) -> None:
    """9 steps: 24 examples, 3 epochs, 2 x 2 on two nodes a step; then from the last checkpoint."""
    fields = {"loss": "full-logits", "precision": "bf16"} if form == "python" else {}
    training = training_of(
        {"effective_batch": 8} | fields,
        model=find_model("llama-tiny"),
        seq_len=64,
        examples=24,
        steps=9,
        gpus=2,
        nodes=2,
        strategy="ddp",
        placements=(replace(SPOT, checkpoint_minutes=400.0, instances=2),),
    )
    model = made_model(tmp_path)
    variables = job_variables(tmp_path, model)
    if form == "configuration":
        text = CONFIGURATION.format(model=model, data=variables["DATASET"])
        text = text.replace("steps: 4", "steps: 2")
        own = PatchedConfiguration("mine.yml", "TRL", "1.16", text, "", {})
        training = replace(training, configuration=own)
    script = yaml.safe_load(task_file(training, "skypilot").text)["run"]
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    for step in (9, 9):
        nodes_run(script, tmp_path, variables)
        saved = {path.name for path in (bucket / "checkpoint-6").iterdir()}
        assert {"rng_state_0.pth", "rng_state_1.pth", "trainer_state.json"} <= saved
        last = json.loads((bucket / "checkpoint-9" / "trainer_state.json").read_text("utf-8"))
        assert (last["global_step"], last["epoch"], last["train_batch_size"]) == (step, 3.0, 2)
    assert (bucket / "adapter_model.safetensors").exists()
