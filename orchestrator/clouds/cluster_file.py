"""Cluster files for Ray's launcher, KubeRay and SkyPilot: a template filled with the node types."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from gpu_catalog.gpu import Gpu
from orchestrator.clouds.deployment_request import DeploymentRequest
from orchestrator.clouds.node_types import HEADS, ChosenNodes, Devices, NodeType
from orchestrator.clouds.skypilot import Place
from orchestrator.clouds.skypilot_node import offers_text
from orchestrator.planning.cluster_resources import SCALES_TO, node_name
from orchestrator.planning.node_pricing import NodeRental
from orchestrator.safe_templates import template_environment, yaml_value

DISK_GIB = 200  # of each node on a cloud: its own system, driver and image take half of it
POD_GIB = 20  # of a pod besides weights
# Google's regions without a zone a; the others have one. Source: zones of t2d-standard-60 in
# github:skypilot-org/skypilot-catalog:catalogs/v9/gcp/vms.csv @ 2c3d7ea7d76b.
GOOGLE_ZONES = {"us-east1": "b", "europe-west1": "b"}


@dataclass(frozen=True, slots=True)
class Weights:
    """Pretrained weights that every node loads from the hub, which may ask for a token.

    Attributes:
        gib: their size on the disk, as far as it is known.
    """

    pretrained: bool = False
    gib: int = 0

    @property
    def values(self) -> dict[str, Any]:
        """Values of a template."""
        return {
            "pretrained": self.pretrained,
            "weights_gib": self.gib,
            "disk_gib": max(DISK_GIB, DISK_GIB // 2 + self.gib),
        }


def cloud_file(
    provider: str, choice: ChosenNodes, nodes_each: int, header: str, weights: Weights
) -> str:
    """File for Ray's launcher on a cloud: worker types for each GPU, and no worker at first."""

    def labels(node: NodeType) -> dict[str, str]:
        """Labels by which a sweep prices the node."""
        where = {"provider": provider, "region": choice.region}
        return NodeRental(instance=node.instance.name, market=node.market, **where).labels

    return _filled(
        provider,
        header=header,
        provider=provider,
        region=choice.region,
        zone=f"{choice.region}-{GOOGLE_ZONES.get(choice.region, 'a')}",
        head=HEADS[provider],
        devices=choice.devices,
        nodes=choice.nodes,
        nodes_each=nodes_each,
        labels=labels,
        **weights.values,
        # All types of a GPU declare the least cores of any: Ray compares how full a trial makes a
        # node before priorities, and would start the smaller of two sizes, spot or not.
        cores={
            name: min(node.instance.vcpus for node in choice.nodes if node.devices.name == name)
            for name in choice.devices
        },
    )


def local_file(keys: Sequence[str], hosts: Sequence[str], header: str, weights: Weights) -> str:
    """File for Ray's launcher on existing hosts, each of which joins with its GPU's key."""
    return _filled("local", header=header, keys=keys, hosts=hosts, **weights.values)


def kuberay_file(
    groups: Sequence[tuple[Devices, Gpu]],
    request: DeploymentRequest,
    header: str,
    weights: Weights,
    job: tuple[str, str] | None = None,
) -> str:
    """Manifest for KubeRay: a cluster, or a job that starts its own cluster and takes it down.

    Args:
        groups: GPUs of each group of workers, and what they are.
        request: most pods of each group, and the claim that weights are kept in.
        header: comment lines.
        weights: what each node loads.
        job: name and text of the specification that the job measures; None for a cluster.
    """
    return _filled(
        "kuberay",
        header=header,
        groups=groups,
        nodes_each=request.nodes_each,
        claim=request.cache_claim,
        # An emptyDir counts towards the pod's disk, a claim does not.
        pod_gib=POD_GIB + (0 if request.cache_claim else weights.gib),
        **weights.values,
        ray_version=metadata.version("ray"),
        job=job and {"name": job[0], "text": job[1].rstrip("\n") + "\n"},
    )


def skypilot_file(
    tasks: Sequence[tuple[Devices, Gpu, Sequence[Place]]],
    nodes_each: int,
    header: str,
    spec: tuple[str, str],
    weights: Weights,
) -> str:
    """Task for SkyPilot that starts Ray and sweeps on it; of several GPUs, one after another.

    Args:
        tasks: GPUs of each task, what they are, and their offers.
        nodes_each: nodes of each task.
        header: comment lines.
        spec: name and text of the specification.
        weights: what each node loads.
    """
    name, text = spec
    return _filled(
        "skypilot",
        header=header,
        tasks=tasks,
        offers=offers_text,
        nodes_each=nodes_each,
        out=f"s3://YOUR_BUCKET/{name}",
        spec=text,
        **weights.values,
    )


def _filled(template: str, **values: Any) -> str:
    environment = template_environment("orchestrator.clouds", yaml_value, low=node_name)
    filled = environment.get_template(f"deploy-{template}.template")
    # The head lists how many nodes can be started: Ray itself does not report that to a driver.
    return filled.render(scales_to=SCALES_TO, **values)
