"""Queues of trials, one for each GPU, and the node that each trial runs on."""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from orchestrator.planning.cluster_resources import ClusterResources
from trials.profile_trial import ProfileTask
from trials.records.cell import Cell
from trials.trial import TrialTask

Task = TrialTask | ProfileTask


@dataclass(frozen=True, slots=True)
class Placement:
    """A trial to place.

    Attributes:
        task: what it is to do.
        resources: what it asks Ray for.
        avoid: ids of the nodes it must not be placed on.
    """

    task: Task
    resources: Mapping[str, float]
    avoid: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """A node: its id, and its address for people."""

    node_id: str
    address: str


@dataclass(slots=True)
class RunningTrial:
    """A trial that was placed and has not ended."""

    task: Task
    last_report_at: float
    is_running: bool = False
    made_progress: bool = False
    node: NodeAddress | None = None
    blamed: str | None = None


@dataclass(slots=True)
class GpuQueue:
    """The cells of one GPU, and its nodes: all that were ever seen, and those that are hoped for.

    A host on which Ray is started anew is another node to Ray, and so is one that replaces another:
    each that comes stands for one that is gone, which is hoped for no more.
    """

    resources: Mapping[str, float]
    cells: deque[Cell] = field(default_factory=deque)
    placed: dict[Cell, RunningTrial] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    expected_nodes: set[str] = field(default_factory=set)
    waits_since: float | None = None
    there_since: float | None = None
    is_closed: bool = False

    def sees(self, cluster: ClusterResources, out: Collection[str]) -> None:
        """Remembers the nodes that there are; of those that are gone, one out comes back first."""
        there = {
            node.node_id
            for node in cluster.nodes
            if node.node_id is not None and node.holding(self.resources)
        }
        come, staying = there - self.seen, there - cluster.leaving
        gone = sorted(
            self.expected_nodes - staying, key=lambda node_id: (node_id not in out, node_id)
        )
        self.expected_nodes = (self.expected_nodes | come) - set(gone[: len(come & staying)])
        self.seen |= come
