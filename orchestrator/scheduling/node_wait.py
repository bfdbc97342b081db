"""Patience with nodes: how long the trials of a GPU wait for one, and why they wait no longer."""

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.planning.cluster_resources import Node
from orchestrator.planning.launch_failures import refusals
from orchestrator.scheduling.node_health import NodeHealth
from orchestrator.scheduling.node_queue import GpuQueue

# The list of nodes may lag behind the death of a trial that died with its node.
GONE_SECONDS = 10.0
# A node that is up has this long to start a worker, however long it was waited for.
WORKER_SECONDS = 120.0


@dataclass(slots=True)
class NodeWait:
    """The wait of one GPU's trials for a node.

    Attributes:
        gpu: ``Cell.node_devices`` of the trials.
        limit_seconds: longest wait for a node that starts, or returns.
        waits_since: time since which no trial runs though some are placed; seconds, monotonic.
        free_since: time since which a usable node is up and nobody uses it.
    """

    gpu: str
    limit_seconds: float
    waits_since: float | None = None
    free_since: float | None = None

    def reset(self) -> None:
        """Begin anew: a trial runs, or its node is in use."""
        self.waits_since = self.free_since = None

    def failure(self, queue: GpuQueue, nodes: NodeHealth, now: float) -> str | None:
        """Reason to give up at a time at which nothing runs; None while there is hope.

        Two clocks are needed. A node may appear after a long wait, and must still have time to
        start a worker. A node that is up, unused and starts no worker must not be waited for
        without end.
        """
        usable = nodes.usable(queue)
        self.waits_since = now if self.waits_since is None else self.waits_since
        free_since = now if self.free_since is None else self.free_since
        self.free_since = free_since if usable else None
        if now - self.waits_since < self._patience_seconds(queue, nodes, usable):
            return None
        if usable and now - free_since < WORKER_SECONDS:
            return None
        if usable:
            return self._no_worker(queue, usable, now - free_since)
        return self._no_node(queue, nodes)

    def _patience_seconds(
        self, queue: GpuQueue, nodes: NodeHealth, usable: Sequence[Node]
    ) -> float:
        """Time to wait for a node: short where none can be expected."""
        is_expected = usable or self._can_start(queue, nodes) or nodes.absent(queue)
        return self.limit_seconds if is_expected else min(GONE_SECONDS, self.limit_seconds)

    def _can_start(self, queue: GpuQueue, nodes: NodeHealth) -> bool:
        return nodes.cluster.starting(self.gpu) >= queue.node_count

    def _no_worker(self, queue: GpuQueue, usable: Sequence[Node], free_seconds: float) -> str:
        names = ", ".join(str(node.node_id)[:8] for node in usable)
        these, have, them = ("node", "has", "it")
        if queue.node_count > 1:
            these, have, them = ("nodes", "have", "them")
        return (
            f"the {these} with {self.gpu} ({names}) {have} been up and free for "
            f"{free_seconds / 60:.0f} minutes and started no worker: Ray's logs on {them} say why "
            "(raylet.out, worker-*.err)"
        )

    def _no_node(self, queue: GpuQueue, nodes: NodeHealth) -> str:
        within = f"within {self.limit_seconds / 60:g} minutes (--wait-for-nodes)"
        count = queue.node_count
        none, are, one = (f"no node with {self.gpu}", "is", "one")
        if count > 1:
            none, are, one = (f"no {count} nodes with {self.gpu}", "are", "more")
        if nodes.cluster.holding(queue.resources, nodes.cluster.leaving, nodes=count):
            reasons = "; ".join(nodes.excluded.values()) or nodes.failures(queue)
            return f"{none} {are} left that can be trusted: {reasons}"
        if self._can_start(queue, nodes):
            why = refusals(self.gpu, nodes.cluster.failed_launches)
            why = why or "'ray status' on the head says why"
            return f"{none} came {within}: {why}"
        came = f"came back {within}" if nodes.absent(queue) else f"{are} up"
        return (
            f"{none} {came}: start {one} and run the same command again, which continues where "
            "this stopped"
        )
