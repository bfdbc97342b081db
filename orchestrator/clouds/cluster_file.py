"""Cluster files for Ray's launcher and KubeRay: a template filled with the node types."""

import textwrap
from collections.abc import Sequence
from importlib import metadata, resources
from typing import Any

import yaml

from gpu_catalog.gpu import Gpu
from orchestrator.clouds.node_types import HEADS, ChosenNodes, NodeType
from orchestrator.planning.cluster_resources import SCALES_TO
from orchestrator.planning.node_pricing import NodeRental

SPOT_PRIORITY = 10  # of two node types that a trial fills equally, Ray starts the higher one
POD_CPUS = 4
POD_MEMORY_GIB = 28


class _Dumper(yaml.SafeDumper):
    """Dumper that never writes aliases, so that each node type can be read alone."""

    def ignore_aliases(self, data: Any) -> bool:
        del data
        return True


def cloud_file(provider: str, choice: ChosenNodes, nodes_each: int, header: str) -> str:
    """File for Ray's launcher on a cloud: worker types for each GPU, and no worker at first."""
    gpus = dict.fromkeys(node.gpu for node in choice.nodes)
    cores = {gpu: _cores(choice, gpu) for gpu in gpus}
    return _filled(
        _template(provider),
        HEADER=header,
        MAX_WORKERS=str(nodes_each * len(gpus)),
        REGION=choice.region,
        HEAD=HEADS[provider],
        HEAD_RESOURCES=_flow(_head_resources(list(gpus), nodes_each)),
        NODE_TYPES=_block(
            {
                _low(n.name): _cloud_node(provider, choice.region, n, nodes_each, cores[n.gpu])
                for n in choice.nodes
            },
            2,
        ),
        JOIN=_join('"$(cat ~/gpu-key)"', cloud=provider),
    )


def local_file(keys: Sequence[str], hosts: Sequence[str], header: str) -> str:
    """File for Ray's launcher on existing hosts, each of which joins with its GPU's key."""
    head, *workers = hosts
    return _filled(
        _template("local"),
        HEADER=header,
        HEAD=head,
        WORKERS=", ".join(workers),
        MAX_WORKERS=str(len(workers)),
        JOIN=_join(",".join(keys), installed_in="$HOME/finetune-cost-env/bin"),
    )


def kuberay_file(
    gpus: Sequence[Gpu], nodes_each: int, header: str, job: tuple[str, str] | None = None
) -> str:
    """Manifest for KubeRay: a cluster, or a job that starts its own cluster and takes it down.

    Args:
        gpus: GPUs, each of which gets a group of workers.
        nodes_each: most pods of each group.
        header: comment lines.
        job: name and text of the specification that the job measures; None for a cluster.
    """
    volumes = [{"name": "runs", "persistentVolumeClaim": {"claimName": "finetune-cost-runs"}}]
    mounts = [{"name": "runs", "mountPath": "/data/runs"}]
    if job is not None:
        volumes.append({"name": "spec", "configMap": {"name": "finetune-cost-spec"}})
        mounts.append({"name": "spec", "mountPath": "/spec"})
    spec = _filled(
        _template("kuberay-spec"),
        HEAD_RESOURCES=_flow(
            {k: str(v) for k, v in _head_resources([g.key for g in gpus], nodes_each).items()}
        ),
        RAY_VERSION=metadata.version("ray"),
        MOUNTS=_flow(mounts),
        VOLUMES=_flow(volumes),
        NODE_TYPES=_dump([_worker_group(gpu, nodes_each) for gpu in gpus]).rstrip("\n"),
    )
    cluster = _ray_cluster(spec) if job is None else _ray_job(spec, *job)
    return _filled(_template("kuberay"), HEADER=header, CLUSTER=cluster)


