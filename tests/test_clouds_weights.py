"""Weights of the hub on the nodes of a cluster: their token, their disk and their cache."""

import re
from pathlib import Path
from typing import Any

import pytest
from builders.clusters import (
    CATALOG,
    deployment_of_weights,
    deployment_on,
    ray_config,
    yaml_documents,
)
from ray.autoscaler._private.util import hash_runtime_conf

from orchestrator.clouds.cluster_file import Weights, kuberay_file
from orchestrator.clouds.deployment_request import DeploymentRequest
from orchestrator.clouds.node_types import Devices
from orchestrator.clouds.start_checks import missing_hub_token, mistakes

PROVIDERS = ["aws", "gcp", "azure", "local", "kuberay"]
LARGE = ("mixtral-8x7b", "llama-3.1-70b")
LARGE_GIB = 219
"""46.7 and 70.6 billion weights of two bytes: 87.0 and 131.4 GiB."""


@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_token_of_the_hub_is_named_where_weights_are_pretrained(provider: str) -> None:
    """As a file that is copied or mounted; no file holds the token itself."""
    request = DeploymentRequest(provider)
    random = deployment_on("L4", "H100-SXM", "A100-80GB-PCIe", request=request).text
    loaded = deployment_of_weights(request, "qwen2.5-0.5b").text
    assert "huggingface" not in random
    assert "huggingface/token" in loaded
    assert yaml_documents(loaded)


@pytest.mark.parametrize("provider", ["aws", "local"])
def test_a_missing_token_is_one_line(
    provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray reads it before it starts a node, also where the weights are open."""
    monkeypatch.setenv("HOME", str(tmp_path))
    made = deployment_of_weights(DeploymentRequest(provider), "qwen2.5-0.5b").text
    assert "hf auth login" in str(missing_hub_token(made))
    config = ray_config(made)
    assert any("huggingface" in line for line in mistakes(config))
    with pytest.raises(FileNotFoundError):
        hash_runtime_conf(config["file_mounts"], [], {})
    for name in (".cache/huggingface/token", ".ray/auth_token"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("x", encoding="ascii")
    assert missing_hub_token(made) is None
    assert not any("not on this machine" in line for line in mistakes(config))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_disks_have_room_for_the_weights(provider: str) -> None:
    """A node has a disk for its system and all weights, and does not join with less."""
    request = DeploymentRequest(provider)
    random = deployment_on("L4", "H100-SXM", "A100-80GB-PCIe", request=request).text
    loaded = deployment_of_weights(request, *LARGE).text
    sizes = r"(?:VolumeSize|diskSizeGb|osDiskSize|ephemeral-storage): (\d+)"
    assert {*re.findall(sizes, random)} == ({"200"} if provider in PROVIDERS[:3] else set())
    expected = {"local": set(), "kuberay": {"239"}}.get(provider, {"319"})
    assert {*re.findall(sizes, loaded)} == expected
    assert "weights-gib" not in random
    assert re.search(rf"--weights-gib\s+(?:- ')?{LARGE_GIB}\b", loaded)


@pytest.mark.parametrize("provider", ["aws", "gcp", "azure"])
def test_weights_outlive_a_container_on_a_cloud(provider: str) -> None:
    """The cache of the container's user, root, is a folder on the node's disk."""
    docker = ray_config(deployment_of_weights(DeploymentRequest(provider), *LARGE).text)["docker"]
    (volume,) = (words for words in docker["run_options"] if words.startswith("--volume"))
    assert volume == "--volume /var/lib/finetune-cost/huggingface:/root/.cache/huggingface"


def pods(request: DeploymentRequest, *models: str) -> list[dict[str, Any]]:
    """Pods of the workers."""
    manifest = yaml_documents(deployment_of_weights(request, *models).text)[-1]["spec"]
    groups = manifest.get("rayClusterSpec", manifest)["workerGroupSpecs"]
    return [group["template"]["spec"] for group in groups]


@pytest.mark.parametrize("job", [False, True])
@pytest.mark.parametrize("claim", [None, "weights"])
def test_containers_of_a_pod_share_a_cache_on_kubernetes(job: bool, claim: str | None) -> None:  # noqa: FBT001
    """Of the pod alone and bounded, or of all pods and then no part of the pod's disk."""
    made = pods(DeploymentRequest("kuberay", job=job, cache_claim=claim), *LARGE)
    assert len(made) == 3
    for pod in made:
        (cache,) = (volume for volume in pod["volumes"] if volume.pop("name") == "cache")
        gib = LARGE_GIB + 20 if claim is None else 20
        own = {"emptyDir": {"sizeLimit": f"{gib}Gi"}}
        assert cache == (own if claim is None else {"persistentVolumeClaim": {"claimName": claim}})
        # A volume of others' belongs to root: the pod's user may write it by its group.
        assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsUser"]
        for container in (*pod["initContainers"], *pod["containers"]):
            (mount,) = (m for m in container["volumeMounts"] if m["name"] == "cache")
            assert {"name": "HF_HOME", "value": mount["mountPath"]} in container["env"]
            assert container["resources"]["limits"]["ephemeral-storage"] == f"{gib}Gi"


def test_a_cache_of_unknown_size_has_no_limit() -> None:
    """Of a model whose publisher states no number of weights."""
    groups, weights = [(Devices("L4"), CATALOG.gpu("L4"))], Weights(pretrained=True)
    made = kuberay_file(groups, DeploymentRequest("kuberay"), "", weights)
    (group,) = yaml_documents(made)[-1]["spec"]["workerGroupSpecs"]
    assert {"name": "cache", "emptyDir": {}} in group["template"]["spec"]["volumes"]
