"""Where trials go when nodes, workers and devices fail, by a clock of the test's own."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest
from builders.observations import environment
from builders.runs import ONE_CELL, LineDevice, spec_of

from orchestrator.planning.cluster_resources import SCALES_TO, ClusterResources, Node
from orchestrator.planning.faults import Fault, Faults
from orchestrator.planning.plan import make_plan, trial_task
from orchestrator.reporting.sections.fault_section import faults_section
from orchestrator.scheduling.node_queue import NodeAddress
from orchestrator.scheduling.scheduler import PLACEMENTS, Scheduler
from trials.child_process.fork_server import ProbeEnd
from trials.records.cell import Cell
from trials.records.messages import ProbeRequest
from trials.records.observation import Observation, Outcome
from trials.trial import TrialTask, next_probe, run_trial

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
    """A node that carries one of each of these, and a core."""
    return Node({"CPU": 1.0} | dict.fromkeys(keys, 1.0), None, node_id)


class Sick:
    """A prober whose device is broken."""

    def probe(self, request: ProbeRequest, *, fresh: bool = False) -> ProbeEnd:
        del request, fresh
        return ProbeEnd(Outcome.FAILED, ECC)


class World:
    """A cluster, a clock and the observations: what a driver has."""

    def __init__(
        self,
        cells: Sequence[Cell],
        *nodes: Node,
        nodes_out: dict[str, str] | None = None,
        wait_seconds: float = 600,
    ) -> None:
        self.now = 0.0
        self.known: dict[Cell, list[Observation]] = defaultdict(list)
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
        task = trial_task(SPEC, SPEC.merged_catalog(), cell, self.known[cell])
        return None if next_probe(task, task.done) is None else task

    def placed(self) -> list[Cell]:
        """Places what can be placed now."""
        found = []
        while (placement := self.scheduler.next()) is not None:
            found.append(placement.task.cell)
        return found

    def run(self, cell: Cell, where: NodeAddress, *, probes: int | None = None) -> None:
        """Runs a placed trial on a node, to its end or for so many probes; SICK ones ail."""
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
        self.known[observation.cell].append(observation)
        self.now += 5
        self.scheduler.observed(observation)


def test_no_more_is_placed_than_nodes_can_hold_and_one_for_each_gpu() -> None:
    """What comes late is placed by all that is known until then; no GPU waits for another."""
    world = World([*DESK, *LAP], node("n1", "desk"), node("n2", "desk"), node("n3", "lap"))
    assert world.placed() == [*DESK[:3], *LAP[:2]]
    world.run(DESK[0], N1)
    assert world.scheduler.ended(DESK[0], None) is None
    assert world.placed() == [DESK[3]]


def test_what_a_trial_saw_before_its_node_died_bounds_the_search_of_the_next() -> None:
    """It is placed first, asks for nothing that was told, and the time lost is."""
    world = World(DESK, node("n1", "desk"))
    world.placed()
    world.run(DESK[0], N1, probes=4)
    before = list(world.known[DESK[0]])
    assert Outcome.OUT_OF_MEMORY in {o.outcome for o in before}
    world.now += 30
    assert world.scheduler.ended(DESK[0], "its node is gone") == "its node is gone"
    assert world.placed()[0] == DESK[0]
    world.run(DESK[0], N2)
    assert world.scheduler.ended(DESK[0], None) is None
    seen = world.known[DESK[0]]
    assert len({o.key for o in seen}) == len(seen)
    smallest_miss = min(o.batch_size for o in before if o.outcome is Outcome.OUT_OF_MEMORY)
    assert all(o.batch_size < smallest_miss for o in seen[len(before) :])
    (fault,) = world.faults
    assert (fault.kind, fault.node, fault.lost_seconds) == ("died", "10.0.0.1", 30)


def test_a_trial_that_dies_without_a_word_is_given_up_with_the_reason() -> None:
    """Each time it gets on it has its tries anew: a spot node may be taken away any number."""
    world = World(DESK[:1], node("n1", "desk"))
    for _ in range(PLACEMENTS + 2):
        assert world.placed() == DESK[:1]
        world.run(DESK[0], N1, probes=1)
        world.scheduler.ended(DESK[0], "taken away")
    for _ in range(PLACEMENTS - 1):
        assert world.placed() == DESK[:1]
        world.scheduler.started(DESK[0])
        world.scheduler.ended(DESK[0], "its worker died")
    assert world.placed() == []
    assert world.scheduler.is_over
    reason = f"its trial died {PLACEMENTS} times in a row, the last time: its worker died"
    assert world.scheduler.died == {DESK[0]: reason}


def test_a_device_that_fails_two_cells_gets_no_more_and_they_go_elsewhere() -> None:
    """The node is named; both cells end well on the other one, and so does the rest."""
    world = World(DESK, node("n1", "desk"), node("n2", "desk"))
    world.placed()
    for cell in DESK[:2]:
        world.run(cell, SICK[0])
        assert world.scheduler.ended(cell, None) == ECC
    (out,) = [fault for fault in world.faults if fault.kind == "node out"]
    assert (out.node, out.cell) == ("10.0.0.66", None)
    assert out.reason.startswith("2 trials in a row blame its device")
    left = list(DESK)
    world.run(DESK[2], N2)
    world.scheduler.ended(DESK[2], None)
    left.remove(DESK[2])
    while (placement := world.scheduler.next()) is not None:
        assert placement.avoid == ("n1",)
        world.run(placement.task.cell, N2)
        assert world.scheduler.ended(placement.task.cell, None) is None
        left.remove(placement.task.cell)
    assert left == []
    assert world.scheduler.is_over
    section = faults_section(Faults(faults=tuple(world.faults)))
    assert "| 10.0.0.66 | taken out " in section
    assert Faults(faults=tuple(world.faults)).nodes_out().keys() == {"n1"}


def test_where_one_node_at_a_time_is_started_the_cells_of_a_sick_one_wait_for_the_next() -> None:
    """The cluster takes the sick one away when idle; every cell ends well on its successor."""
    world = World(DESK, HEAD, node("n1", "desk"))
    assert world.placed() == DESK[:2]
    for cell in DESK[:2]:
        world.run(cell, SICK[0])
        assert world.scheduler.ended(cell, None) == ECC
    left = world.placed()
    for nodes in ((HEAD, node("n1", "desk")), (HEAD,), (HEAD, node("n2", "desk"))):
        world.scheduler.update(ClusterResources(nodes))
        world.now += 300
    done = []
    while left:
        cell = left.pop(0)
        world.run(cell, N2)
        assert world.scheduler.ended(cell, None) is None
        done.append(cell)
        left += world.placed()
    assert sorted(done, key=DESK.index) == DESK
    assert world.scheduler.is_over
    assert [fault.kind for fault in world.faults] == ["device", "node out", "device"]


def test_a_cell_that_waits_for_another_node_holds_up_none_that_need_not() -> None:
    """Its own kernels may be what fails: the rest is measured where it failed."""
    world = World(DESK, HEAD, node("n1", "desk"))
    world.placed()
    world.run(DESK[0], SICK[0])
    assert world.scheduler.ended(DESK[0], None) == ECC
    assert world.placed() == [DESK[2]]
    world.run(DESK[1], N1)
    world.scheduler.ended(DESK[1], None)
    assert world.placed() == [DESK[3]]


def test_a_lone_cell_whose_node_is_not_replaced_is_given_up_with_what_failed() -> None:
    """The cluster may keep an idle node: it is waited for another so long, and no longer."""
    nodes = HEAD, node("n1", "desk")
    world = World(DESK[:1], *nodes)
    world.placed()
    world.run(DESK[0], SICK[0])
    assert world.scheduler.ended(DESK[0], None) == ECC
    assert world.placed() == DESK[:1]
    for _ in range(2):
        assert not world.scheduler.is_over
        world.scheduler.update(ClusterResources(nodes))
        world.now += 600
    world.scheduler.update(ClusterResources(nodes))
    assert world.scheduler.is_over
    reason = "no node with desk is left that can be trusted: its trials failed on all of them"
    assert (world.scheduler.died, world.scheduler.no_node) == ({DESK[0]: f"{reason}: {ECC}"}, {})


def test_a_cell_that_fails_on_every_node_is_not_held_against_them() -> None:
    """A mistake of its kernels looks alike; it is tried on each, then let be."""
    world = World(DESK[:1], node("n1", "desk"), node("n2", "desk"))
    for where in SICK:
        assert world.placed() == DESK[:1]
        world.run(DESK[0], where)
        moved = world.scheduler.ended(DESK[0], None)
    assert moved is None
    assert world.scheduler.is_over
    assert {fault.kind for fault in world.faults} == {"device"}


def test_where_all_nodes_were_taken_out_the_cells_are_skipped_for_that_reason() -> None:
    """Nothing waits for a node that is there and not to be trusted."""
    world = World(DESK, node("n1", "desk"), nodes_out={"n1": f"10.0.0.1: {ECC}"})
    world.placed()
    for _ in range(2):
        world.scheduler.update(ClusterResources((node("n1", "desk"),)))
        world.now += 11
    assert world.scheduler.is_over
    assert set(world.scheduler.no_node) == set(DESK)
    assert set(world.scheduler.no_node.values()) == {
        f"no node with desk is left that can be trusted: 10.0.0.1: {ECC}"
    }


def test_nothing_is_placed_on_a_node_that_is_leaving() -> None:
    """Its trial runs on as long as it lasts; another one is waited for as long as was asked."""
    first, second = node("n1", "desk"), node("n2", "desk")
    world = World(DESK, first, second)
    assert world.placed() == DESK[:3]
    world.run(DESK[0], N1)
    world.scheduler.update(ClusterResources((replace(first, is_leaving=True), second)))
    assert world.scheduler.ended(DESK[0], None) is None
    assert world.placed() == []  # the other is taken, and its next trial waits
    world.run(DESK[1], N2)
    assert world.scheduler.ended(DESK[1], None) is None
    placement = world.scheduler.next()
    assert placement is not None
    assert (placement.task.cell, placement.avoid) == (DESK[3], ("n1",))
    for _ in range(2):
        world.scheduler.update(ClusterResources((replace(first, is_leaving=True),)))
        world.now += 600
    assert set(world.scheduler.no_node) == {DESK[2], DESK[3]}
    assert "no node with desk came back within 10 minutes" in world.scheduler.no_node[DESK[3]]


@pytest.mark.parametrize(("scales", "seconds"), [(True, 600), (False, 10)])
def test_a_node_that_never_comes_is_waited_for_so_long_and_the_rest_goes_on(
    scales: bool,  # noqa: FBT001 - a parameter
    seconds: float,
) -> None:
    """As long as was asked where a cluster starts nodes; where it does not, there is no hope."""
    head = Node({"CPU": 1.0} | ({SCALES_TO + "desk": 1.0} if scales else {}), None, "head")
    cluster = ClusterResources((head, node("n2", "lap")))
    world = World([*DESK, *LAP], *cluster.nodes)
    world.placed()
    world.scheduler.update(cluster)
    world.now = seconds - 1
    world.run(LAP[0], N2, probes=1)
    world.now = seconds - 1
    world.scheduler.update(cluster)
    assert not world.scheduler.no_node
    world.now = seconds + 1
    world.scheduler.update(cluster)
    assert set(world.scheduler.no_node) == set(DESK)
    (reason,) = set(world.scheduler.no_node.values())
    assert ("within 10 minutes" in reason) == scales
    assert not world.scheduler.is_over
    plan = make_plan(SPEC, SPEC.merged_catalog(), cluster, []).after(world.scheduler.no_node, {})
    assert {skip.cell for skip in plan.skipped} == set(DESK)
    world.scheduler.started(DESK[0])  # it came after all
    assert not world.scheduler.no_node


def test_a_lone_host_that_is_away_for_a_while_goes_on_where_it_stopped() -> None:
    """Ray is started on it anew, as another node; until then it is waited for as for any other."""
    world = World(DESK[:1], node("n1", "desk"))
    world.placed()
    world.run(DESK[0], N1, probes=2)
    world.scheduler.ended(DESK[0], "its node is gone")
    assert world.placed() == DESK[:1]
    for _ in range(3):
        world.scheduler.update(ClusterResources(()))
        world.now += 150
    assert not world.scheduler.no_node
    world.scheduler.update(ClusterResources((node("n2", "desk"),)))
    world.run(DESK[0], N2)
    assert world.scheduler.ended(DESK[0], None) is None
    assert world.scheduler.is_over


def test_a_host_that_came_back_as_another_node_is_not_waited_for_as_the_one_it_was() -> None:
    """Ray names it anew; when it is taken out then, nothing is left to hope for."""
    world = World(DESK[:3], node("n1", "desk"))
    world.placed()
    world.run(DESK[0], N1, probes=1)
    world.scheduler.ended(DESK[0], "its node is gone")
    world.scheduler.update(ClusterResources(()))
    back = ClusterResources((node("n2", "desk"),))
    world.scheduler.update(back)
    for cell in DESK[:2]:
        world.placed()
        world.run(cell, SICK[1])
        world.scheduler.ended(cell, None)
    world.placed()
    for _ in range(2):
        world.scheduler.update(back)
        world.now += 11
    assert world.scheduler.is_over
    assert "is left that can be trusted: 10.0.0.67: " in world.scheduler.no_node[DESK[2]]


def test_of_two_hosts_that_are_away_the_one_that_did_not_come_back_is_still_waited_for() -> None:
    """Each that comes stands for one of them."""
    world = World(DESK[:3], node("n3", "desk"), node("n4", "desk"))
    world.placed()
    world.scheduler.update(ClusterResources(()))
    back = ClusterResources((node("n1", "desk"),))
    world.scheduler.update(back)
    for cell in DESK[:2]:
        world.run(cell, SICK[0])
        world.scheduler.ended(cell, None)
    world.placed()
    for seconds in (599, 2):
        world.scheduler.update(back)
        assert not world.scheduler.is_over
        world.now += seconds
    world.scheduler.update(back)
    assert world.scheduler.is_over


def test_a_node_that_others_use_is_waited_for() -> None:
    """It is there; whose turn it is, Ray knows."""
    cluster = ClusterResources((replace(node("n1", "desk"), used={"CPU": 1.0, "desk": 1.0}),))
    world = World(DESK, *cluster.nodes)
    world.placed()
    for _ in range(5):
        world.scheduler.update(cluster)
        world.now += 1e5
    assert not world.scheduler.no_node


def test_a_node_that_the_trials_of_another_gpu_use_is_waited_for() -> None:
    """Two devices of one machine take turns."""
    cluster = ClusterResources((Node({"CPU": 1.0, "desk": 1.0, "lap": 1.0}, None, "n1"),))
    world = World([*DESK, *LAP], *cluster.nodes)
    world.placed()
    for _ in range(5):
        world.run(LAP[0], N1, probes=1)
        world.scheduler.update(cluster)
        world.now += 700
    assert not world.scheduler.no_node


def test_a_node_that_nobody_uses_and_that_starts_no_worker_is_not_waited_for_without_end() -> None:
    """One that came late has time to start a worker; then its GPU is given up, with the reason."""
    world = World(DESK, HEAD)
    world.placed()
    world.scheduler.update(ClusterResources((HEAD,)))
    there = ClusterResources((HEAD, node("n1", "desk")))
    world.now = 599
    world.scheduler.update(there)
    world.now = 599 + 119
    world.scheduler.update(there)
    assert not world.scheduler.no_node
    world.now = 599 + 121
    world.scheduler.update(there)
    assert world.scheduler.is_over
    assert set(world.scheduler.no_node) == set(DESK)
    told = "the node with desk (n1) has been up and free for 2 minutes and started no worker: "
    assert told in world.scheduler.no_node[DESK[0]]
