"""Nodes of a cluster and the resources that they offer."""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from gpu_catalog.gpu import Gpu
from trials.records.optional_packages import importable_extras


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a Ray cluster.

    Attributes:
        resources: how much it has of each resource, by name.
        packages: extras that can be imported on it; None when that is not known.
        node_id: Ray's name of it; None for one that is not there yet.
        is_leaving: whether it had notice that it is to be taken away.
        used: how much of them others use than who asks; nothing of what is not told.
        labels: of Ray, by which a cluster's file has it say what it is rented as.
    """

    resources: Mapping[str, float]
    packages: frozenset[str] | None = None
    node_id: str | None = None
    is_leaving: bool = False
    used: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    def has(self, resource: str) -> bool:
        """Whether it has one of these."""
        return self.resources.get(resource, 0) >= 1

    def holding(self, asked: Mapping[str, float]) -> int:
        """How many trials that ask for this it can hold at once, whoever uses it now."""
        return min(int(self.resources.get(name, 0) // amount) for name, amount in asked.items())

    def is_taken(self, asked: Mapping[str, float]) -> bool:
        """Whether others leave no room on it for a trial that asks for this."""
        return any(
            self.resources.get(name, 0) - self.used.get(name, 0) < amount
            for name, amount in asked.items()
        )


@dataclass(frozen=True, slots=True)
class ClusterResources:
    """What each node of a Ray cluster offers, and what nodes its autoscaler can start.

    A cluster says so by a resource of its head, ``scales-to-KEY``, as many as there can be: Ray
    itself tells a driver only of nodes that are there.
    """

    nodes: tuple[Node, ...]

    def nodes_for(self, gpu: Gpu) -> list[Node]:
        """The nodes that a trial on this GPU can be placed on.

        The node that carries a resource equal to the catalog key is the one with that GPU. A cpu
        device needs no such node: any free core will do, where no node carries its key.
        """
        keyed = self._keyed(gpu) or self._startable(gpu)
        with_cores = [node for node in self.nodes if node.has("CPU")]
        return with_cores if not keyed and gpu.kind == "cpu" else keyed

    def _keyed(self, gpu: Gpu) -> list[Node]:
        """The nodes that are there and carry the key of this GPU."""
        return [node for node in self.nodes if node.has("CPU") and node.has(gpu.key)]

    def _startable(self, gpu: Gpu) -> list[Node]:
        """A node that the autoscaler would start for this GPU, of which no more is known."""
        if not any(node.has(SCALES_TO + gpu.key) for node in self.nodes):
            return []
        return [Node({"CPU": 1.0, gpu.key: 1.0} | ({"GPU": 1.0} if gpu.kind == "cuda" else {}))]

    def trial_resources(self, gpu: Gpu) -> dict[str, float] | None:
        """What a trial on this GPU asks Ray for; None when the cluster cannot have it.

        Ray would wait for ever for a node that is not there, so one node must have all that is
        asked for. Ray hides its GPUs from a worker that asks for none.
        """
        nodes = self.nodes_for(gpu)
        if not nodes:
            return None
        keyed = {gpu.key: 1.0} if nodes[0].has(gpu.key) else {}
        shown = {"GPU": 1.0} if gpu.kind == "cuda" and all(n.has("GPU") for n in nodes) else {}
        return {"CPU": 1.0} | keyed | shown

    def at_a_time(self, gpu: Gpu) -> int:
        """Trials on this GPU that can run at once, nodes counted that are still to start."""
        keyed = sum(node.resources.get(gpu.key, 0) for node in self.nodes if node.has("CPU"))
        to_start = self.starting(gpu.key)
        if gpu.kind == "cpu" and not keyed and not to_start:
            return int(sum(node.resources.get("CPU", 0) for node in self.nodes))
        return int(max(keyed, to_start))

    def nodes_text(self, gpu: Gpu) -> str:
        """Where trials on this GPU run: nodes that are there, or are to be started, in words."""
        there = self._keyed(gpu) or (self.nodes_for(gpu) if not self.starting(gpu.key) else [])
        # What the autoscaler can start in all, those that are up among them.
        to_start = max(0, self.starting(gpu.key) - len(there))
        parts = [f"{len(there)} there"] if there else []
        parts += [f"{to_start} to be started"] if to_start else []
        return ", ".join(parts)

    def holding(self, asked: Mapping[str, float], out: Collection[str] = ()) -> int:
        """How many trials that ask for this the nodes can hold at once.

        Args:
            asked: as ``trial_resources`` has it.
            out: nodes that none may be placed on.
        """
        return sum(node.holding(asked) for node in self.nodes if node.node_id not in out)

    @property
    def leaving(self) -> set[str]:
        """Ids of the nodes that are to be taken away."""
        return {n.node_id for n in self.nodes if n.is_leaving and n.node_id is not None}

    def starting(self, key: str) -> int:
        """How many nodes with a GPU of this key the autoscaler can start in all."""
        return int(sum(node.resources.get(SCALES_TO + key, 0) for node in self.nodes))

    def threads(self, gpu: Gpu) -> int:
        """CPU threads a trial's steps may use.

        On a GPU the trial has the node to itself. On a CPU it holds one core: the others measure.
        """
        nodes = self.nodes_for(gpu)
        if gpu.kind == "cpu" or not nodes:
            return 1
        return max(1, int(min(node.resources["CPU"] for node in nodes)))


def this_machine() -> ClusterResources:
    """What a cluster of our own would offer, without starting it."""
    cores = float(len(os.sched_getaffinity(0)))
    return ClusterResources((Node({"CPU": cores}, importable_extras()),))


SCALES_TO = "scales-to-"
