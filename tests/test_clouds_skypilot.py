"""Tasks by which SkyPilot rents nodes, starts Ray on them and sweeps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from builders.clusters import CATALOG, ROOT, deployment_on
from fakes.skypilot import read_by_skypilot

from orchestrator.clouds.deployment_request import DeploymentRequest
from orchestrator.clouds.skypilot import places

BY_SKYPILOT = DeploymentRequest("skypilot", nodes_each=2)
# A SkyPilot that rents on a cloud finds its instances in a catalog, which is else downloaded.
INSTANCES = {
    "cudo": "ice-lake-a40-compute_1x2v4gb,A40,1,2,4,,0.4,,ca-montreal-3,",
    "runpod": "1x_A40_SECURE,A40,1,9,48,,0.4,,CA,CA",
    "verda": "1A100.22V,A100-80GB,1,22,120,,1.3,0.5,FIN-01,FIN-01",
}


def test_the_cheapest_offer_of_one_gpu_comes_first() -> None:
    """Spot and on demand of all its clouds in one order; instances of several GPUs are left out."""
    found = places("H100-SXM", CATALOG, spot=None)
    prices = [place.offer.usd_per_hour for place in found]
    assert prices == sorted(prices)
    assert {place.offer.gpus_per_instance for place in found} == {1}
    assert {True, False} == {place.is_spot for place in found}
    assert len({place.infra.partition("/")[0] for place in found}) >= 5
    assert not any(place.is_spot for place in places("H100-SXM", CATALOG, spot=False))
    assert places("MI300X", CATALOG, spot=True) == []


@pytest.mark.trainers
def test_skypilot_reads_a_task_for_each_gpu(tmp_path: Path) -> None:
    """Each has the offers, the specification and the nodes, and asks for its secrets."""
    path = tmp_path / "tasks.yaml"
    made = deployment_on("A40", "A100-80GB-SXM", request=BY_SKYPILOT)
    path.write_text(made.text, encoding="utf-8")
    tasks = read_by_skypilot(path, tmp_path, INSTANCES)
    assert [task["name"] for task in tasks] == ["finetune-cost-a40", "finetune-cost-a100-80gb-sxm"]
    rented = [[(r["cloud"], r["region"], r["spot"]) for r in task["resources"]] for task in tasks]
    assert rented == [
        [("cudo", "ca-montreal-3", False), ("runpod", None, False)],
        [("verda", "FIN-01", True), ("verda", "FIN-01", False)],
    ]
    for task in tasks:
        assert task["nodes"] == 2
        assert {r["disk"] for r in task["resources"]} == {200}
        assert {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "RAY_AUTH_TOKEN"} == {
            *task["secrets"]
        }
        assert task["envs"]["OUT"] == "s3://YOUR_BUCKET/small"
        assert yaml.safe_load(task["envs"]["SPEC"])["gpus"] == ["A40", "A100-80GB-SXM"]
        assert "constraints.txt" in task["setup"]


@pytest.mark.parametrize(("rank", "key"), [("0", "cpu"), ("1", "cpu"), ("0", "A40")])
def test_a_node_starts_ray_by_its_check_and_the_first_one_sweeps(
    rank: str, key: str, tmp_path: Path
) -> None:
    """The task runs as on its nodes, with a `ray` that logs its calls; a refused node has none."""
    text = deployment_on(key, request=BY_SKYPILOT).text
    task = yaml.safe_load(text)
    programs = tmp_path / "finetune-cost-env" / "bin"
    programs.mkdir(parents=True)
    (programs / "ray").write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/ray-calls\n'
        'case "$*" in *--head*) exec sleep 60 ;; esac\n',
        encoding="utf-8",
    )
    (programs / "python").write_text(
        f'#!/bin/sh\n[ "$3" = join-check ] && cd {ROOT} && exec {sys.executable} "$@"\n'
        f'echo "$RAY_ADDRESS" "$@" > {tmp_path}/swept\n',
        encoding="utf-8",
    )
    for program in programs.iterdir():
        program.chmod(0o755)
    node = {
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
        "SKYPILOT_NODE_RANK": rank,
        "HOME": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
        "PATH": os.environ["PATH"],
    }
    ended = subprocess.run(
        ["bash", "-c", task["run"]],
        env=node | task["envs"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    calls, swept = tmp_path / "ray-calls", tmp_path / "swept"
    if key != "cpu":
        assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
        assert not calls.exists()
        return
    assert ended.returncode == 0, ended.stderr
    starts = [line for line in calls.read_text().splitlines() if line.startswith("start ")]
    (start,) = starts
    assert ' --resources={"cpu": 1} --num-gpus=0 ' in start
    assert swept.exists() is (rank == "0")
    if rank == "0":
        assert "start --head --port=6399 " in start
        words = "127.0.0.1:6399 -m orchestrator sweep sweep.yaml --out s3://YOUR_BUCKET/small"
        assert swept.read_text().strip() == words
        assert (tmp_path / "sweep.yaml").read_text() == task["envs"]["SPEC"]
    else:
        assert start.startswith("start --address=127.0.0.1:6399 ")