def _head_resources(keys: Sequence[str], nodes_each: int) -> dict[str, int]:
    """Resources of the head: one core, and how many nodes of each GPU the autoscaler can start.

    Ray itself does not report these numbers to a driver.
    """
    return {"CPU": 1} | {SCALES_TO + key: nodes_each for key in keys}


def _cores(choice: ChosenNodes, gpu: str) -> int:
    """Least number of cores of a GPU's instance types, which all of them declare.

    Ray compares how full a trial makes a node before it compares priorities. Of two sizes it would
    start the smaller one, spot or not.
    """
    return min(node.instance.vcpus for node in choice.nodes if node.gpu == gpu)


def _cloud_node(
    provider: str, region: str, node: NodeType, nodes_each: int, cores: int
) -> dict[str, Any]:
    """Worker type that Ray starts for a trial that asks for its GPU's key."""
    gpus = {"GPU": 1} if node.kind == "cuda" else {}
    image = {} if gpus else {"docker": {"worker_image": "YOUR_REGISTRY/finetune-cost:cpu"}}
    return {
        "min_workers": 0,
        "max_workers": nodes_each,
        # A sweep prices the node by these labels.
        "labels": NodeRental(
            provider=provider, instance=node.instance.name, region=region, market=node.market
        ).labels,
        "priority": SPOT_PRIORITY if node.market == "spot" else 0,
        "resources": {"CPU": cores, **gpus, node.gpu: 1},
        **image,
        # join-check compares the node's GPU with this key before the node joins.
        "worker_setup_commands": [f"echo {node.gpu} > ~/gpu-key"],
        "node_config": _NODE_CONFIGS[provider](node),
    }


def _aws_node(node: NodeType) -> dict[str, Any]:
    spot = {"InstanceMarketOptions": {"MarketType": "spot"}} if node.market == "spot" else {}
    return {
        "InstanceType": node.instance.name,
        "ImageId": "*image",
        "SecurityGroupIds": "*group",
        "MetadataOptions": "*metadata",
        "BlockDeviceMappings": "*disk",
    } | spot


def _gcp_node(node: NodeType) -> dict[str, Any]:
    # Google cannot migrate a machine with a GPU during maintenance of its host.
    scheduling: dict[str, Any] = {"onHostMaintenance": "TERMINATE"}
    if node.market == "spot":
        scheduling |= {
            "provisioningModel": "SPOT",
            "instanceTerminationAction": "DELETE",
            "automaticRestart": False,
        }
    return {
        "machineType": node.instance.name,
        "disks": "*disks",
        "networkInterfaces": "*network",
        "scheduling": scheduling,
    }


def _azure_node(node: NodeType) -> dict[str, Any]:
    spot = {"priority": "Spot", "billingProfile": {"maxPrice": -1}} if node.market == "spot" else {}
    image = {
        "imagePublisher": "microsoft-dsvm",
        "imageOffer": "ubuntu-hpc",
        "imageSku": "2204",
        "imageVersion": "latest",
    }
    return {"azure_arm_parameters": {"vmSize": node.instance.name} | image | spot}


_NODE_CONFIGS = {"aws": _aws_node, "gcp": _gcp_node, "azure": _azure_node}


def _worker_group(gpu: Gpu, nodes_each: int) -> dict[str, Any]:
    """Worker group whose pods run on nodes that NVIDIA's operator labels with this GPU."""
    is_gpu = gpu.kind == "cuda"
    counted = {"nvidia.com/gpu": "1"} if is_gpu else {}
    requested = {"cpu": str(POD_CPUS), "memory": f"{POD_MEMORY_GIB}Gi"} | counted
    image = f"YOUR_REGISTRY/finetune-cost:{'cuda' if is_gpu else 'cpu'}"
    container = {"image": image, "resources": {"requests": requested, "limits": requested}}
    check = f"python -m orchestrator join-check {gpu.key}".split()
    labels = [name.replace(" ", "-") for name in gpu.device_names]
    placed = {"affinity": _on_nodes_with(labels)} if labels else {}
    return {
        "groupName": _low(gpu.key),
        "replicas": 0,
        "minReplicas": 0,
        "maxReplicas": nodes_each,
        "resources": {"CPU": str(POD_CPUS)} | ({"GPU": "1"} if is_gpu else {}) | {gpu.key: "1"},
        "rayStartParams": {},
        "template": {
            "metadata": {"labels": {"app": "finetune-cost"}},
            "spec": {
                "restartPolicy": "Never",
                "securityContext": {"runAsNonRoot": True, "runAsUser": 1000},
                "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
                **placed,
                "initContainers": [{"name": "join-check", "command": check} | container],
                "containers": [{"name": "ray-worker"} | container],
            },
        },
    }


