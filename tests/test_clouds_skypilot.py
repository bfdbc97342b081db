"""Tasks by which SkyPilot rents nodes, starts Ray on them and sweeps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from builders.clusters import CATALOG, ROOT, deployment_on, yaml_documents
from fakes.skypilot import read_by_skypilot
from ray._private.label_utils import parse_node_labels_string

from orchestrator.clouds.deployment_request import DeployError, DeploymentRequest
from orchestrator.clouds.node_types import Devices
from orchestrator.clouds.skypilot import places
from orchestrator.clouds.skypilot_node import labels_text
from orchestrator.planning.cluster_resources import Node
from orchestrator.planning.node_pricing import NodeRental
from orchestrator.request import OptionError

BY_SKYPILOT = DeploymentRequest("skypilot", nodes_each=2)
# A SkyPilot that rents on a cloud finds its instances in a catalog, which is else downloaded.
INSTANCES = {
    "runpod": "1x_A40_SECURE,A40,1,9,48,,0.4,,CA,CA",
    "verda": "1A100.22V,A100-80GB,1,22,120,,1.3,0.5,FIN-01,FIN-01",
}


def test_the_cheapest_offer_of_one_gpu_comes_first() -> None:
    """Spot and on demand of all its clouds in one order; instances of several GPUs are left out."""
    found = places(Devices("H100-SXM"), CATALOG, spot=None)
    prices = [place.offer.usd_per_hour for place in found]
    assert prices == sorted(prices)
    assert {place.offer.gpus_per_instance for place in found} == {1}
    assert {True, False} == {place.is_spot for place in found}
    assert len({place.infra.partition("/")[0] for place in found}) >= 5
    assert not any(place.is_spot for place in places(Devices("H100-SXM"), CATALOG, spot=False))
    assert places(Devices("MI300X"), CATALOG, spot=True) == []
    offers = [(place.offer.provider, place.instance, place.is_spot) for place in found]
    assert len(set(offers)) == len(offers) == 8  # none in a second region
    regions = [place.infra for place in places(Devices("A100-40GB-SXM"), CATALOG, spot=True)]
    assert regions == ["gcp/europe-west4", "gcp/us-central1"]  # there is room for both
    together = places(Devices("H100-SXM", 4), CATALOG, spot=None)
    assert {place.offer.gpus_per_instance for place in together} == {4, 8}


def test_a_cloud_whose_driver_is_too_old_for_pytorch_is_left_out_by_name() -> None:
    """SkyPilot's image for CUDO has driver 535, so no node of it could join."""
    assert any(offer.provider == "cudo" for offer in CATALOG.offers("A40"))
    made = deployment_on("A40", "L4", request=BY_SKYPILOT)
    assert [line.partition(":")[0] for line in made.left_out] == ["cudo"]
    assert "cudo" not in yaml.safe_load(made.text.split("\n---\n")[1])["envs"]["OFFERS"]


def test_named_providers_are_the_only_ones() -> None:
    """The command in the file names them, too; other ways of renting have no such option."""
    request = DeploymentRequest("skypilot", providers=("aws", "gcp"))
    made = deployment_on("L4", request=request)
    offers = next(d for d in yaml_documents(made.text) if "envs" in d)["envs"]["OFFERS"]
    assert {line.split()[1] for line in made.bill if line.startswith("  L4")} == {"aws", "gcp"}
    assert "aws" in offers
    assert "runpod" not in offers
    assert "--providers aws,gcp" in made.text.splitlines()[0]
    with pytest.raises(OptionError, match="no offer is of provider 'awz': did you mean 'aws'"):
        deployment_on("L4", request=DeploymentRequest("skypilot", providers=("awz",)))
    with pytest.raises(DeployError, match="--providers needs --provider skypilot"):
        deployment_on("L4", request=DeploymentRequest("aws", providers=("aws",)))


