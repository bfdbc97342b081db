"""Cluster files as Ray's launcher and KubeRay read them."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from builders.clusters import (
    CATALOG,
    ROOT,
    deployment_of,
    deployment_on,
    kuberay_config,
    ray_config,
    shipped,
    yaml_documents,
)

from orchestrator.clouds.deployment_request import DeploymentRequest
from orchestrator.clouds.node_types import instances
from orchestrator.planning.cluster_resources import ClusterResources, Node
from orchestrator.spec.spec_file import parse_spec

LAUNCHED = ("aws.yaml", "gcp.yaml", "azure.yaml", "local.yaml")


@pytest.mark.parametrize("file", ["aws.yaml", "gcp.yaml", "azure.yaml"])
def test_a_type_of_worker_is_a_gpu_by_its_key(file: str) -> None:
    """A type has one GPU, its key and the instance's cores; the head has no GPU."""
    config = ray_config(shipped(file))
    provider = config["provider"]["type"]
    types = config["available_node_types"]
    head = types.pop(config["head_node_type"])["resources"]
    smallest = {i.gpu: i for i in reversed(instances(provider))}
    keys = set()
    for name, node in types.items():
        key = next(k for k in node["resources"] if k not in {"CPU", "GPU"})
        assert name.startswith(CATALOG.gpu(key).key.lower())
        assert node["resources"] == {"CPU": smallest[key].vcpus, "GPU": 1, key: 1}
        assert node["min_workers"] == 0
        assert node["worker_setup_commands"] == [f"echo {key} > ~/gpu-key"]
        keys.add(key)
    assert head == {"CPU": 1} | {f"scales-to-{key}": 1 for key in keys}
    assert config["max_workers"] == len(keys)
    assert config["idle_timeout_minutes"] == 5
    assert not config["provider"]["cache_stopped_nodes"]


@pytest.mark.parametrize(
    ("region", "zone"),
    [("us-east1", "us-east1-b"), ("europe-west1", "europe-west1-b"), ("us-west1", "us-west1-a")],
)
def test_nodes_on_google_cloud_start_in_a_zone_that_exists(region: str, zone: str) -> None:
    """Two regions have no zone a."""
    request = DeploymentRequest("gcp", region=region)
    assert f"availability_zone: {zone}  #" in deployment_on("L4", request=request).text


def test_disks_on_google_cloud_are_of_a_type_that_every_machine_takes() -> None:
    """g2 and a3 refuse pd-standard, which is the default."""
    config = ray_config(shipped("gcp.yaml"))
    types = {
        node["node_config"]["disks"][0]["initializeParams"].get("diskType")
        for node in config["available_node_types"].values()
    }
    zone = config["provider"]["availability_zone"]
    assert types == {f"zones/{zone}/diskTypes/pd-balanced"}


@pytest.mark.parametrize("file", ["aws.yaml", "gcp.yaml", "azure.yaml"])
def test_containers_of_workers_get_their_gpus(file: str) -> None:
    """NVIDIA's runtime adds GPUs only where this variable is set, and our image does not set it."""
    docker = ray_config(shipped(file))["docker"]
    assert "--env NVIDIA_VISIBLE_DEVICES=all" in docker["worker_run_options"]


def test_a_sweep_plans_for_nodes_that_are_not_there_yet() -> None:
    """The head lists them; a GPU without a node type in the file has no resources."""
    config = ray_config(
        deployment_on("L4", "L40S", request=DeploymentRequest("aws", nodes_each=3)).text
    )
    head = config["available_node_types"]["head"]["resources"]
    cluster = ClusterResources((Node({k: float(v) for k, v in head.items()}),))
    assert cluster.trial_resources(CATALOG.gpu("L4")) == {"CPU": 1, "L4": 1, "GPU": 1}
    assert cluster.trial_resources(CATALOG.gpu("A40")) is None


