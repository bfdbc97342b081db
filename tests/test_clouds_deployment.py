"""Clusters' files: as Ray's own loader reads them, and closed to the world."""

import json
import os
import re
import subprocess
import sys
import time
from functools import cache as cached
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
import yaml
from botocore.exceptions import ClientError
from moto import mock_aws
from moto.core import set_initial_no_auth_action_count
from ray.autoscaler._private.aws.config import _get_subnets_or_die, bootstrap_aws
from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
from ray.autoscaler._private.aws.utils import client_cache, resource_cache
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr,
)
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil

from gpu_catalog.catalog import load_catalog
from orchestrator.cli.main import main
from orchestrator.clouds.deployment import DeployError, Deployment, deployment
from orchestrator.clouds.deployment_request import CLOUDS, DeploymentRequest
from orchestrator.clouds.node_types import HEADS, instances
from orchestrator.planning.cluster_resources import ClusterResources, Node
from orchestrator.spec.spec_file import parse_spec, shipped_specs

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
ROOT = DEPLOY.parent
CATALOG = load_catalog()
SHIPPED = {
    "aws.yaml": ("deploy/sweep.yaml", DeploymentRequest("aws")),
    "gcp.yaml": ("deploy/sweep.yaml", DeploymentRequest("gcp")),
    "azure.yaml": ("deploy/sweep.yaml", DeploymentRequest("azure")),
    "local.yaml": ("paper", DeploymentRequest("local")),
    "kuberay-cluster.yaml": ("paper", DeploymentRequest("kuberay")),
    "kuberay-job.yaml": ("paper", DeploymentRequest("kuberay", job=True)),
}
LAUNCHED = ("aws.yaml", "gcp.yaml", "azure.yaml", "local.yaml")


def made(name: str, asked: DeploymentRequest) -> Deployment:
    """What the command makes of a specification of this project, by the shipped prices."""
    shipped = shipped_specs()
    text = shipped[name] if name in shipped else (ROOT / name).read_text(encoding="utf-8")
    spec = parse_spec(text, name)
    return deployment(asked, spec, text, name, spec.merged_catalog())


def spec_on(*gpus: str, more: str = "") -> Any:
    """A specification that measures on these."""
    text = (
        f"name: small\ngpus: [{', '.join(gpus)}]\ncells:\n  - models: [llama-tiny]\n"
        "    recipes: [{method: full, precision: fp32}]\n    seq_lens: [32]\n"
        f"workload: {{examples: 100, epochs: 1}}\n{more}"
    )
    return parse_spec(text, "small.yaml"), text


def made_on(*gpus: str, asked: DeploymentRequest, more: str = "") -> Deployment:
    """A cluster for these GPUs."""
    spec, text = spec_on(*gpus, more=more)
    return deployment(asked, spec, text, "small.yaml", spec.merged_catalog())


def documents(text: str) -> list[dict[str, Any]]:
    """Of a YAML."""
    return list(yaml.safe_load_all(text))


@cached
def shipped(file: str) -> str:
    """The text of a file in deploy/."""
    return (DEPLOY / file).read_text(encoding="utf-8")


def loaded(text: str) -> dict[str, Any]:
    """As `ray up` reads it: with Ray's defaults, by Ray's schema."""
    config: dict[str, Any] = prepare_config(yaml.safe_load(text))
    validate_config(config)
    return config


def ray_cluster(text: str) -> dict[str, Any]:
    """As KubeRay's autoscaler reads a manifest, a cluster's or a job's."""
    found = next(d for d in documents(text) if d["kind"] in {"RayCluster", "RayJob"})
    spec = found["spec"].get("rayClusterSpec", found["spec"])
    made_of = {"metadata": {"name": "finetune-cost", "namespace": "default"}, "spec": spec}
    config: dict[str, Any] = _derive_autoscaling_config_from_ray_cr(made_of)
    return config


