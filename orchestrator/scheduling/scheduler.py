"""Order and place of the trials: which to place next, where not, and which to give up.

A trial that died is placed again and continues from its reports. A cell that cannot continue gets a
reason. Nothing waits without end, neither for a node nor for a report. There is no Ray in this
module and no clock of its own: tests run through hours of failures at once.
"""

import datetime as dt
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from orchestrator.planning.cluster_resources import ClusterResources
from orchestrator.planning.faults import Fault, Kind
from orchestrator.scheduling.node_health import NodeHealth
from orchestrator.scheduling.node_queue import GpuQueue, NodeAddress, Placement, RunningTrial, Task
from orchestrator.scheduling.node_wait import NodeWait
from trials.records.cell import Cell
from trials.records.failure_classification import blames_device
from trials.records.profile import Logged, is_progress

PLACEMENTS = 3  # of a trial that dies each time before it has reported a verdict
MOST_UNFINISHED_STARTS = 3  # deaths of a trial on nodes that had not finished starting


class Scheduler:
    """Places the trials of cells, for each GPU, or number of GPUs, in their order.

    Args:
        cells: in order.
        task: next trial of a cell, by the results until now; None when nothing is left of it.
        resources: request of a trial to Ray, on each of its nodes, by ``Cell.devices``.
        cluster: nodes at the start.
        wait_seconds: time to wait for a node to start, to return, or to start a worker.
        nodes_out: ids of nodes to place nothing on, with the reasons.
        note: called with every fault.
        is_spent: whether the budget is spent: nothing is placed then.
        clock: seconds, monotonic.

    Attributes:
        died: cells whose trials died too often, with the last causes.
        no_node: cells that had no node, with the reasons.
        is_spent: as the argument.
    """

    def __init__(  # noqa: PLR0913 - the whole surroundings of a sweep, which tests replace
        self,
        cells: Sequence[Cell],
        task: Callable[[Cell], Task | None],
        resources: Mapping[str, Mapping[str, float]],
        cluster: ClusterResources,
        *,
        wait_seconds: float,
        nodes_out: Mapping[str, str],
        note: Callable[[Fault], None],
        is_spent: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.died: dict[Cell, str] = {}
        self.no_node: dict[Cell, str] = {}
        self._task = task
        self._note = note
        self.is_spent = is_spent
        self._clock = clock
        self._nodes = NodeHealth(cluster, nodes_out)
        self._queues: dict[str, GpuQueue] = {}
        self._waits: dict[str, NodeWait] = {}
        for cell in cells:
            if cell.devices not in self._queues:
                queue = GpuQueue(resources[cell.devices], node_count=cell.nodes)
                self._queues[cell.devices] = queue
                self._waits[cell.devices] = NodeWait(cell.node_devices, wait_seconds)
            self._queues[cell.devices].cells.append(cell)
        for queue in self._queues.values():
            queue.update_nodes(cluster, self._nodes.excluded)
        self._deaths: dict[Cell, int] = defaultdict(int)  # in a row, without progress
        self._early: dict[Cell, int] = defaultdict(int)  # of nodes that had not finished starting

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to place, and nothing placed is worth waiting for."""
        is_spent = self.is_spent()
        return all(queue.is_over(is_spent=is_spent) for queue in self._queues.values())

    def next(self) -> Placement | None:
        """The next trial to place; None when enough trials wait for nodes, or none is left.

        One trial more than running nodes can hold is placed: it begins as soon as one ends. Placing
        the others late lets their searches use what was measured in the meantime. An autoscaler
        would start a node for that one, so where it can start nodes, none is placed beyond them.
        """
        if self.is_spent():
            return None
        for gpu, queue in self._queues.items():
            room = self._nodes.room(self._waits[gpu].gpu, queue, died=self._deaths)
            while queue.cells and room > 0 and not queue.is_closed:
                cell = queue.cells.popleft()
                task = self._task(cell)
                if task is not None:
                    queue.place(cell, task)
                    return Placement(task, queue.resources, self._nodes.avoided_by(cell))
        return None

    def started(self, cell: Cell) -> None:
        """Record that a worker runs a trial."""
        queue = self._queues[cell.devices]
        self._waits[cell.devices].reset()
        if queue.is_closed:  # a node came after the wait was given up
            queue.is_closed = False
            for waiting in queue.unfinished:
                self.no_node.pop(waiting, None)
                self.died.pop(waiting, None)
        queue.start(cell, self._clock())

    def located(self, cell: Cell, *nodes: NodeAddress) -> None:
        """Record the nodes that a trial runs on, in the order of its ranks."""
        trial = self._queues[cell.devices].placed[cell]
        trial.nodes, trial.last_report_at = nodes, self._clock()

    def observed(self, result: Logged) -> None:
        """Record a result of a running trial."""
        cell = result.cell
        trial = self._queues[cell.devices].placed[cell]
        trial.last_report_at = self._clock()
        if result.detail is not None and blames_device(result.outcome, result.detail):
            trial.blamed = result.detail
            if (node := trial.blamed_node) is not None:
                reason = self._nodes.blame(node, cell, result.detail)
                if reason is not None:
                    self._note(_fault("node out", cell.devices, reason, node=node))
        elif is_progress(result):
            trial.made_progress, trial.blamed = True, None
            for node in trial.nodes:
                self._nodes.acquit(node)

    def ended(self, cell: Cell, error: str | None) -> str | None:
        """Record the end of a trial, and queue it again where that can help.

        Args:
            cell: the trial's cell.
            error: cause of its death; None when it came to its own end.

        Returns:
            Why the trial failed; None when it succeeded, or has tried all nodes.
        """
        queue = self._queues[cell.devices]
        trial = queue.remove(cell)
        kind: Kind = "died"
        if error is None:
            kind, error = "device", self._reason_to_move(cell, trial, queue)
            if error is None:
                return None
        elif trial.made_progress:
            self._deaths[cell] = 0
        early = trial.died_early(error) and self._early[cell] < MOST_UNFINISHED_STARTS
        (self._early if early else self._deaths)[cell] += 1
        lost = self._clock() - trial.last_report_at if trial.is_running else 0.0
        self._note(_fault(kind, cell.devices, error, cell=cell, node=trial.node, lost_seconds=lost))
        if self._deaths[cell] >= PLACEMENTS:
            self.died[cell] = f"its trial died {PLACEMENTS} times in a row, the last time: {error}"
        elif kind == "device":  # it may have to wait for another node; the others need not
            queue.cells.append(cell)
        else:
            queue.cells.appendleft(cell)
        return error

    def interrupted(self, error: str) -> list[Cell]:
        """Record that Ray has stopped everything; the trials that ran died of it.

        Returns:
            Their cells. Trials that had not begun are queued again, and count as never placed.
        """
        ran = []
        for queue in self._queues.values():
            for cell, trial in list(queue.placed.items()):
                if trial.is_running:
                    self.ended(cell, error)
                    ran.append(cell)
                elif not queue.is_closed:
                    queue.remove(cell)
                    queue.cells.appendleft(cell)
        return ran

    def update(self, cluster: ClusterResources) -> dict[Cell, str]:
        """Take in the nodes as they are now, and close the queues of GPUs without hope of one.

        Returns:
            Running trials to kill, as they have reported nothing for too long, with the complaints.
        """
        self._nodes.cluster = cluster
        now = self._clock()
        silent = {}
        for gpu, queue in self._queues.items():
            for cell, trial in queue.placed.items():
                if complaint := trial.silence(now):
                    silent[cell] = complaint
            queue.update_nodes(cluster, self._nodes.excluded)
            # A node that others use will be free one day: that is no reason to give up.
            if not queue.is_waiting or queue.is_closed or self._is_busy(queue):
                self._waits[gpu].reset()
            elif reason := self._waits[gpu].failure(queue, self._nodes, now):
                self._close(gpu, queue, reason)
        return silent

    def _close(self, gpu: str, queue: GpuQueue, reason: str) -> None:
        self._note(_fault("no node", gpu, reason))
        queue.is_closed = True
        for cell in queue.unfinished:
            # A cell that failed on a node was tried, and is not skipped.
            (self.died if self._nodes.has_failed(cell) else self.no_node)[cell] = reason

    def _is_busy(self, queue: GpuQueue) -> bool:
        """Whether other jobs, or trials of this sweep on other GPUs, use a node of the queue."""
        trials = (trial for other in self._queues.values() for trial in other.placed.values())
        ours = {node.node_id for t in trials if t.is_running for node in t.nodes}
        nodes = self._nodes.usable(queue)
        return any(node.is_taken(queue.resources) or node.node_id in ours for node in nodes)

    def _reason_to_move(self, cell: Cell, trial: RunningTrial, queue: GpuQueue) -> str | None:
        """Error for which a trial that ended by itself is to run on another node."""
        node = trial.blamed_node
        if trial.blamed is None or node is None or self._task(cell) is None:
            return None
        self._nodes.keep_away(cell, node, trial.blamed)
        return trial.blamed if self._nodes.has_another(cell, queue) else None


def _fault(  # noqa: PLR0913 - the fields of a fault
    kind: Kind,
    gpu: str,
    reason: str,
    *,
    cell: Cell | None = None,
    node: NodeAddress | None = None,
    lost_seconds: float = 0.0,
) -> Fault:
    """A fault that happens now."""
    return Fault(
        kind=kind,
        gpu=gpu,
        cell=cell,
        node=None if node is None else node.address,
        node_id=None if node is None else node.node_id,
        reason=reason,
        at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        lost_seconds=round(lost_seconds, 1),
    )
