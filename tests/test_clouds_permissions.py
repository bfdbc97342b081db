"""Secrets and permissions in deploy/."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from builders.clusters import (
    DEPLOY,
    SHIPPED,
    ray_config,
    shipped,
)
from moto import mock_aws
from moto.core import set_initial_no_auth_action_count
from ray.autoscaler._private.aws.config import _get_subnets_or_die, bootstrap_aws
from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
from ray.autoscaler._private.aws.utils import client_cache, resource_cache
from ray.autoscaler.node_launch_exception import NodeLaunchException

from orchestrator.clouds.node_types import instances
from orchestrator.planning.launch_failures import in_words, known_meaning


@pytest.mark.parametrize("file", [*SHIPPED, "sweep.yaml"])
def test_no_file_holds_a_secret_or_opens_a_port(file: str) -> None:
    """No file has a key, a rule that admits everybody, or a service visible from outside."""
    text = shipped(file)
    assert not re.search(r"0\.0\.0\.0|::/0|LoadBalancer|NodePort|hostPort|hostNetwork", text)
    secrets = r"AKIA|BEGIN [A-Z ]*PRIVATE|(secret|password|token): *['\"]?\w{8}"
    assert not re.search(secrets, text)
    assert not re.search(r"\b[0-9a-f]{32,}\b", text)


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A simulated AWS account with the security group that deploy/README.md creates."""
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
    """Ray's provider stays in our group, creates no role and no rule, and rents spot instances."""
    config = bootstrap_aws(
        ray_config(shipped("aws.yaml").replace("YOUR_SECURITY_GROUP", aws.group))
    )
    provider = AWSNodeProvider(config["provider"], config["cluster_name"])
    for name in ("head", "l40s-spot", "h100-sxm-on-demand"):
        node = config["available_node_types"][name]["node_config"]
        provider.create_node(dict(node), {"ray-node-type": "worker"}, 1)
    nodes = {
        i["InstanceType"]: i
        for r in aws.ec2.describe_instances()["Reservations"]
        for i in r["Instances"]
    }
    lifecycles = {name: i.get("InstanceLifecycle") for name, i in nodes.items()}
    assert lifecycles == {"m8a.large": None, "g6e.xlarge": "spot", "p5.4xlarge": None}
    for instance in nodes.values():
        assert [g["GroupId"] for g in instance["SecurityGroups"]] == [aws.group]
    assert "IamInstanceProfile" not in nodes["p5.4xlarge"]
    assert aws.iam.list_roles()["Roles"] == []
    groups = aws.ec2.describe_security_groups()["SecurityGroups"]
    assert "0.0.0.0/0" not in json.dumps([group["IpPermissions"] for group in groups])


