"""Nodes of the cluster as the scheduler trusts them: up, excluded, avoided by single cells."""

from collections import defaultdict
from collections.abc import Collection, Container, Mapping

from orchestrator.planning.cluster_resources import ClusterResources, Node
from orchestrator.scheduling.node_queue import GpuQueue, NodeAddress
from trials.records.cell import Cell

SICK_CELLS = 2  # a node is excluded once this many cells blame its device, with no verdict between


class NodeHealth:
    """Nodes of the cluster, and what speaks against them.

    A failing device looks like a broken kernel, and the other way round. Hence one cell's failure
    keeps that cell alone away from a node; failures of several cells exclude the node.

    Attributes:
        excluded: ids of nodes that no trial is placed on, with the reasons.
    """

    def __init__(self, cluster: ClusterResources, excluded: Mapping[str, str]) -> None:
        self.excluded = dict(excluded)
        self._room: dict[tuple[int, frozenset[tuple[str, float]]], int] = {}
        self.cluster = cluster
        # By cell: nodes that its trial failed on, with the errors.
        self._failures: dict[Cell, dict[str, str]] = defaultdict(dict)
        self._blaming: dict[str, set[Cell]] = defaultdict(set)

    @property
    def cluster(self) -> ClusterResources:
        """Nodes now."""
        return self._cluster

    @cluster.setter
    def cluster(self, cluster: ClusterResources) -> None:
        self._cluster = cluster
        self._leaving = cluster.leaving
        self._room.clear()

    def blame(self, node: NodeAddress, cell: Cell, error: str) -> str | None:
        """Count an error of a cell against a node's device.

        Returns:
            Reason to exclude the node, if this error excludes it.
        """
        blaming = self._blaming[node.node_id]
        blaming.add(cell)
        if len(blaming) < SICK_CELLS or node.node_id in self.excluded:
            return None
        reason = (
            f"{len(blaming)} trials in a row blame its device, the last one: {error} (look at "
            "the GPU, and start Ray anew on that node to have it back)"
        )
        self.excluded[node.node_id] = f"{node.address}: {reason}"
        self._room.clear()
        return reason

    def acquit(self, node: NodeAddress) -> None:
        """Forget the errors of a node whose device has given a verdict."""
        self._blaming.pop(node.node_id, None)

    def keep_away(self, cell: Cell, node: NodeAddress, error: str) -> None:
        """Place a cell on this node no more: it failed there."""
        self._failures[cell][node.node_id] = error

    def has_failed(self, cell: Cell) -> bool:
        """Whether a cell has failed on a node."""
        return cell in self._failures

    def failures(self, queue: GpuQueue) -> str:
        """Errors of a queue's placed cells on all nodes, in words."""
        errors = (why for cell in queue.placed for why in self._failures.get(cell, {}).values())
        return f"its trials failed on all of them: {'; '.join(dict.fromkeys(errors))}"

    def avoided_by(self, cell: Cell) -> tuple[str, ...]:
        """Ids of the nodes that a cell must not be placed on."""
        failed_on = self._failures.get(cell, {})
        return tuple(sorted({*self.excluded, *failed_on, *self._leaving}))

    def room(self, gpu: str, queue: GpuQueue, died: Container[Cell]) -> int:
        """Number of trials of a GPU to place now.

        Args:
            gpu: ``Cell.node_devices`` of the trials.
            queue: its queue.
            died: cells whose trials have died before.
        """
        elsewhere = [cell for cell in queue.waiting if self.has_failed(cell)]
        if any(cell in died and cell not in elsewhere for cell in queue.waiting):
            return 0  # Tune would give a free worker to a later trial first
        up, can_start = self._trusted(queue), self.cluster.starting(gpu) // queue.node_count
        # A trial that waits for another node leaves the one where it failed to the others.
        spare = 1 if not can_start or (elsewhere and up > 0) else 0
        return max(up, can_start) + spare - len(queue.placed)

    def _trusted(self, queue: GpuQueue) -> int:
        """Trials of a queue that fit on the nodes that are up, neither excluded nor leaving."""
        # Counted once until the nodes change: it is asked for before every placement.
        request = queue.node_count, frozenset(queue.resources.items())
        if request not in self._room:
            self._room[request] = self._holding(queue, {*self.excluded, *self._leaving})
        return self._room[request]

    def _holding(self, queue: GpuQueue, out: Collection[str]) -> int:
        return self._cluster.holding(queue.resources, out, nodes=queue.node_count)

    def has_another(self, cell: Cell, queue: GpuQueue) -> bool:
        """Whether a cell can run on a node that it does not avoid, or on one still to start."""
        # A cluster that starts nodes starts another one after it has removed this one as unused.
        is_up = self._holding(queue, self.avoided_by(cell)) > 0
        return is_up or self.cluster.starting(cell.node_devices) >= cell.nodes

    def usable(self, queue: GpuQueue) -> list[Node]:
        """Nodes that a placed trial of the queue may begin on; none where they are too few."""
        avoided = {self.avoided_by(cell) for cell in queue.placed}
        enough = [out for out in avoided if self._holding(queue, out)]
        return [
            node
            for node in self.cluster.nodes
            if node.holding(queue.resources) and any(node.node_id not in out for out in enough)
        ]

    def absent(self, queue: GpuQueue) -> set[str]:
        """Ids of trusted nodes that were up and may return, as when a host restarts."""
        up = {node.node_id for node in self.cluster.nodes if not node.is_leaving}
        return queue.expected_nodes - up - self.excluded.keys()