def without_minutes(text: str) -> str:
    """Without what the sweep is assumed to take, which is for others to say."""
    return re.sub(r"#   the sweep: .*?\)\n#\n", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("file", SHIPPED)
def test_a_shipped_file_is_what_the_command_makes(file: str) -> None:
    """After a change of templates or prices: run the command in its first line, with --out."""
    name, asked = SHIPPED[file]
    assert without_minutes(shipped(file)) == without_minutes(made(name, asked).text)
    first = shipped(file).splitlines()[0]
    assert first == f"# Made by: python -m orchestrator deploy {name} {asked.words}"


@pytest.mark.parametrize("file", ["aws.yaml", "gcp.yaml", "azure.yaml"])
def test_a_type_of_worker_is_a_gpu_by_its_key(file: str) -> None:
    """One GPU, the catalog's key, the instance's cores; none at first; a head without any."""
    config = loaded(shipped(file))
    provider = config["provider"]["type"]
    types = config["available_node_types"]
    head = types.pop(config["head_node_type"])["resources"]
    known = {each.gpu: each for each in reversed(instances(provider))}  # the smallest
    seen = set()
    for name, node in types.items():
        key = next(k for k in node["resources"] if k not in {"CPU", "GPU"})
        assert name.startswith(CATALOG.gpu(key).key.lower())
        assert node["resources"] == {"CPU": known[key].vcpus, "GPU": 1, key: 1}
        assert node["min_workers"] == 0
        assert node["worker_setup_commands"] == [f"echo {key} > ~/gpu-key"]
        seen.add(key)
    assert head == {"CPU": 1} | {f"scales-to-{key}": 1 for key in seen}
    assert config["max_workers"] == len(seen)
    assert config["idle_timeout_minutes"] == 5
    assert not config["provider"]["cache_stopped_nodes"]


def test_a_sweep_plans_for_nodes_that_are_not_there_yet() -> None:
    """By what the head says; what the file has no type for is skipped at once."""
    config = loaded(made_on("L4", "L40S", asked=DeploymentRequest("aws", nodes_each=3)).text)
    head = config["available_node_types"]["head"]["resources"]
    cluster = ClusterResources((Node({k: float(v) for k, v in head.items()}),))
    assert cluster.trial_resources(CATALOG.gpu("L4")) == {"CPU": 1, "L4": 1, "GPU": 1}
    assert cluster.trial_resources(CATALOG.gpu("A40")) is None


def test_the_single_gpus_of_each_cloud_are_there() -> None:
    """From g5 and g6e to p5.4xlarge; A2 and A3; NC of Azure."""
    named = {
        file: set(re.findall(r"(?:InstanceType|machineType|vmSize): (\S+)", shipped(file)))
        for file in ("aws.yaml", "gcp.yaml", "azure.yaml")
    }
    assert named["aws.yaml"] == {
        *("g5.xlarge", "g6.xlarge", "g6e.xlarge", "p5.4xlarge", HEADS["aws"]),
    }
    assert named["gcp.yaml"] == {
        *("a2-highgpu-1g", "a2-ultragpu-1g", "a3-highgpu-1g", "g2-standard-4", HEADS["gcp"]),
    }
    assert named["azure.yaml"] == {
        *("Standard_NC24ads_A100_v4", "Standard_NC40ads_H100_v5", HEADS["azure"]),
    }


def launched_for(key: str, text: str, *, without_spot: bool = False) -> str:
    """The node type that Ray's own scheduler starts for a trial on a GPU."""
    config = AutoscalingConfig(loaded(text), skip_content_hash=True)
    types = config.get_node_type_configs()
    assert types is not None
    spent = {name: 0.0 for name in types if without_spot and name.endswith("-spot")}
    trial = {"CPU": 1.0, "GPU": 1.0, key: 1.0}
    request = SchedulingRequest(
        disable_launch_config_check=True,
        node_type_configs=types,
        max_num_nodes=config.get_max_num_nodes(),
        resource_requests=ResourceRequestUtil.group_by_count([ResourceRequestUtil.make(trial)]),
        cloud_resource_availabilities=spent,
        recoverable_resource_availabilities=spent,
    )
    (launch,) = ResourceDemandScheduler().schedule(request).to_launch
    return str(launch.instance_type)


@pytest.mark.parametrize("file", ["aws.yaml", "gcp.yaml", "azure.yaml"])
def test_spot_comes_first_and_on_demand_in_its_place(file: str) -> None:
    """By Ray's own scheduler: another type once the provider had no spot one."""
    text = shipped(file)
    types = loaded(text)["available_node_types"].keys() - {"head"}
    alone = {"h100-sxm-spot"} if file == "gcp.yaml" else set()  # A3 of one GPU is spot alone
    spots = {name for name in types if name.endswith("-spot")}
    assert {name.replace("-spot", "-on-demand") for name in spots - alone} == types - spots
    for spot in spots:
        key = next(gpu.key for gpu in CATALOG.gpus if spot == f"{gpu.key.lower()}-spot")
        assert launched_for(key, text) == spot
        if spot not in alone:
            instead = launched_for(key, text, without_spot=True)
            assert instead == spot.replace("-spot", "-on-demand")


@pytest.mark.parametrize("file", LAUNCHED)
def test_nodes_show_a_token_and_the_dashboard_stays_inside(file: str) -> None:
    """The token is a file of the launcher's; every command of Ray's goes by it."""
    config = loaded(shipped(file))
    assert config["file_mounts"].get("~/.ray/auth_token") == str(Path("~/.ray/auth_token"))
    commands = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    assert all(command.startswith("export RAY_AUTH_MODE=token") for command in commands)
    assert "--dashboard-host=127.0.0.1" in config["head_start_ray_commands"][-1]


@pytest.mark.parametrize("file", LAUNCHED)
def test_a_worker_joins_by_its_check_alone(file: str) -> None:
    """Ray starts only with the resources that the check has printed."""
    joins = loaded(shipped(file))["worker_start_ray_commands"][-1]
    assert re.search(r'resources="\$\(python -m orchestrator join-check .+\)" && ray start', joins)
    waits = f"(setsid python -m orchestrator node-notice {file.removesuffix('.yaml')} < /dev/null"
    notice = "" if file == "local.yaml" else f" && {waits} > ~/node-notice.log 2>&1 &)"
    assert joins.endswith(f'--resources="$resources"{notice}')


@pytest.mark.parametrize(("key", "joins"), [("cpu", True), ("A40", False)])
def test_a_refused_node_starts_no_ray(key: str, joins: bool, tmp_path: Path) -> None:  # noqa: FBT001
    """The commands as a node runs them, its key in its home, with a `ray` that tells on itself."""
    (tmp_path / "gpu-key").write_text(f"{key}\n", encoding="utf-8")
    for name, tells in (("ray", "started"), ("setsid", "waits")):
        command = tmp_path / name
        said = f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/{tells}\n'
        command.write_text(said, encoding="utf-8")
        command.chmod(0o755)
    join = loaded(shipped("aws.yaml"))["worker_start_ray_commands"][-1]
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


@pytest.mark.parametrize("file", [*SHIPPED, "sweep.yaml"])
def test_no_file_holds_a_secret_or_opens_a_port(file: str) -> None:
    """Neither a key, nor a rule that lets everybody in, nor a service that shows itself outside."""
    text = shipped(file)
    assert not re.search(r"0\.0\.0\.0|::/0|LoadBalancer|NodePort|hostPort|hostNetwork", text)
    assert not re.search(r"AKIA|BEGIN [A-Z ]*PRIVATE|(secret|password|token): *['\"]?\w{8}", text)
    assert not re.search(r"\b[0-9a-f]{32,}\b", text)


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """An account of Amazon's that moto makes up, with the group that deploy/README.md makes."""
    monkeypatch.setenv("HOME", str(tmp_path))  # Ray writes its key for ssh there
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "made-up")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    for cache in (client_cache, resource_cache, _get_subnets_or_die):
        cache.cache_clear()
    with mock_aws():
        iam = boto3.client("iam")
        iam.create_instance_profile(InstanceProfileName="finetune-cost-head")
        ec2 = boto3.client("ec2")
        group = ec2.create_security_group(GroupName="finetune-cost", Description="x")["GroupId"]
        ec2.authorize_security_group_ingress(
            GroupId=group,
            IpPermissions=[{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}],
        )
        yield SimpleNamespace(ec2=ec2, iam=iam, group=group)