@pytest.mark.trainers
def test_skypilot_reads_a_task_for_each_gpu(tmp_path: Path) -> None:
    """Each has the offers, the specification and the nodes, and asks for its secrets."""
    path = tmp_path / "tasks.yaml"
    keys = ("A40", "A100-80GB-SXM")
    made = deployment_on(*keys, request=BY_SKYPILOT)
    path.write_text(made.text, encoding="utf-8")
    tasks = read_by_skypilot(path, tmp_path, INSTANCES)
    assert [task["name"] for task in tasks] == ["finetune-cost-a40", "finetune-cost-a100-80gb-sxm"]
    asked = [places(Devices(key), CATALOG, spot=None) for key in keys]
    assert {place.infra for place in asked[1]} >= {"verda/FIN-01", "gcp/us-east5"}
    rented = [
        [("/".join(filter(None, (r["cloud"], r["region"]))), r["spot"]) for r in task["resources"]]
        for task in tasks
    ]
    assert rented == [[(place.infra, place.is_spot) for place in of_gpu] for of_gpu in asked]
    for task in tasks:
        assert task["nodes"] == 2
        assert {r["disk"] for r in task["resources"]} == {200}
        assert {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "RAY_AUTH_TOKEN"} == {
            *task["secrets"]
        }
        assert task["envs"]["OUT"] == "s3://YOUR_BUCKET/small"
        assert yaml.safe_load(task["envs"]["SPEC"])["gpus"] == ["A40", "A100-80GB-SXM"]
        assert "constraints.txt" in task["setup"]


@pytest.mark.parametrize(
    ("key", "cloud", "region", "labels"),
    [
        ("A40", "RunPod", "CA", "runpod 1x_A40_SECURE on-demand"),
        ("A100-80GB-SXM", "Verda", "FIN-01", "verda 1A100.22V FIN-01 on-demand"),  # or spot
        ("A40", "Verda", "FIN-01", ""),
        ("A40", None, None, ""),
    ],
)
def test_a_node_has_the_labels_of_the_offer_that_was_rented(
    key: str, cloud: str | None, region: str | None, labels: str
) -> None:
    """Ray takes them, and the sweep's price of the node is that of the offer."""
    task = yaml.safe_load(deployment_on(key, request=BY_SKYPILOT).text)
    info = {} if cloud is None else {"cluster_name": "c", "cloud": cloud, "region": region}
    text = labels_text(task["envs"] | {"SKYPILOT_CLUSTER_INFO": json.dumps(info)})
    read = parse_node_labels_string(text)
    assert list(read.values()) == labels.split()
    rental = NodeRental.of(Node({}, None, "here", labels=read))
    offer = None if rental is None else rental.nearest(CATALOG.offers(key))
    assert (offer is None) == (labels == "")
    if offer is not None:
        assert {offer.provider, offer.instance, offer.market} <= {*labels.split()}


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
        f'#!/bin/sh\ncase "$*" in *join-check*|*skypilot_node*) cd {ROOT} && exec {sys.executable} '
        '"$@" ;; esac\n'
        f"until grep -q head {tmp_path}/ray-calls; do sleep 0.1; done\n"  # it starts beside
        f'echo "$RAY_ADDRESS" "$@" > {tmp_path}/swept\n',
        encoding="utf-8",
    )
    for program in programs.iterdir():
        program.chmod(0o755)
    node = {
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
        "SKYPILOT_NODE_RANK": rank,
        "SKYPILOT_CLUSTER_INFO": '{"cluster_name": "c", "cloud": "Verda", "region": "FIN-01"}',
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
    assert ' --resources={"cpu": 1} --labels= --num-gpus=0 ' in start  # no offer of it is Verda's
    assert swept.exists() is (rank == "0")
    if rank == "0":
        assert "start --head --port=6399 " in start
        words = "127.0.0.1:6399 -m orchestrator sweep sweep.yaml --out s3://YOUR_BUCKET/small"
        assert swept.read_text().strip() == words
        assert (tmp_path / "sweep.yaml").read_text() == task["envs"]["SPEC"]
    else:
        assert start.startswith("start --address=127.0.0.1:6399 ")
