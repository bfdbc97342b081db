"""Task files as SkyPilot and dstack themselves read them."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders.trainings import OF_EIGHT, SECURE, SPOT, training_of

from orchestrator.exporting.task_file import task_file

pytestmark = pytest.mark.trainers

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv-trainers" / "bin" / "python"
COLUMNS = (
    "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,"
    "AvailabilityZone"
)
CATALOG = {
    "aws": "g5.xlarge,A10G,1,4,16,,1.0,0.3,us-east-1,us-east-1a",
    "runpod": "1x_A40_SECURE,A40,1,9,48,,0.4,,CA,CA",
    "lambda": "gpu_8x_a100_80gb_sxm4,A100-80GB-SXM,8,240,1800,,14.0,,us-east-1,",
    "gcp": "a2-highgpu-1g,A100,1,12,85,,3.6,1.1,us-central1,us-central1-a",
}
READ_BY_DSTACK = """\
import sys, yaml
from dstack._internal.core.models.configurations import parse_run_configuration
print(parse_run_configuration(yaml.safe_load(open(sys.argv[1]))).model_dump_json())
"""


def read(home: Path, *arguments: object) -> Any:
    """JSON that a script in the other environment prints last."""
    done = subprocess.run(
        [PYTHON, *map(str, arguments)],
        env={**os.environ, "HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def write_catalog(home: Path) -> None:
    """A catalog of SkyPilot, which is else downloaded."""
    for cloud, row in CATALOG.items():
        file = home / ".sky" / "catalogs" / "v8" / cloud / "vms.csv"
        file.parent.mkdir(parents=True)
        file.write_text(f"{COLUMNS}\n{row}\n", encoding="utf-8")


def test_skypilot_reads_the_offers_and_the_script(tmp_path: Path) -> None:
    """Cloud, region, instance and market of each offer, in their order."""
    write_catalog(tmp_path)
    google = replace(SPOT, provider="gcp", region="us-central1", instance="a2-highgpu-1g")
    data = tmp_path / "chats.jsonl"
    data.touch()
    training = training_of(placements=(SPOT, SECURE, OF_EIGHT, google), dataset=str(data))
    path = tmp_path / "task.yaml"
    path.write_text(task_file(training, "skypilot").text, encoding="utf-8")
    task = read(tmp_path, ROOT / "tests" / "trainers_skypilot.py", path)
    assert [(r["cloud"], r["region"], r["instance"], r["spot"]) for r in task["resources"]] == [
        ("aws", "us-east-1", "g5.xlarge", True),
        ("runpod", None, "1x_A40_SECURE", False),
        ("lambda", None, "gpu_8x_a100_80gb_sxm4", False),
        ("gcp", "us-central1", "a2-highgpu-1g", True),
    ]
    assert task["resources"][0]["gpus"] == {"A10G": 1}
    assert task["mode"] == "MOUNT_CACHED"
    assert task["files"] == {"/data/chats.jsonl": str(data)}
    assert task["envs"]["MODEL"] == "Qwen/Qwen2.5-0.5B"
    assert "trl sft" in task["run"]


def test_dstack_reads_the_lists_and_the_script(tmp_path: Path) -> None:
    """Backends, GPUs, market, price and retries."""
    path = tmp_path / "finetune.dstack.yml"
    data = tmp_path / "chats.jsonl"
    data.touch()
    path.write_text(task_file(training_of(dataset=str(data)), "dstack").text, encoding="utf-8")
    task = read(tmp_path, "-W", "ignore", "-c", READ_BY_DSTACK, path)
    assert task["backends"] == ["aws", "runpod", "lambda"]
    assert task["resources"]["gpu"]["name"] == ["A10G", "A40", "A100"]
    assert task["resources"]["gpu"]["count"] == {"min": 1, "max": 8}
    assert (task["spot_policy"], task["max_price"]) == ("auto", 14.0)
    assert task["retry"]["on_events"] == ["no-capacity", "interruption"]
    assert task["files"] == [{"local_path": str(data), "path": "/data/chats.jsonl"}]
    (script,) = task["commands"]
    assert script == yaml.safe_load(path.read_text(encoding="utf-8"))["commands"][0]