@pytest.mark.filterwarnings("ignore")
def test_ray_starts_nodes_on_aws_and_opens_nothing(aws: Any) -> None:
    """By its own provider: in our group alone, no role made, no rule added; spot where said."""
    config = bootstrap_aws(loaded(shipped("aws.yaml").replace("YOUR_SECURITY_GROUP", aws.group)))
    provider = AWSNodeProvider(config["provider"], config["cluster_name"])
    for name in ("head", "l40s-spot", "h100-sxm-on-demand"):
        node = config["available_node_types"][name]["node_config"]
        provider.create_node(dict(node), {"ray-node-type": "worker"}, 1)
    found = {
        i["InstanceType"]: i
        for r in aws.ec2.describe_instances()["Reservations"]
        for i in r["Instances"]
    }
    lifecycles = {name: i.get("InstanceLifecycle") for name, i in found.items()}
    assert lifecycles == {"m8a.large": None, "g6e.xlarge": "spot", "p5.4xlarge": None}
    for instance in found.values():
        assert [g["GroupId"] for g in instance["SecurityGroups"]] == [aws.group]
    assert "IamInstanceProfile" not in found["p5.4xlarge"]
    assert aws.iam.list_roles()["Roles"] == []
    groups = aws.ec2.describe_security_groups()["SecurityGroups"]
    assert "0.0.0.0/0" not in json.dumps([group["IpPermissions"] for group in groups])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("policy", "name"), [("launcher-policy.json", "head"), ("head-policy.json", "l40s-spot")]
)
def test_a_policy_names_every_action_that_ray_takes(aws: Any, policy: str, name: str) -> None:
    """To start, tag and end a node; moto holds Ray to the actions, and knows no conditions."""
    config = loaded(shipped("aws.yaml").replace("YOUR_SECURITY_GROUP", aws.group))
    subnets = [subnet["SubnetId"] for subnet in aws.ec2.describe_subnets()["Subnets"]]
    config["provider"]["aws_credentials"] = credentials_under(aws.iam, policy)

    @set_initial_no_auth_action_count(0)
    def start_and_end() -> None:
        known = config
        if name == "head":  # which `ray up` starts, and first asks what its types have
            known = bootstrap_aws(config)
            AWSNodeProvider.fillout_available_node_types_resources(known)
        node = dict(known["available_node_types"][name]["node_config"])
        provider = AWSNodeProvider(known["provider"], known["cluster_name"])
        (made_id,) = provider.create_node({"SubnetIds": subnets} | node, {"ray-node-type": "x"}, 1)
        assert provider.non_terminated_nodes({}) == [made_id]
        provider.set_node_tags(made_id, {"ray-node-status": "x"})
        provider.terminate_nodes([made_id])
        with pytest.raises(ClientError, match="not authorized"):
            provider.ec2.meta.client.create_security_group(GroupName="x", Description="x")

    start_and_end()


