"""A simulated cluster and clock, whose nodes and devices fail on demand."""

from collections import defaultdict
from collections.abc import Sequence

from builders.observations import environment
from builders.runs import ONE_CELL, LineDevice, spec_of

from orchestrator.planning.cluster_resources import SCALES_TO, ClusterResources, Node
from orchestrator.planning.faults import Fault
from orchestrator.planning.plan import trial_task
from orchestrator.scheduling.node_queue import NodeAddress
from orchestrator.scheduling.scheduler import Scheduler
from trials.child_process.forked_child import ProbeEnd
from trials.records.cell import Cell
from trials.records.messages import ProbeRequest
from trials.records.observation import Observation, Outcome
from trials.run_trial import run_trial
from trials.trial import TrialTask, next_probe

SPEC = spec_of(
    ONE_CELL.replace("[cpu]", "[desk, lap]").replace("[16]", "[8, 16, 24, 32]")
    + """\
catalog:
  gpus:
    - {key: desk, kind: cpu, usable_memory_bytes: 100000000, source: me, recorded: 2026-01-31}
    - {key: lap, kind: cpu, usable_memory_bytes: 100000000, source: me, recorded: 2026-01-31}
"""
)
DESK = [cell for cell in SPEC.all_cells() if cell.gpu == "desk"]
LAP = [cell for cell in SPEC.all_cells() if cell.gpu == "lap"]
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
N1, N2 = NodeAddress("n1", "10.0.0.1"), NodeAddress("n2", "10.0.0.2")
SICK = NodeAddress("n1", "10.0.0.66"), NodeAddress("n2", "10.0.0.67")


HEAD = Node({SCALES_TO + "desk": 1.0}, None, "head")  # of a cluster that can start one desk


def node(node_id: str, *keys: str) -> Node:
    """A node with one core and one of each of these resources."""
    return Node({"CPU": 1.0} | dict.fromkeys(keys, 1.0), None, node_id)


class Sick:
    """A prober whose device is broken."""

    def probe(self, request: ProbeRequest, *, fresh: bool = False) -> ProbeEnd:
        del request, fresh
        return ProbeEnd(Outcome.FAILED, ECC)


class World:
    """Cluster, clock and observations of a simulated driver."""

    def __init__(
        self,
        cells: Sequence[Cell],
        *nodes: Node,
        nodes_out: dict[str, str] | None = None,
        wait_seconds: float = 600,
    ) -> None:
        self.now = 0.0
        self.observations: dict[Cell, list[Observation]] = defaultdict(list)
        self.faults: list[Fault] = []
        self.scheduler = Scheduler(
            cells,
            self._task,
            {key: {"CPU": 1.0, key: 1.0} for key in ("desk", "lap")},
            ClusterResources(nodes),
            wait_seconds=wait_seconds,
            nodes_out=nodes_out or {},
            note=self.faults.append,
            clock=lambda: self.now,
        )

    def _task(self, cell: Cell) -> TrialTask | None:
        task = trial_task(SPEC, SPEC.merged_catalog(), cell, self.observations[cell])
        return None if next_probe(task, task.done) is None else task

    def placed(self) -> list[Cell]:
        """Cells of the trials that can be placed now."""
        cells = []
        while (placement := self.scheduler.next()) is not None:
            cells.append(placement.task.cell)
        return cells

    def run(self, cell: Cell, where: NodeAddress, *, probes: int | None = None) -> None:
        """Run a placed trial on a node, to its end or for a number of probes; SICK nodes fail."""
        self.scheduler.started(cell)
        self.scheduler.located(cell, where)
        task = self._task(cell)
        assert task is not None
        device = Sick() if where in SICK else LineDevice(12, environment())
        left = iter(range(10**6 if probes is None else probes))
        run_trial(
            task,
            device,
            self._observed,
            keep_going=lambda: next(left, None) is not None,
        )

    def _observed(self, observation: Observation) -> None:
        self.observations[observation.cell].append(observation)
        self.now += 5
        self.scheduler.observed(observation)