@pytest.mark.parametrize("file", LAUNCHED)
def test_nodes_authenticate_and_the_dashboard_stays_inside(file: str) -> None:
    """The token is a file of the launcher; every command of Ray uses it."""
    config = ray_config(shipped(file))
    assert config["file_mounts"].get("~/.ray/auth_token") == str(Path("~/.ray/auth_token"))
    commands = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    assert all("RAY_AUTH_MODE=token" in command.split()[1] for command in commands)
    assert "--dashboard-host=127.0.0.1" in config["head_start_ray_commands"][-1]


@pytest.mark.parametrize("file", LAUNCHED)
def test_a_worker_joins_by_its_check_alone(file: str) -> None:
    """Ray starts only with the resources that the check printed."""
    joins = ray_config(shipped(file))["worker_start_ray_commands"][-1]
    check, _, start = joins.partition(" && ")
    assert re.search(r'\$\(.* join-check .+\)"$', check)
    assert start.startswith("ray start ")
    waits = f"(setsid python -m orchestrator node-notice {file.removesuffix('.yaml')} < /dev/null"
    notice = "" if file == "local.yaml" else f" && {waits} > ~/node-notice.log 2>&1 &)"
    assert joins.endswith(f'--resources="$resources"{notice}')


@pytest.mark.parametrize(("key", "joins"), [("cpu", True), ("A40", False)])
def test_a_refused_node_starts_no_ray(key: str, joins: bool, tmp_path: Path) -> None:  # noqa: FBT001
    """The commands run as on a node, whose key is in its home, with a `ray` that logs its calls."""
    (tmp_path / "gpu-key").write_text(f"{key}\n", encoding="utf-8")
    for name, log in (("ray", "started"), ("setsid", "waits")):
        command = tmp_path / name
        script = f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/{log}\n'
        command.write_text(script, encoding="utf-8")
        command.chmod(0o755)
    join = ray_config(shipped("aws.yaml"))["worker_start_ray_commands"][-1]
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    node = {"HOME": str(tmp_path), "PATH": path, "RAY_HEAD_IP": "h", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        ["bash", "-c", join], env=node, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (ended.returncode == 0) is joins
    started = tmp_path / "started"
    assert started.exists() is joins
    if joins:
        assert started.read_text(encoding="utf-8").splitlines() == [
            *("start", "--address=h:6379", '--resources={"cpu": 1}'),
        ]
        deadline = time.monotonic() + 20
        while not (waits := tmp_path / "waits").exists() or not waits.read_text(encoding="utf-8"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        words = ["python", "-m", "orchestrator", "node-notice", "aws"]
        assert waits.read_text(encoding="utf-8").split() == words
    else:
        assert not (tmp_path / "waits").exists()
        assert ended.stderr.count("\n") == 1


def test_google_gets_networks_by_name() -> None:
    """Every node names its network, so that Ray takes no other; an idle spot node is deleted."""
    types = ray_config(shipped("gcp.yaml"))["available_node_types"]
    for name, node in types.items():
        (network,) = node["node_config"]["networkInterfaces"]
        assert network["subnetwork"].endswith("/subnetworks/finetune-cost")
        assert re.fullmatch(r"[a-z0-9-]+", name)  # it becomes a label, and those are so
    scheduling = types["h100-sxm-spot"]["node_config"]["scheduling"]
    assert scheduling["provisioningModel"] == "SPOT"
    assert scheduling["instanceTerminationAction"] == "DELETE"


def test_azures_nodes_have_no_public_address() -> None:
    """Ray's own rule admits ssh from anywhere to every public address."""
    provider = ray_config(shipped("azure.yaml"))["provider"]
    assert provider["use_internal_ips"]
    assert not provider["use_external_head_ip"]


def test_hosts_of_ones_own_all_join() -> None:
    """Existing hosts all join, each with the GPU that it turns out to have."""
    text = deployment_of(
        "paper", DeploymentRequest("local", hosts=("10.0.0.1", "a40.example", "10.0.0.3"))
    ).text
    config = ray_config(text)
    assert config["provider"]["head_ip"] == "10.0.0.1"
    assert config["provider"]["worker_ips"] == ["a40.example", "10.0.0.3"]
    (node,) = config["available_node_types"].values()
    assert node["min_workers"] == node["max_workers"] == config["max_workers"] == 2
    keys = "A40,A100-40GB-SXM,A100-80GB-SXM,H100-SXM"
    assert f"join-check --head $RAY_HEAD_IP {keys})" in config["worker_start_ray_commands"][-1]


@pytest.mark.parametrize("file", ["kuberay-cluster.yaml", "kuberay-job.yaml"])
def test_kubernetes_groups_are_gpus_by_their_keys(file: str) -> None:
    """KubeRay's autoscaler counts them so; each pod is checked before Ray starts in it."""
    config = kuberay_config(shipped(file))
    types = config["available_node_types"]
    head = types.pop("headgroup")["resources"]
    resources = {
        name: {k: v for k, v in node["resources"].items() if k != "memory"}
        for name, node in types.items()
    }
    keys = ("A40", "A100-40GB-SXM", "A100-80GB-SXM", "H100-SXM")
    assert resources == {key.lower(): {"CPU": 4, "GPU": 1, key: 1} for key in keys}
    assert {k: v for k, v in head.items() if k != "memory"} == {"CPU": 1} | {
        f"scales-to-{key}": 1 for key in keys
    }
    assert {node["min_workers"] for node in types.values()} == {0}
    assert config["idle_timeout_minutes"] == 5
    outer = yaml_documents(shipped(file))[-1]["spec"]
    spec = outer.get("rayClusterSpec", outer)
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["headGroupSpec"]["serviceType"] == "ClusterIP"
    (driver,) = spec["headGroupSpec"]["template"]["spec"]["containers"]
    assert driver["envFrom"] == [{"secretRef": {"name": "finetune-cost-s3", "optional": True}}]
    for group, key in zip(spec["workerGroupSpecs"], keys, strict=True):
        pod = group["template"]["spec"]
        clock = ["--head", "$(FQ_RAY_IP)"]
        assert pod["initContainers"][0]["command"][-4:] == ["join-check", *clock, key]
        assert "finetune-cost-s3" not in str(pod)  # a bucket's keys stay with the driver
        assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
        affinity = pod["affinity"]["nodeAffinity"]
        (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        products = [name.replace(" ", "-") for name in CATALOG.gpu(key).device_names]
        assert term["matchExpressions"][0]["values"] == products


def test_a_kubernetes_job_brings_its_specification_and_takes_its_cluster_down() -> None:
    """The run is written to a volume that stays."""
    claim, policy, spec, job = yaml_documents(shipped("kuberay-job.yaml"))
    assert parse_spec(spec["data"]["sweep.yaml"], "x").name == "paper"
    assert job["spec"]["shutdownAfterJobFinishes"]
    assert job["spec"]["entrypoint"].endswith(" --out /data/runs/paper")
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert {v["mountPath"] for v in head["containers"][0]["volumeMounts"]} == {
        *("/data/runs", "/spec"),
    }
    assert head["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_a_cpu_is_a_node_of_its_own_without_a_gpu() -> None:
    """It runs the image for CPUs, and only its key is checked."""
    types = ray_config(
        deployment_on("cpu", "L4", request=DeploymentRequest("aws", spot=False)).text
    )["available_node_types"]
    node = types["cpu-on-demand"]
    assert node["resources"] == {"CPU": 2, "cpu": 1}
    assert node["docker"]["worker_image"].endswith(":cpu")
    group = kuberay_config(deployment_on("cpu", request=DeploymentRequest("kuberay")).text)[
        "available_node_types"
    ]["cpu"]
    assert "GPU" not in group["resources"]