def credentials_under(iam: Any, policy: str) -> dict[str, str]:
    """Of a user and a role that may do what a policy's actions say, on whatever."""
    role = "finetune-cost-head"
    trust = (DEPLOY / "aws/head-trust.json").read_text(encoding="utf-8")
    iam.create_role(RoleName=role, AssumeRolePolicyDocument=trust)
    document = json.loads((DEPLOY / "aws" / policy).read_text(encoding="utf-8"))
    for statement in document["Statement"]:
        statement.pop("Condition", None)
        statement["Resource"] = "*"
    iam.create_user(UserName="x")
    iam.put_user_policy(UserName="x", PolicyName="x", PolicyDocument=json.dumps(document))
    key = iam.create_access_key(UserName="x")["AccessKey"]
    return {
        "aws_access_key_id": key["AccessKeyId"],
        "aws_secret_access_key": key["SecretAccessKey"],
    }


def test_google_is_told_of_networks_and_images_by_name() -> None:
    """Every node has its network, so that Ray takes no other; an idle spot one is deleted."""
    types = loaded(shipped("gcp.yaml"))["available_node_types"]
    for name, node in types.items():
        (network,) = node["node_config"]["networkInterfaces"]
        assert network["subnetwork"].endswith("/subnetworks/finetune-cost")
        assert re.fullmatch(r"[a-z0-9-]+", name)  # it becomes a label, and those are so
    scheduling = types["h100-sxm-spot"]["node_config"]["scheduling"]
    assert scheduling["provisioningModel"] == "SPOT"
    assert scheduling["instanceTerminationAction"] == "DELETE"


def test_azures_nodes_have_no_public_address() -> None:
    """Ray's own rule there lets everybody try ssh, on the addresses there are."""
    provider = loaded(shipped("azure.yaml"))["provider"]
    assert provider["use_internal_ips"]
    assert not provider["use_external_head_ip"]


