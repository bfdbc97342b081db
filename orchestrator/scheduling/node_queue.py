"""Queue of the trials of one GPU, and the node that each trial runs on."""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from orchestrator.planning.cluster_resources import ClusterResources
from trials.profile_trial import PROFILE_TIMEOUTS, ProfileTask
from trials.records.cell import Cell
from trials.records.failure_classification import blamed_node
from trials.trial import TrialTask

# Beyond what a build and a probe may take: the start of a worker, and the end of a child process.
SILENT_SECONDS = 120.0

Task = TrialTask | ProfileTask


@dataclass(frozen=True, slots=True)
class Placement:
    """A trial to place.

    Attributes:
        resources: request of it to Ray, on each of its nodes.
        avoid: ids of nodes that it is not to be placed on.
    """

    task: Task
    resources: Mapping[str, float]
    avoid: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """A node: its Ray id, and its network address for messages."""

    node_id: str
    address: str


@dataclass(slots=True)
class RunningTrial:
    """A trial that was placed and has not ended.

    Attributes:
        task: the trial's work.
        last_report_at: time of its start or last report; seconds, monotonic; 0 before its start.
        is_running: whether a worker has started it.
        made_progress: whether it has reported a verdict: other results may come for ever.
        nodes: its nodes in the order of its ranks, once it has reported them; the first one at
            first.
        blamed: last error that points at a device, unless a verdict came after it.
    """

    task: Task
    last_report_at: float = 0.0
    is_running: bool = False
    made_progress: bool = False
    nodes: tuple[NodeAddress, ...] = ()
    blamed: str | None = None

    @property
    def node(self) -> NodeAddress | None:
        """Its first node; None until it has reported that."""
        return self.nodes[0] if self.nodes else None

    @property
    def blamed_node(self) -> NodeAddress | None:
        """Node whose device the last error points at; None where it does not say which."""
        number = None if self.blamed is None else blamed_node(self.task.cell, self.blamed)
        return None if number is None else next(iter(self.nodes[number:]), None)

    def died_early(self, error: str) -> bool:
        """Whether its node had not finished starting: Ray's folder there may lack a file yet."""
        return error.startswith("FileNotFoundError") and not self.made_progress

    def silence(self, now: float) -> str | None:
        """Complaint about a running trial that has reported nothing for too long."""
        trial, probes = self.task, 1.0
        if isinstance(trial, ProfileTask):
            trial, probes = trial.trial, PROFILE_TIMEOUTS
        longest = (
            trial.build_timeout_seconds + probes * trial.probe_timeout_seconds + SILENT_SECONDS
        )
        is_silent = self.is_running and now - self.last_report_at > longest
        return f"no report within {longest:g} s" if is_silent else None


@dataclass(slots=True)
class GpuQueue:
    """Cells of one GPU, or of one number of GPUs, and the nodes that have them.

    Ray gives a host a new id whenever Ray starts on it, and a replaced spot node has a new id, too.
    So each node that appears is counted as the return of one that is gone, and that one is expected
    no longer.

    Attributes:
        resources: request of a trial to Ray, on each of its nodes.
        cells: waiting, in order.
        placed: trials that were placed and have not ended.
        waiting: those of them that no worker has started.
        nodes: ids of all nodes that ever had this GPU.
        expected_nodes: ids of the nodes that are up, or may return.
        is_closed: whether the wait for a node was given up.
        node_count: nodes of a trial.
    """

    resources: Mapping[str, float]
    cells: deque[Cell] = field(default_factory=deque)
    placed: dict[Cell, RunningTrial] = field(default_factory=dict)
    waiting: dict[Cell, None] = field(default_factory=dict)
    nodes: set[str] = field(default_factory=set)
    expected_nodes: set[str] = field(default_factory=set)
    is_closed: bool = False
    node_count: int = 1

    @property
    def unfinished(self) -> list[Cell]:
        """Placed cells, then waiting ones."""
        return [*self.placed, *self.cells]

    @property
    def is_waiting(self) -> bool:
        """Whether trials are placed and none of them runs."""
        return bool(self.placed) and len(self.waiting) == len(self.placed)

    def is_over(self, *, is_spent: bool) -> bool:
        """Whether no trial is worth waiting for; on a spent budget, those that run are."""
        runs = len(self.waiting) < len(self.placed)
        return self.is_closed or not (runs if is_spent else self.placed or self.cells)

    def place(self, cell: Cell, task: Task) -> None:
        """Record that a trial was placed."""
        self.placed[cell] = RunningTrial(task)
        self.waiting[cell] = None

    def start(self, cell: Cell, now: float) -> None:
        """Record that a worker runs a placed trial."""
        trial = self.placed[cell]
        trial.is_running, trial.last_report_at = True, now
        self.waiting.pop(cell, None)

    def remove(self, cell: Cell) -> RunningTrial:
        """Take away a placed trial, which has ended."""
        self.waiting.pop(cell, None)
        return self.placed.pop(cell)

    def update_nodes(self, cluster: ClusterResources, excluded: Collection[str]) -> None:
        """Record the nodes that are up; the first to count as returned is an excluded one."""
        up = {
            node.node_id
            for node in cluster.nodes
            if node.node_id is not None and node.holding(self.resources)
        }
        new, staying = up - self.nodes, up - cluster.leaving
        gone = sorted(
            self.expected_nodes - staying, key=lambda node_id: (node_id not in excluded, node_id)
        )
        self.expected_nodes = (self.expected_nodes | new) - set(gone[: len(new & staying)])
        self.nodes |= new
