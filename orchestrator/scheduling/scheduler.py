"""Which trial to place next and where not, and which no more. No Ray here, and no time of its own.

A trial that died is placed again from what it had reported; where that cannot go on, the cell has a
reason. Nothing waits for ever: neither for a node nor for a trial's word.
"""

import datetime as dt
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from orchestrator.planning.cluster_resources import ClusterResources, Node
from orchestrator.planning.faults import Fault, Kind
from orchestrator.scheduling.node_queue import GpuQueue, NodeAddress, Placement, RunningTrial, Task
from trials.profile_trial import PROFILE_TIMEOUTS, ProfileTask
from trials.records.cell import Cell
from trials.records.failure_classification import blames_device
from trials.records.profile import Logged

PLACEMENTS = 3  # of a trial that dies each time before it has reported anything new
SICK_CELLS = 2  # so many that blame a node's device, and no verdict between: the node is out
# A node list may be a little behind the trial that died with its node.
GONE_SECONDS = 10.0
# A node that came has so long to start a worker, however long it was waited for before.
WORKER_SECONDS = 120.0
# Beyond what a build and a probe may take: what a worker needs to start, and to kill a child.
SILENT_SECONDS = 120.0


class Scheduler:
    """Places the trials of some cells, each GPU's in their order.

    Args:
        cells: the cells.
        task: a cell's trial, from all that is known of it by now; None when nothing is left to do.
        resources: what a trial on each GPU asks Ray for.
        cluster: what there is.
        wait_seconds: how long to wait for a node that the autoscaler is to start, for one that was
            there to come back, and for one that nobody uses to start a worker.
        nodes_out: nodes to place nothing on, and why.
        note: is told of every fault.
        is_spent: whether the sweep may cost no more: nothing is placed then.
        clock: seconds, monotonic.
    """

    def __init__(  # noqa: PLR0913 - all that it goes by
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
        self._task = task
        self._cluster = cluster
        self._wait_seconds = wait_seconds
        self._note = note
        self._is_spent = is_spent
        self._clock = clock
        self._out = dict(nodes_out)
        self._queues: dict[str, GpuQueue] = {}
        for cell in cells:
            queue = self._queues.setdefault(cell.device, GpuQueue(resources[cell.device]))
            queue.cells.append(cell)
        for queue in self._queues.values():
            queue.sees(cluster, self._out)
        self._tries: dict[Cell, int] = defaultdict(int)
        # Nodes that it is not to be placed on, and what failed there.
        self._avoided: dict[Cell, dict[str, str]] = defaultdict(dict)
        self._blaming: dict[str, set[Cell]] = defaultdict(set)
        self.died: dict[Cell, str] = {}
        self.no_node: dict[Cell, str] = {}

    @property
    def is_over(self) -> bool:
        """Whether nothing is to be placed any more, and nothing placed is worth waiting for."""
        return self._is_spent() or all(
            queue.is_closed or not (queue.cells or queue.placed) for queue in self._queues.values()
        )

    def next(self) -> Placement | None:
        """The next trial to place; None when there is none, or enough wait for a node already.

        One more than the nodes can hold are placed: it begins where one ends. The others' turn
        comes late, so that they know what was learned meanwhile.
        """
        if self._is_spent():
            return None
        for device, queue in self._queues.items():
            room = self._room(device, queue) + 1 - len(queue.placed)
            while queue.cells and room > 0 and not queue.is_closed:
                cell = queue.cells.popleft()
                task = self._task(cell)
                if task is not None:
                    queue.placed[cell] = RunningTrial(task, self._clock())
                    return Placement(task, queue.resources, self._avoid(cell))
        return None

    def started(self, cell: Cell) -> None:
        """A trial runs."""
        queue = self._queues[cell.device]
        queue.waits_since = None
        if queue.is_closed:  # a node came after all
            queue.is_closed = False
            for waiting in (*queue.placed, *queue.cells):
                self.no_node.pop(waiting, None)
                self.died.pop(waiting, None)
        placed = queue.placed[cell]
        placed.is_running, placed.last_report_at = True, self._clock()

    def is_on(self, cell: Cell, node: NodeAddress) -> None:
        """A trial says where it is."""
        placed = self._queues[cell.device].placed[cell]
        placed.node, placed.last_report_at = node, self._clock()

    def observed(self, observation: Logged) -> None:
        """A probe of a running trial ended."""
        cell = observation.cell
        placed = self._queues[cell.device].placed[cell]
        placed.last_report_at, placed.made_progress = self._clock(), True
        if blames_device(observation.outcome, observation.detail):
            placed.blamed = observation.detail
            if placed.node is not None:
                self._blame(placed.node, cell, placed.blamed or "")
        elif observation.outcome.is_verdict:
            placed.blamed = None
            if placed.node is not None:
                self._blaming.pop(placed.node.node_id, None)

    def ended(self, cell: Cell, error: str | None) -> str | None:
        """A trial is over.

        Args:
            cell: what it measured.
            error: what it died of; None when it came to its own end.

        Returns:
            Why it did not end well; None when it did, or has tried all that it could.
        """
        queue = self._queues[cell.device]
        placed = queue.placed.pop(cell)
        if error is None:
            error = self._elsewhere(cell, placed)
            if error is None:
                return None
            kind: Kind = "device"
        else:
            kind = "died"
            if placed.made_progress:
                self._tries[cell] = 0
        self._tries[cell] += 1
        lost = self._clock() - placed.last_report_at if placed.is_running else 0.0
        self._tell(kind, cell.device, error, cell=cell, node=placed.node, lost_seconds=lost)
        if self._tries[cell] >= PLACEMENTS:
            self.died[cell] = f"its trial died {PLACEMENTS} times in a row, the last time: {error}"
        elif kind == "device":  # it may have to wait for another node: the others need not
            queue.cells.append(cell)
        else:
            queue.cells.appendleft(cell)
        return error

    def interrupted(self, error: str) -> list[Cell]:
        """Nothing that was placed runs any more; those that ran are returned, and died of it."""
        ran = []
        for queue in self._queues.values():
            for cell, placed in list(queue.placed.items()):
                if placed.is_running:
                    self.ended(cell, error)
                    ran.append(cell)
                elif not queue.is_closed:
                    del queue.placed[cell]
                    queue.cells.appendleft(cell)
        return ran

    def look(self, cluster: ClusterResources) -> dict[Cell, str]:
        """Looks at what there is by now, and gives up GPUs for which there is no node.

        Returns:
            Running trials to be killed, and why: they have said nothing for too long.
        """
        self._cluster = cluster
        now = self._clock()
        silent = {}
        for device, queue in self._queues.items():
            for cell, placed in queue.placed.items():
                most = _longest_silence(placed.task)
                if placed.is_running and now - placed.last_report_at > most:
                    silent[cell] = f"no word of it within {most:g} s"
            queue.sees(cluster, self._out)
            self._wait(device, queue, now)
        return silent

    def _wait(self, device: str, queue: GpuQueue, now: float) -> None:
        """Counts the time for which a GPU had no node, and closes its queue in the end.

        A node that others use is waited for. One that nobody uses and that starts no worker is as
        good as none.
        """
        is_waiting = queue.placed and not any(p.is_running for p in queue.placed.values())
        usable = self._usable(queue)
        if not is_waiting or queue.is_closed or self._is_busy(queue, usable):
            queue.waits_since = queue.there_since = None
            return
        queue.waits_since = now if queue.waits_since is None else queue.waits_since
        since = now if queue.there_since is None else queue.there_since
        queue.there_since = since if usable else None
        if now - queue.waits_since < self._patience(device, queue, usable):
            return
        if usable and now - since < WORKER_SECONDS:
            return
        reason = self._why_no_node(device, queue, usable, now - since)
        self._tell("no node", device, reason)
        queue.is_closed = True
        for cell in (*queue.placed, *queue.cells):
            # One that failed on a node was not skipped.
            (self.died if cell in self._avoided else self.no_node)[cell] = reason

    def _usable(self, queue: GpuQueue) -> list[Node]:
        """The nodes that a trial which was placed may begin on."""
        avoided = [self._avoid(cell) for cell in queue.placed]
        return [
            node
            for node in self._cluster.nodes
            if node.holding(queue.resources) and any(node.node_id not in out for out in avoided)
        ]

    def _is_busy(self, queue: GpuQueue, nodes: Sequence[Node]) -> bool:
        """Whether others use one of these nodes, or trials on other GPUs do."""
        placed = (p for other in self._queues.values() for p in other.placed.values())
        ours = {p.node.node_id for p in placed if p.is_running and p.node is not None}
        return any(node.is_taken(queue.resources) or node.node_id in ours for node in nodes)

    def _patience(self, device: str, queue: GpuQueue, usable: Sequence[Node]) -> float:
        """Seconds to wait for a node: few where there is no hope of one."""
        is_hoped_for = usable or self._cluster.starting(device) or self._gone(queue)
        return self._wait_seconds if is_hoped_for else min(GONE_SECONDS, self._wait_seconds)

    def _gone(self, queue: GpuQueue) -> set[str]:
        """Nodes that were there, could be trusted, and may come back: a host that starts anew."""
        there = {node.node_id for node in self._cluster.nodes if not node.is_leaving}
        return queue.expected_nodes - there - self._out.keys()

    def _why_no_node(
        self, device: str, queue: GpuQueue, usable: Sequence[Node], there_seconds: float
    ) -> str:
        within = f"within {self._wait_seconds / 60:g} minutes (--wait-for-nodes)"
        if usable:
            names = ", ".join(str(node.node_id)[:8] for node in usable)
            return (
                f"the node with {device} ({names}) has been there and free for "
                f"{there_seconds / 60:.0f} minutes and started no worker: Ray's logs on it say why "
                "(raylet.out, worker-*.err)"
            )
        if self._cluster.holding(queue.resources, self._cluster.leaving):
            reasons = "; ".join(self._out.values()) or self._failures(queue)
            return f"no node with {device} is left that can be trusted: {reasons}"
        if self._cluster.starting(device):
            return f"no node with {device} came {within}: 'ray status' on the head says why"
        came = f"came back {within}" if self._gone(queue) else "is there"
        return (
            f"no node with {device} {came}: start one and run the same command again, it goes on "
            "where this stopped"
        )

    def _failures(self, queue: GpuQueue) -> str:
        told = (why for cell in queue.placed for why in self._avoided.get(cell, {}).values())
        return f"its trials failed on all of them: {'; '.join(dict.fromkeys(told))}"

    def _room(self, device: str, queue: GpuQueue) -> int:
        """Trials that nodes can hold: those that are there, or that can be started too."""
        there = self._cluster.holding(queue.resources, {*self._out, *self._cluster.leaving})
        return max(there, self._cluster.starting(device))

    def _avoid(self, cell: Cell) -> tuple[str, ...]:
        return tuple(sorted({*self._out, *self._avoided.get(cell, ()), *self._cluster.leaving}))

    def _blame(self, node: NodeAddress, cell: Cell, detail: str) -> None:
        blaming = self._blaming[node.node_id]
        blaming.add(cell)
        if len(blaming) < SICK_CELLS or node.node_id in self._out:
            return
        reason = (
            f"{len(blaming)} trials in a row blame its device, the last one: {detail} (look at "
            "the GPU, and start Ray anew on that node to have it back)"
        )
        self._out[node.node_id] = f"{node.address}: {reason}"
        self._tell("node out", cell.device, reason, node=node)

    def _elsewhere(self, cell: Cell, placed: RunningTrial) -> str | None:
        """Why a trial that came to its own end is to be placed elsewhere, if it is."""
        node = placed.node
        if placed.blamed is None or node is None or self._task(cell) is None:
            return None
        self._avoided[cell][node.node_id] = placed.blamed
        queue = self._queues[cell.device]
        # A cluster that starts nodes starts another when this one, unused, has gone away.
        has_others = self._cluster.holding(queue.resources, self._avoid(cell)) > 0
        return placed.blamed if has_others or self._cluster.starting(cell.device) > 0 else None

    def _tell(  # noqa: PLR0913 - the parts of a fault
        self,
        kind: Kind,
        gpu: str,
        reason: str,
        *,
        cell: Cell | None = None,
        node: NodeAddress | None = None,
        lost_seconds: float = 0.0,
    ) -> None:
        self._note(
            Fault(
                kind=kind,
                gpu=gpu,
                cell=cell,
                node=None if node is None else node.address,
                node_id=None if node is None else node.node_id,
                reason=reason,
                at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
                lost_seconds=round(lost_seconds, 1),
            )
        )


def _longest_silence(task: Task) -> float:
    """Seconds within which a trial that is well says something: after each probe or profile."""
    trial, times = (task.trial, PROFILE_TIMEOUTS) if isinstance(task, ProfileTask) else (task, 1.0)
    return trial.build_timeout_seconds + times * trial.probe_timeout_seconds + SILENT_SECONDS
