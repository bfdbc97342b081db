"""Task files as SkyPilot and dstack themselves read them."""

from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from builders.trainings import OF_EIGHT, SECURE, SPOT, training_of
from fakes.skypilot import json_of_trainers, read_by_skypilot
from packaging.requirements import Requirement

from orchestrator.clouds.skypilot import SKYPILOT_CLOUDS, UNMOUNTED_CLOUDS
from orchestrator.exporting.names import DSTACK_BACKENDS, DSTACK_CLUSTERS
from orchestrator.exporting.requirements import AXOLOTL_CCE, AXOLOTL_TORCH
from orchestrator.exporting.task_file import task_file

pytestmark = pytest.mark.trainers

SOURCES = Path(__file__).parent.parent / ".venv-trainers" / "trainers"

CATALOG = {
    "aws": "g5.xlarge,A10G,1,4,16,,1.0,0.3,us-east-1,us-east-1a",
    "lambda": "gpu_8x_a100_80gb_sxm4,A100-80GB-SXM,8,240,1800,,14.0,,us-east-1,",
    "gcp": "a2-highgpu-1g,A100,1,12,85,,3.6,1.1,us-central1,us-central1-a",
}
CLUSTERS_OF_DSTACK = """\
import json, pathlib
import dstack._internal.core.backends as backends

files = pathlib.Path(backends.__path__[0]).glob("*/compute.py")
kind = "    ComputeWithMultinodeSupport,\\n"
print(json.dumps([file.parent.name for file in files if kind in file.read_text()]))
"""
LACKING_CLOUDS = """\
import json
from sky.clouds import CloudImplementationFeatures as Feature
from sky.utils.registry import CLOUD_REGISTRY

lacking = {}
for name, cloud in CLOUD_REGISTRY.items():
    features = getattr(cloud, "_CLOUD_UNSUPPORTED_FEATURES", {})
    lacking[name] = [Feature.MULTI_NODE in features, Feature.STORAGE_MOUNTING in features]
print(json.dumps(lacking))
"""
READ_BY_DSTACK = """\
import sys, yaml
from dstack._internal.core.models.configurations import parse_run_configuration
print(parse_run_configuration(yaml.safe_load(open(sys.argv[1]))).model_dump_json())
"""


def test_skypilot_reads_the_offers_and_the_script(tmp_path: Path) -> None:
    """Cloud, region, instance and market of each offer, in their order."""
    google = replace(SPOT, provider="gcp", region="us-central1", instance="a2-highgpu-1g")
    data = tmp_path / "chats.jsonl"
    data.touch()
    training = training_of(placements=(SPOT, SECURE, OF_EIGHT, google), dataset=str(data))
    path = tmp_path / "task.yaml"
    path.write_text(task_file(training, "skypilot").text, encoding="utf-8")
    (task,) = read_by_skypilot(path, tmp_path, CATALOG)
    assert [(r["cloud"], r["region"], r["instance"], r["spot"]) for r in task["resources"]] == [
        ("aws", "us-east-1", "g5.xlarge", True),
        ("lambda", None, "gpu_8x_a100_80gb_sxm4", False),
        ("gcp", "us-central1", "a2-highgpu-1g", True),
    ]
    assert task["resources"][0]["gpus"] == {"A10G": 1}
    assert task["modes"] == ["MOUNT_CACHED"]
    assert task["files"] == {"/data/chats.jsonl": str(data)}
    assert task["envs"]["MODEL"] == "Qwen/Qwen2.5-0.5B"
    assert "trl sft" in task["run"]


def test_both_read_a_training_that_several_gpus_divide(tmp_path: Path) -> None:
    """A whole machine of eight, whose command shards the model."""
    fields = {"effective_batch": 16, "precision": "bf16-mixed"}
    training = training_of(fields, gpus=8, strategy="fsdp2", placements=(OF_EIGHT,))
    path = tmp_path / "task.yaml"
    path.write_text(task_file(training, "skypilot").text, encoding="utf-8")
    (task,) = read_by_skypilot(path, tmp_path, CATALOG)
    assert task["resources"][0]["gpus"] == {"A100-80GB-SXM": 8}
    assert "--use_fsdp --fsdp_version 2" in task["run"]
    path.write_text(task_file(training, "dstack").text, encoding="utf-8")
    run = json_of_trainers(tmp_path, "-W", "ignore", "-c", READ_BY_DSTACK, path)
    assert run["resources"]["gpu"]["count"] == {"min": 8, "max": 8}
    assert "--use_fsdp --fsdp_version 2" in run["commands"][0]


