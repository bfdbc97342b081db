"""Nodes of a cluster and the resources that they offer."""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from gpu_catalog.gpu import Gpu
from trials.recipes.optional_packages import importable_extras
from trials.records.cell import devices_name


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a Ray cluster.

    Attributes:
        packages: extras that can be imported on it; None when that is unknown.
        node_id: Ray's id of the node; None for one that has not started.
        is_leaving: whether it had notice that it will be taken away.
        used: amount of each resource that other jobs use, as far as they report it.
        labels: Ray labels, by which a cluster file describes the rental of its nodes.
    """

    resources: Mapping[str, float]
    packages: frozenset[str] | None = None
    node_id: str | None = None
    is_leaving: bool = False
    used: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    def has(self, resource: str) -> bool:
        """Whether it has at least one of a resource."""
        return self.resources.get(resource, 0) >= 1

    def holding(self, request: Mapping[str, float]) -> int:
        """Number of concurrent trials with this request that fit on an idle node."""
        return min(int(self.resources.get(name, 0) // amount) for name, amount in request.items())

    def is_taken(self, request: Mapping[str, float]) -> bool:
        """Whether other jobs leave no room for a trial with this request."""
        return any(
            self.resources.get(name, 0) - self.used.get(name, 0) < amount
            for name, amount in request.items()
        )


@dataclass(frozen=True, slots=True)
class FailedLaunch:
    """A node that the autoscaler wanted and the provider did not start.

    Attributes:
        node_type: its name in the cluster file.
        reason: the provider's error.
    """

    node_type: str
    reason: str

    def is_of(self, gpu: str) -> bool:
        """Whether its node type is one of this GPU."""
        name = node_name(gpu)
        return self.node_type == name or self.node_type.startswith(f"{name}-")


def node_name(name: str) -> str:
    """Name with the characters that Google's labels and Kubernetes' names allow."""
    return name.lower().replace(".", "-")


@dataclass(frozen=True, slots=True)
class ClusterResources:
    """Resources of the nodes of a Ray cluster, and of the nodes that its autoscaler can start.

    Ray lists only running nodes. The head therefore declares the largest number of nodes with a GPU
    as its resource ``scales-to-KEY``, or with at least four of it as ``scales-to-4xKEY``.

    Attributes:
        nodes: running nodes.
        failed_launches: nodes that were wanted and could not be started, the last one last.
        is_own: whether it is the Ray that a sweep starts for itself on this machine.
    """

    nodes: tuple[Node, ...]
    failed_launches: tuple[FailedLaunch, ...] = ()
    is_own: bool = False

    @property
    def can_start_nodes(self) -> bool:
        """Whether its autoscaler can start nodes with a GPU."""
        return any(name.startswith(SCALES_TO) for node in self.nodes for name in node.resources)

    def nodes_for(self, gpu: Gpu, ranks: int = 1) -> list[Node]:
        """Nodes with a GPU, on which a trial can be placed if they have enough of it.

        A node with a GPU declares the GPU's catalog key as a resource. A cpu device may run on any
        core where no node declares its key.

        Args:
            gpu: GPU of the trial.
            ranks: GPUs of a node that train together, which a node that can be started has.
        """
        keyed = self._keyed(gpu) or self._startable(gpu, ranks)
        with_cores = [node for node in self.nodes if node.has("CPU")]
        return with_cores if not keyed and gpu.kind == "cpu" else keyed

    def _keyed(self, gpu: Gpu) -> list[Node]:
        """Running nodes that declare the key of this GPU."""
        return [node for node in self.nodes if node.has("CPU") and node.has(gpu.key)]

    def _startable(self, gpu: Gpu, ranks: int) -> list[Node]:
        """A node that the autoscaler would start for a trial; its other resources are unknown."""
        if not self.starting(devices_name(gpu.key, ranks)):
            return []
        cores = 1.0 if gpu.kind == "cuda" else float(ranks)
        shown = {"GPU": float(ranks)} if gpu.kind == "cuda" else {}
        return [Node({"CPU": cores, gpu.key: float(ranks)} | shown)]

    def trial_resources(self, gpu: Gpu, ranks: int = 1) -> dict[str, float] | None:
        """Resources that a trial requests of each of its nodes; None when no node has that GPU.

        Ray waits forever for a missing node, so a node must have all of them. A trial on a CUDA
        GPU requests a GPU, because Ray hides GPUs from a worker that requests none.

        Args:
            gpu: GPU of the trial.
            ranks: GPUs of a node that train together; each rank on a CPU has a core.
        """
        nodes = self.nodes_for(gpu, ranks)
        if not nodes:
            return None
        count = float(ranks)
        keyed = {gpu.key: count} if nodes[0].has(gpu.key) else {}
        shown = {"GPU": count} if gpu.kind == "cuda" and all(n.has("GPU") for n in nodes) else {}
        return {"CPU": count if gpu.kind == "cpu" else 1.0} | keyed | shown

    def at_a_time(self, gpu: Gpu, ranks: int = 1, nodes: int = 1) -> int:
        """Number of concurrent trials on this GPU, with the nodes that can still start.

        A node that will start counts for one trial, whatever it will have room for.

        Args:
            gpu: GPU of the trials.
            ranks: GPUs of a node that train together.
            nodes: nodes of a trial.
        """
        if ranks > 1 or nodes > 1:
            request = self.trial_resources(gpu, ranks)
            running = 0 if request is None else self.holding(request, nodes=nodes)
            return max(running, self.starting(devices_name(gpu.key, ranks)) // nodes)
        keyed = sum(node.resources.get(gpu.key, 0) for node in self.nodes if node.has("CPU"))
        to_start = self.starting(gpu.key)
        if gpu.kind == "cpu" and not keyed and not to_start:
            return int(sum(node.resources.get("CPU", 0) for node in self.nodes))
        return int(max(keyed, to_start))

    def nodes_text(self, gpu: Gpu, ranks: int = 1) -> str:
        """Running and startable nodes for trials on this GPU, or so many of it, in words."""
        scales_to = self.starting(devices_name(gpu.key, ranks))
        keyed = [node for node in self._keyed(gpu) if node.resources[gpu.key] >= ranks]
        there = keyed or (self.nodes_for(gpu) if not scales_to else [])
        # The autoscaler's limit includes the nodes that are running.
        to_start = max(0, scales_to - len(there))
        parts = ((len(there), "there"), (to_start, "to be started"))
        return ", ".join(f"{count} {state}" for count, state in parts if count)

    def holding(
        self, request: Mapping[str, float], out: Collection[str] = (), *, nodes: int = 1
    ) -> int:
        """Number of concurrent trials that fit on the idle nodes not ``out``.

        Args:
            request: resources that a trial requests of each of its nodes.
            out: ids of nodes.
            nodes: nodes of a trial, all different.
        """
        room = [node.holding(request) for node in self.nodes if node.node_id not in out]
        most = sum(room) // nodes
        if nodes == 1:
            return most
        # A node has room for at most one part of each trial.
        fitting = (n for n in range(most, 0, -1) if sum(min(r, n) for r in room) >= nodes * n)
        return next(fitting, 0)

    @property
    def leaving(self) -> set[str]:
        """Ids of the nodes that will be taken away."""
        return {n.node_id for n in self.nodes if n.is_leaving and n.node_id is not None}

    def starting(self, devices: str) -> int:
        """Largest number of nodes with these GPUs that the autoscaler can run."""
        return int(sum(node.resources.get(SCALES_TO + devices, 0) for node in self.nodes))

    def threads(self, gpu: Gpu) -> int:
        """Number of CPU threads that the steps of a trial, or of each of its ranks, may use.

        The GPUs of a node share its cores, whether or not one trial has them all. A trial on a CPU
        holds one core, since the other cores run other trials.
        """
        nodes = self.nodes_for(gpu)
        if gpu.kind == "cpu" or not nodes:
            return 1
        shares = (node.resources["CPU"] // node.resources.get(gpu.key, 1.0) for node in nodes)
        return max(1, int(min(shares)))


def this_machine() -> ClusterResources:
    """Resources of a cluster on this machine alone, without starting it."""
    cores = float(len(os.sched_getaffinity(0)))
    return ClusterResources((Node({"CPU": cores}, importable_extras()),), is_own=True)


SCALES_TO = "scales-to-"