def _on_nodes_with(products: Sequence[str]) -> dict[str, Any]:
    expression = {"key": "nvidia.com/gpu.product", "operator": "In", "values": list(products)}
    terms = [{"matchExpressions": [expression]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return {"nodeAffinity": required}


def _ray_cluster(spec: str) -> str:
    head = "apiVersion: ray.io/v1\nkind: RayCluster\nmetadata: {name: finetune-cost}\nspec:\n"
    return head + textwrap.indent(spec, "  ").rstrip()


def _ray_job(spec: str, name: str, text: str) -> str:
    run = f"python -m orchestrator sweep /spec/sweep.yaml --out /data/runs/{name}"
    configuration = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "finetune-cost-spec"},
    }
    data = "data:\n  sweep.yaml: |\n" + textwrap.indent(text.rstrip("\n"), "    ")
    return (
        f"{_dump(configuration)}{data}\n---\n"
        "apiVersion: ray.io/v1\nkind: RayJob\nmetadata: {name: finetune-cost}\nspec:\n"
        f"  entrypoint: {run}\n"
        "  shutdownAfterJobFinishes: true  # the cluster is deleted with it; the runs stay\n"
        "  ttlSecondsAfterFinished: 300\n"
        "  rayClusterSpec:\n" + textwrap.indent(spec, "    ").rstrip()
    )


def _join(keys: str, *, installed_in: str = "", cloud: str | None = None) -> str:
    """Commands with which a worker checks its GPU, joins, and waits for its cloud's notice."""
    path = f' PATH="{installed_in}:$PATH"' if installed_in else ""
    notice = (
        ""
        if cloud is None
        else " &&\n  (setsid python -m orchestrator node-notice "
        f"{cloud} < /dev/null > ~/node-notice.log 2>&1 &)"
    )
    return textwrap.indent(
        f"- export RAY_AUTH_MODE=token{path}; ray stop\n"
        "- >-\n"
        f"  export RAY_AUTH_MODE=token{path};\n"
        f'  resources="$(python -m orchestrator join-check {keys})" &&\n'
        f'  ray start --address=$RAY_HEAD_IP:6379 --resources="$resources"{notice}',
        "  ",
    )


def _template(name: str) -> str:
    file = resources.files("orchestrator.clouds") / "templates" / f"deploy-{name}.template"
    return file.read_text(encoding="utf-8")


def _filled(template: str, **values: str) -> str:
    for name, text in values.items():
        template = template.replace(f"@{name}@", text)
    return template


def _dump(value: object) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=100)


def _flow(value: object) -> str:
    text = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, default_flow_style=True, width=1_000_000
    )
    return text.rstrip("\n")


def _block(value: object, indent: int) -> str:
    """YAML block below a key, with aliases of the template's anchors instead of quoted text."""
    text = textwrap.indent(_dump(value), " " * indent)
    for anchor in ("image", "group", "metadata", "disk", "disks", "network"):
        text = text.replace(f": '*{anchor}'\n", f": *{anchor}\n")
    return text


def _low(name: str) -> str:
    """Name with the characters that Google's labels and Kubernetes' names allow."""
    return name.lower().replace(".", "-")