@pytest.mark.filterwarnings("ignore")
def test_ray_tries_every_zone_of_the_region(
    aws: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A zone without an instance leads to the next one; without any, the error has AWS's code.

    What Ray prints of a zone that another one made good is no cause of a later failure.
    """
    config = bootstrap_aws(
        ray_config(shipped("aws.yaml").replace("YOUR_SECURITY_GROUP", aws.group))
    )
    zones = {s["SubnetId"]: s["AvailabilityZone"] for s in aws.ec2.describe_subnets()["Subnets"]}
    provider = AWSNodeProvider(config["provider"], config["cluster_name"])
    start, tried = provider.ec2_fail_fast.create_instances, []
    free: set[str] = set()

    def create(**conf: Any) -> Any:
        tried.append(zones[conf["SubnetId"]])
        if tried[-1] in free:
            return start(**conf)
        error = {"Code": "InsufficientInstanceCapacity", "Message": "We currently do not have …"}
        raise ClientError({"Error": error}, "RunInstances")

    monkeypatch.setattr(provider.ec2_fail_fast, "create_instances", create)
    node = config["available_node_types"]["h100-sxm-spot"]["node_config"]
    free.add(min(zones.values()))  # Ray begins with the last one
    provider.create_node(dict(node), {"ray-node-type": "worker"}, 1)
    assert tried == sorted(zones.values(), reverse=True)
    assert len(tried) > 1
    printed = "".join(capsys.readouterr())
    assert "InsufficientInstanceCapacity" in printed
    attempts, launched, _ = printed.partition("Launched 1 nodes")
    assert launched
    assert known_meaning(attempts) is None
    assert known_meaning(printed) is None
    free.clear()
    with pytest.raises(NodeLaunchException) as error:
        provider.create_node(dict(node), {"ray-node-type": "worker"}, 1)
    assert in_words(str(error.value)).startswith("the provider has none to give now")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("policy", "name"), [("launcher-policy.json", "head"), ("head-policy.json", "l40s-spot")]
)
def test_a_policy_allows_every_action_that_ray_takes(aws: Any, policy: str, name: str) -> None:
    """It can start, tag and end a node. The simulated account enforces actions, not conditions."""
    config = ray_config(shipped("aws.yaml").replace("YOUR_SECURITY_GROUP", aws.group))
    subnets = [subnet["SubnetId"] for subnet in aws.ec2.describe_subnets()["Subnets"]]
    config["provider"]["aws_credentials"] = credentials_under(aws.iam, policy)

    @set_initial_no_auth_action_count(0)
    def start_and_end() -> None:
        running = config
        if name == "head":  # which `ray up` starts, and first asks what its types have
            running = bootstrap_aws(config)
            AWSNodeProvider.fillout_available_node_types_resources(running)
        node = dict(running["available_node_types"][name]["node_config"])
        provider = AWSNodeProvider(running["provider"], running["cluster_name"])
        (made_id,) = provider.create_node({"SubnetIds": subnets} | node, {"ray-node-type": "x"}, 1)
        assert provider.non_terminated_nodes({}) == [made_id]
        provider.set_node_tags(made_id, {"ray-node-status": "x"})
        provider.terminate_nodes([made_id])
        with pytest.raises(ClientError, match="not authorized"):
            provider.ec2.meta.client.create_security_group(GroupName="x", Description="x")

    start_and_end()


def credentials_under(iam: Any, policy: str) -> dict[str, str]:
    """Keys of a user that may do the actions of a policy, on any resource."""
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


def statements() -> list[tuple[str, dict[str, Any]]]:
    """Statements of the policies for AWS."""
    return [
        (file.name, statement)
        for file in sorted((DEPLOY / "aws").glob("*.json"))
        for statement in json.loads(file.read_text(encoding="utf-8"))["Statement"]
    ]


def listed(value: str | list[str]) -> list[str]:
    """One text or several, as a list."""
    return [value] if isinstance(value, str) else value


@pytest.mark.parametrize(
    ("file", "statement"), statements(), ids=[f"{f}-{s['Sid']}" for f, s in statements()]
)
def test_a_policy_allows_no_more_than_this_cluster(file: str, statement: dict[str, Any]) -> None:
    """No action has a star; only descriptions apply to everything; nodes need tag and type."""
    actions = listed(statement["Action"])
    assert not [action for action in actions if "*" in action], file
    if "*" in listed(statement.get("Resource", [])):
        assert all(action.startswith("ec2:Describe") for action in actions)
    if "ec2:TerminateInstances" in actions:
        tag = statement["Condition"]["StringEquals"]["ec2:ResourceTag/ray-cluster-name"]
        assert tag == ray_config(shipped("aws.yaml"))["cluster_name"]


def test_a_policy_allows_every_instance_a_file_can_name() -> None:
    """Its patterns match every instance type."""
    starting = next(s for _, s in statements() if s["Sid"] == "StartNodesOfThisCluster")
    patterns = starting["Condition"]["StringLike"]["ec2:InstanceType"]
    tests = [re.compile(p.replace(".", r"\.").replace("*", ".*")) for p in patterns]
    for instance in instances("aws"):
        assert any(test.fullmatch(instance.name) for test in tests), instance.name


@pytest.mark.parametrize("file", ["gcp/launcher-role.json", "azure/launcher-role.json"])
def test_a_role_names_each_permission(file: str) -> None:
    """None has a star; only Azure's grants roles, within its one resource group."""
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