def test_dstack_reads_the_lists_and_the_script(tmp_path: Path) -> None:
    """Backends, GPUs, market, price and retries."""
    path = tmp_path / "finetune.dstack.yml"
    data = tmp_path / "chats.jsonl"
    data.touch()
    path.write_text(task_file(training_of(dataset=str(data)), "dstack").text, encoding="utf-8")
    task = json_of_trainers(tmp_path, "-W", "ignore", "-c", READ_BY_DSTACK, path)
    assert task["backends"] == ["aws", "runpod", "lambda"]
    assert task["resources"]["gpu"]["name"] == ["A10G", "A40", "A100"]
    assert task["resources"]["gpu"]["count"] == {"min": 1, "max": 8}
    assert (task["spot_policy"], task["max_price"]) == ("auto", 14.0)
    assert task["retry"]["on_events"] == ["no-capacity", "interruption"]
    assert task["files"] == [{"local_path": str(data), "path": "/data/chats.jsonl"}]
    (script,) = task["commands"]
    assert script == yaml.safe_load(path.read_text(encoding="utf-8"))["commands"][0]


def test_both_read_a_training_on_several_nodes(tmp_path: Path) -> None:
    """So many whole machines with a fast network, at the price of one."""
    fields = {"effective_batch": 16, "precision": "bf16-mixed"}
    place = replace(OF_EIGHT, provider="aws", instance="p4d.24xlarge", instances=2, rdma=True)
    layout = {"gpus": 16, "nodes": 2, "strategy": "hsdp", "replicas": 2}
    training = training_of(fields, micro_batch=1, placements=(place,), **layout)
    path = tmp_path / "task.yaml"
    path.write_text(task_file(training, "skypilot").text, encoding="utf-8")
    catalog = {"aws": "p4d.24xlarge,A100,8,96,1152,,28.0,9.0,us-east-1,us-east-1a"}
    (task,) = read_by_skypilot(path, tmp_path, catalog)
    assert (task["nodes"], task["resources"][0]["network"]) == (2, "best")
    assert "--num_machines 2 --num_processes 16 --machine_rank $NODE_RANK" in task["run"]
    path.write_text(task_file(training, "dstack").text, encoding="utf-8")
    run = json_of_trainers(tmp_path, "-W", "ignore", "-c", READ_BY_DSTACK, path)
    assert (run["nodes"], run["max_price"], run["resources"]["shm_size"]) == (2, 7.0, 16.0)


def test_clouds_that_start_no_several_nodes_are_those_of_the_services(tmp_path: Path) -> None:
    """SkyPilot lacks them where it mounts no bucket; dstack where its backend has no such class."""
    clouds = json_of_trainers(tmp_path, "-c", LACKING_CLOUDS)
    for name in SKYPILOT_CLOUDS.values():
        assert clouds[name] == [name in UNMOUNTED_CLOUDS] * 2
    backends = json_of_trainers(tmp_path, "-W", "ignore", "-c", CLUSTERS_OF_DSTACK)
    assert set(DSTACK_BACKENDS.values()) & set(backends) == DSTACK_CLUSTERS


def test_axolotl_takes_the_pytorch_that_its_task_installs() -> None:
    """Else pip would replace it after flash-attn was compiled against it."""
    (folder,) = SOURCES.glob("axolotl-*.dist-info")
    requirements = map(Requirement, metadata.Distribution.at(folder).requires or [])
    (torch,) = (one.specifier for one in requirements if one.name == "torch")
    assert torch.contains(AXOLOTL_TORCH)


def test_axolotls_plugin_asks_for_the_fork_that_its_task_installs() -> None:
    """Its commit changes with axolotl's version."""
    plugin = SOURCES / "axolotl" / "integrations" / "cut_cross_entropy" / "__init__.py"
    assert AXOLOTL_CCE in plugin.read_text(encoding="utf-8")
