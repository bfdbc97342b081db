"""Deployments and cluster files, as Ray and KubeRay read them."""

from collections.abc import Sequence
from functools import cache as cached
from pathlib import Path
from typing import Any

import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr,
)
from ray.autoscaler._private.util import prepare_config, validate_config

from gpu_catalog.catalog import load_catalog
from orchestrator.clouds.deployment import DeployedSweep, Deployment, deployment
from orchestrator.clouds.deployment_request import DeploymentRequest
from orchestrator.spec.spec_file import parse_spec, shipped_specs

DEPLOY = Path(__file__).resolve().parent.parent.parent / "deploy"
ROOT = DEPLOY.parent
CATALOG = load_catalog()
SHIPPED = {
    "aws.yaml": ("deploy/sweep.yaml", DeploymentRequest("aws")),
    "gcp.yaml": ("deploy/sweep.yaml", DeploymentRequest("gcp")),
    "azure.yaml": ("deploy/sweep.yaml", DeploymentRequest("azure")),
    "skypilot.yaml": ("paper", DeploymentRequest("skypilot")),
    "local.yaml": ("paper", DeploymentRequest("local")),
    "kuberay-cluster.yaml": ("paper", DeploymentRequest("kuberay")),
    "kuberay-job.yaml": ("paper", DeploymentRequest("kuberay", job=True)),
}


def deployment_of(name: str, request: DeploymentRequest) -> Deployment:
    """Deployment for a specification of this project, with the shipped prices."""
    shipped = shipped_specs()
    text = shipped[name] if name in shipped else (ROOT / name).read_text(encoding="utf-8")
    spec = parse_spec(text, name)
    return deployment(request, DeployedSweep(spec, text, name, spec.merged_catalog()))


def spec_on(*gpus: str, more: str = "", seq_lens: Sequence[int] = (32,)) -> Any:
    """A specification that measures on these GPUs, and its text."""
    text = (
        f"name: small\ngpus: [{', '.join(gpus)}]\ncells:\n  - models: [llama-tiny]\n"
        f"    recipes: [{{method: full, precision: fp32}}]\n    seq_lens: {list(seq_lens)}\n"
        f"workload: {{examples: 100, epochs: 1}}\n{more}"
    )
    return parse_spec(text, "small.yaml"), text


def deployment_on(*gpus: str, request: DeploymentRequest, more: str = "") -> Deployment:
    """A deployment for these GPUs."""
    spec, text = spec_on(*gpus, more=more)
    return deployment(request, DeployedSweep(spec, text, "small.yaml", spec.merged_catalog()))


def deployment_of_weights(request: DeploymentRequest, *models: str) -> Deployment:
    """A deployment for three GPUs that load the weights of these models from the hub."""
    _, text = spec_on("L4", "H100-SXM", "A100-80GB-PCIe")
    names = ", ".join(models)
    text = text.replace("[llama-tiny]", f"[{names}]\n    weights: pretrained")
    spec = parse_spec(text, "small.yaml")
    return deployment(request, DeployedSweep(spec, text, "small.yaml", spec.merged_catalog()))


def yaml_documents(text: str) -> list[dict[str, Any]]:
    """Documents of a YAML file."""
    return list(yaml.safe_load_all(text))


@cached
def shipped(file: str) -> str:
    """Text of a file in deploy/."""
    return (DEPLOY / file).read_text(encoding="utf-8")


def ray_config(text: str) -> dict[str, Any]:
    """Configuration as `ray up` reads it: with Ray's defaults, checked by Ray's schema."""
    config: dict[str, Any] = prepare_config(yaml.safe_load(text))
    validate_config(config)
    return config


def kuberay_config(text: str) -> dict[str, Any]:
    """Configuration as KubeRay's autoscaler reads it from a cluster's or a job's manifest."""
    manifest = next(d for d in yaml_documents(text) if d["kind"] in {"RayCluster", "RayJob"})
    spec = manifest["spec"].get("rayClusterSpec", manifest["spec"])
    made_of = {"metadata": {"name": "finetune-cost", "namespace": "default"}, "spec": spec}
    config: dict[str, Any] = _derive_autoscaling_config_from_ray_cr(made_of)
    return config