def test_hosts_of_ones_own_all_join() -> None:
    """They are there anyway; each is whichever of the GPUs it turns out to have."""
    text = made(
        "paper", DeploymentRequest("local", hosts=("10.0.0.1", "a40.example", "10.0.0.3"))
    ).text
    config = loaded(text)
    assert config["provider"]["head_ip"] == "10.0.0.1"
    assert config["provider"]["worker_ips"] == ["a40.example", "10.0.0.3"]
    (node,) = config["available_node_types"].values()
    assert node["min_workers"] == node["max_workers"] == config["max_workers"] == 2
    keys = "A40,A100-40GB-SXM,A100-80GB-SXM,H100-SXM"
    assert f"join-check {keys})" in config["worker_start_ray_commands"][-1]


@pytest.mark.parametrize("file", ["kuberay-cluster.yaml", "kuberay-job.yaml"])
def test_kubernetes_groups_are_gpus_by_their_keys(file: str) -> None:
    """As KubeRay's autoscaler counts them; each pod is checked before Ray starts in it."""
    config = ray_cluster(shipped(file))
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
    found = documents(shipped(file))[-1]["spec"]
    spec = found.get("rayClusterSpec", found)
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["headGroupSpec"]["serviceType"] == "ClusterIP"
    (driver,) = spec["headGroupSpec"]["template"]["spec"]["containers"]
    assert driver["envFrom"] == [{"secretRef": {"name": "finetune-cost-s3", "optional": True}}]
    for group, key in zip(spec["workerGroupSpecs"], keys, strict=True):
        pod = group["template"]["spec"]
        assert pod["initContainers"][0]["command"][-2:] == ["join-check", key]
        assert "finetune-cost-s3" not in str(pod)  # a bucket's keys stay with the driver
        assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
        affinity = pod["affinity"]["nodeAffinity"]
        (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        products = [name.replace(" ", "-") for name in CATALOG.gpu(key).device_names]
        assert term["matchExpressions"][0]["values"] == products


def test_a_kubernetes_job_brings_its_specification_and_takes_its_cluster_down() -> None:
    """And writes the run where it stays."""
    claim, policy, spec, job = documents(shipped("kuberay-job.yaml"))
    assert parse_spec(spec["data"]["sweep.yaml"], "x").name == "paper"
    assert job["spec"]["shutdownAfterJobFinishes"]
    assert job["spec"]["entrypoint"].endswith("sweep /spec/sweep.yaml --out /data/runs/paper")
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert {v["mountPath"] for v in head["containers"][0]["volumeMounts"]} == {
        *("/data/runs", "/spec"),
    }
    assert head["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


@pytest.mark.parametrize("file", ["Dockerfile.cpu", "Dockerfile.cuda"])
def test_an_image_has_the_pinned_versions(file: str) -> None:
    """Everything is installed under the constraints, and what is named is what they name."""
    text = re.sub(r"\\\n", " ", shipped(file))
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines)
    for install in re.findall(r"pip install .*", text):
        assert "--constraint constraints.txt" in install
    named = re.findall(r"([A-Za-z0-9_-]+)(?:\[[a-z,]+\])?==([0-9.]+)", text)
    assert named
    assert all(pins[name] == version for name, version in named)
    assert not re.search(r"^FROM \S+:latest", text, flags=re.MULTILINE)
    kernels = [line for line in shipped("kernels.txt").splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==\S+", line) for line in kernels)


def statements() -> list[tuple[str, dict[str, Any]]]:
    """Of the policies of Amazon's."""
    return [
        (file.name, statement)
        for file in sorted((DEPLOY / "aws").glob("*.json"))
        for statement in json.loads(file.read_text(encoding="utf-8"))["Statement"]
    ]


def listed(value: str | list[str]) -> list[str]:
    """A text, or several."""
    return [value] if isinstance(value, str) else value


@pytest.mark.parametrize(
    ("file", "statement"), statements(), ids=[f"{f}-{s['Sid']}" for f, s in statements()]
)
def test_a_policy_allows_no_more_than_this_cluster(file: str, statement: dict[str, Any]) -> None:
    """No action by a star; on everything, looking alone; nodes by tag and type."""
    actions = listed(statement["Action"])
    assert not [action for action in actions if "*" in action], file
    if "*" in listed(statement.get("Resource", [])):
        assert all(action.startswith("ec2:Describe") for action in actions)
    if "ec2:TerminateInstances" in actions:
        tag = statement["Condition"]["StringEquals"]["ec2:ResourceTag/ray-cluster-name"]
        assert tag == loaded(shipped("aws.yaml"))["cluster_name"]


def test_a_policy_allows_every_instance_a_file_can_name() -> None:
    """By the patterns of the one that starts nodes."""
    starting = next(s for _, s in statements() if s["Sid"] == "StartNodesOfThisCluster")
    patterns = starting["Condition"]["StringLike"]["ec2:InstanceType"]
    tests = [re.compile(p.replace(".", r"\.").replace("*", ".*")) for p in patterns]
    for instance in instances("aws"):
        assert any(test.fullmatch(instance.name) for test in tests), instance.name


@pytest.mark.parametrize("file", ["gcp/launcher-role.json", "azure/launcher-role.json"])
def test_a_role_names_each_permission(file: str) -> None:
    """None by a star; roles are handed out by Azure's alone, within its one resource group."""
    role = json.loads((DEPLOY / file).read_text(encoding="utf-8"))
    permissions = role.get("includedPermissions", role.get("Actions"))
    assert permissions
    assert not [p for p in permissions if "*" in p]
    hands_out = ("setiampolicy", "roleassignments/write", "roledefinitions/write", "roles.create")
    granting = [p for p in permissions if p.lower().endswith((*hands_out, "roles.update"))]
    if file.startswith("gcp"):
        assert granting == []
    else:
        assert granting == ["Microsoft.Authorization/roleAssignments/write"]
        (scope,) = role["AssignableScopes"]
        assert scope.endswith("/resourceGroups/finetune-cost")


def test_instances_are_of_gpus_of_the_catalog() -> None:
    """With one GPU by Amazon's own table, where that tells."""
    for provider in CLOUDS:
        for instance in instances(provider):
            CATALOG.gpu(instance.gpu)
            for offer in CATALOG.offers(instance.gpu):
                if (offer.provider, offer.instance) == (provider, instance.name):
                    assert offer.gpus_per_instance == 1
    assert {HEADS[p] for p in CLOUDS} <= {i.name for p in CLOUDS for i in instances(p)}


def test_the_bill_is_the_dearest_that_can_be_up() -> None:
    """On demand where spot is not to be had; the sweep's own dollars are said to be assumed."""
    bill = made_on("L4", "L40S", asked=DeploymentRequest("aws", nodes_each=2)).bill
    assert "  L4: g6.xlarge spot not known there" in bill
    assert "  L40S: g6e.xlarge on-demand 1.861 (as of 2026-11-20)" in bill
    # Four nodes at most, and both kinds of L40S may be those.
    assert f"at most ${4 * 1.861 + 0.12172:.2f} an hour with 4 nodes and the head up" in bill
    assert "2 trials" in bill[-1]
    assert "assumed" in bill[-1]


def test_a_bill_with_a_price_missing_is_no_upper_bound() -> None:
    """It says what is missing, and what brings it."""
    bill = made_on("A100-40GB-SXM", "H100-SXM", asked=DeploymentRequest("gcp")).bill
    total = next(line for line in bill if line.startswith("at least $1.69 an hour"))
    assert "A100-40GB-SXM, H100-SXM, the head; 'catalog refresh' asks for them" in total
    assert "its dollars are not known" in bill[-1]


def test_the_cheapest_of_several_instances_is_taken() -> None:
    """On each market by its own price, in the region that was asked for."""
    offers = "".join(
        f"    - {{gpu: A10G, provider: aws, region: {region}, instance: {name}, market: {market},\n"
        f"       usd_per_hour: {usd}, source: x, recorded: 2026-11-20}}\n"
        for region, name, market, usd in (
            ("eu-west-1", "g5.xlarge", "on-demand", 1.1),
            ("eu-west-1", "g5.xlarge", "spot", 0.5),
            ("eu-west-1", "g5.2xlarge", "spot", 0.4),
            ("eu-west-1", "g5.48xlarge", "spot", 0.1),
        )
    )
    made_of = made_on(
        "A10G",
        asked=DeploymentRequest("aws", region="eu-west-1"),
        more=f"catalog:\n  offers:\n{offers}",
    )
    types = loaded(made_of.text)["available_node_types"]
    assert types["a10g-spot"]["node_config"]["InstanceType"] == "g5.2xlarge"
    assert types["a10g-on-demand"]["node_config"]["InstanceType"] == "g5.xlarge"
    assert yaml.safe_load(made_of.text)["provider"]["region"] == "eu-west-1"
    assert launched_for("A10G", made_of.text) == "a10g-spot"  # the larger one


@pytest.mark.parametrize(("spot", "markets"), [(True, {"spot"}), (False, {"on-demand"})])
def test_one_market_alone_may_be_asked_for(spot: bool, markets: set[str]) -> None:  # noqa: FBT001
    """Spot without its stand-in, or none."""
    types = loaded(made_on("L4", asked=DeploymentRequest("aws", spot=spot)).text)[
        "available_node_types"
    ]
    assert {name.removeprefix("l4-") for name in types if name != "head"} == markets


def test_a_cpu_is_a_node_of_its_own_without_a_gpu() -> None:
    """On the CPU's image, and checked for nothing but its key."""
    types = loaded(made_on("cpu", "L4", asked=DeploymentRequest("aws", spot=False)).text)[
        "available_node_types"
    ]
    node = types["cpu-on-demand"]
    assert node["resources"] == {"CPU": 2, "cpu": 1}
    assert node["docker"]["worker_image"].endswith(":cpu")
    group = ray_cluster(made_on("cpu", asked=DeploymentRequest("kuberay")).text)[
        "available_node_types"
    ]["cpu"]
    assert "GPU" not in group["resources"]


def test_what_a_provider_does_not_have_is_told_in_a_line_each() -> None:
    """Not at all, only several to an instance, or not on that market; the rest is made."""
    left_out = made_on("A40", "A100-80GB-SXM", "L4", asked=DeploymentRequest("aws")).left_out
    assert left_out == (
        "A40: aws does not offer it; elsewhere: cudo, runpod",
        (
            "A100-80GB-SXM: aws has it 8 to an instance alone (p4de.24xlarge, $12.55/h), of which "
            "a sweep uses one: left out"
        ),
    )
    on_demand = made_on("H100-SXM", "A100-40GB-SXM", asked=DeploymentRequest("gcp", spot=False))
    assert on_demand.left_out == ("H100-SXM: gcp has it as a spot instance alone",)


OWN = """\
catalog:
  gpus: [{key: desk, kind: cpu, usable_memory_bytes: 16000000, source: x, recorded: 2026-11-20}]
"""


@pytest.mark.parametrize(
    ("gpus", "asked", "line"),
    [
        (
            ["A40"],
            DeploymentRequest("aws"),
            "A40: aws does not offer it; elsewhere: cudo, runpod\nsmall.yaml",
        ),
        (
            ["desk"],
            DeploymentRequest("local"),
            "desk: a GPU of your own catalog, which a node's join-check",
        ),
        (["L4"], DeploymentRequest("aws", hosts=("a", "b")), "--hosts goes with --provider local"),
        (
            ["L4"],
            DeploymentRequest("local", hosts=("a",)),
            "--hosts HEAD,HOST,…: the head and at least one",
        ),
        (["L4"], DeploymentRequest("local", hosts=("a", "b]")), "'b]' is no host nor region"),
        (
            ["L4"],
            DeploymentRequest("local", spot=True),
            "--region, --spot and --no-spot are of clouds",
        ),
        (["L4"], DeploymentRequest("aws", region="us east"), "'us east' is no host nor region"),
        (["L4"], DeploymentRequest("aws", job=True), "--job goes with --provider kuberay"),
    ],
)
def test_what_cannot_be_made_is_told(gpus: list[str], asked: DeploymentRequest, line: str) -> None:
    """In a line each."""
    with pytest.raises(DeployError) as error:
        made_on(*gpus, asked=asked, more=OWN if "desk" in gpus else "")
    assert str(error.value).startswith(line)


def test_the_command_writes_the_file_and_tells_the_bill(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file to --out or to stdout; what is left out and the bill beside it."""
    out = tmp_path / "aws.yaml"
    arguments = ["deploy", "paper", "--provider", "aws", "--prices", "shipped"]
    assert main([*arguments, "--out", str(out)]) == 0
    told = capsys.readouterr()
    assert told.out == ""
    assert "A40: aws does not offer it" in told.err
    assert "at most $7.00 an hour with 1 node and the head up" in told.err
    assert "measure on it with: sweep paper --providers aws --regions us-" in told.err
    assert main(arguments) == 0
    assert capsys.readouterr().out == out.read_text(encoding="utf-8")
    assert main([*arguments, "--out", str(tmp_path / "no" / "aws.yaml")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
