"""Placement of trials when nodes, workers and devices fail, with a clock of the test."""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from builders.gangs import link_times
from builders.observations import observation
from fakes.scheduled_cluster import DESK, ECC, HEAD, LAP, N1, N2, SICK, World, node

from orchestrator.planning.cluster_resources import ClusterResources, Node
from orchestrator.planning.faults import Faults
from orchestrator.reporting.sections.trouble_section import faults_section
from orchestrator.scheduling.scheduler import MOST_UNFINISHED_STARTS, PLACEMENTS
from trials.records.observation import Outcome
from trials.records.profile import Logged


def test_no_more_is_placed_than_nodes_can_hold_and_one_for_each_gpu() -> None:
    """Late nodes get trials by the latest observations; no GPU waits for another."""
    world = World([*DESK, *LAP], node("n1", "desk"), node("n2", "desk"), node("n3", "lap"))
    assert world.placed() == [*DESK[:3], *LAP[:2]]
    world.run(DESK[0], N1)
    assert world.scheduler.ended(DESK[0], None) is None
    assert world.placed() == [DESK[3]]


def test_observations_of_a_dead_trial_bound_the_next_search() -> None:
    """The next trial comes first, repeats no probe, and the lost time is recorded."""
    world = World(DESK, node("n1", "desk"))
    world.placed()
    world.run(DESK[0], N1, probes=4)
    before = list(world.observations[DESK[0]])
    assert Outcome.OUT_OF_MEMORY in {o.outcome for o in before}
    world.now += 30.26
    assert world.scheduler.ended(DESK[0], "its node is gone") == "its node is gone"
    assert world.placed()[0] == DESK[0]
    world.run(DESK[0], N2)
    assert world.scheduler.ended(DESK[0], None) is None
    observations = world.observations[DESK[0]]
    assert len({o.key for o in observations}) == len(observations)
    smallest_miss = min(o.batch_size for o in before if o.outcome is Outcome.OUT_OF_MEMORY)
    assert all(o.batch_size < smallest_miss for o in observations[len(before) :])
    (fault,) = world.faults
    assert (fault.kind, fault.cell) == ("died", DESK[0])
    assert (fault.node, fault.node_id, fault.lost_seconds) == ("10.0.0.1", "n1", 30.3)
    assert fault.at.endswith("+00:00")


def test_a_trial_that_dies_without_progress_is_given_up() -> None:
    """Progress resets the number of tries, as a spot node may be taken away any number of times."""
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


@pytest.mark.parametrize(
    "result",
    [observation(1, Outcome.HOST_OUT_OF_MEMORY, cell=DESK[0]), link_times(DESK[0])],
    ids=["no verdict", "times of links"],
)
def test_results_without_a_verdict_on_a_probe_are_no_progress(result: Logged) -> None:
    """A trial that reports one and then dies is not placed for ever."""
    world = World(DESK[:1], node("n1", "desk"))
    for _ in range(PLACEMENTS):
        assert world.placed() == DESK[:1]
        world.scheduler.started(DESK[0])
        world.scheduler.located(DESK[0], N1)
        world.scheduler.observed(result)
        world.scheduler.ended(DESK[0], "its worker died")
    assert world.placed() == []
    assert world.scheduler.died.keys() == {DESK[0]}


def test_a_spent_budget_waits_for_trials_that_run_alone() -> None:
    """Their probes are paid for; a trial that waits for a node is placed in vain."""
    world = World(DESK, node("n1", "desk"))
    assert world.placed() == DESK[:2]
    world.run(DESK[0], N1, probes=1)
    world.scheduler.is_spent = lambda: True
    assert world.placed() == []
    assert not world.scheduler.is_over
    world.scheduler.ended(DESK[0], None)
    assert world.scheduler.is_over


def test_a_node_that_has_not_finished_starting_costs_no_placement() -> None:
    """Its trials find files missing; after a few such deaths the file counts as never there."""
    world = World(DESK[:1], node("n1", "desk"))
    missing = "FileNotFoundError: [Errno 2] No such file or directory: 'session'"
    for _ in range(MOST_UNFINISHED_STARTS + PLACEMENTS - 1):
        assert world.placed() == DESK[:1]
        world.scheduler.started(DESK[0])
        assert world.scheduler.ended(DESK[0], missing) == missing
        assert world.scheduler.died == {}
    assert world.placed() == DESK[:1]
    world.scheduler.started(DESK[0])
    world.scheduler.ended(DESK[0], missing)
    assert world.placed() == []
    assert missing in world.scheduler.died[DESK[0]]


def test_a_device_that_fails_two_cells_is_excluded() -> None:
    """The node is named; both cells and the rest complete on the other node."""
    world = World(DESK, node("n1", "desk"), node("n2", "desk"))
    world.placed()
    for cell in DESK[:2]:
        world.run(cell, SICK[0])
        assert world.scheduler.ended(cell, None) == ECC
    (out,) = [fault for fault in world.faults if fault.kind == "node out"]
    assert (out.node, out.cell) == ("10.0.0.66", None)
    assert out.reason.startswith("2 trials in a row")
    assert ECC in out.reason
    assert out.lost_seconds == 0
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
    assert "| 10.0.0.66 | " in section
    assert Faults(faults=tuple(world.faults)).nodes_out().keys() == {"n1"}


def test_cells_of_a_faulty_node_wait_for_its_replacement() -> None:
    """The cluster removes the idle node, and every cell completes on its successor."""
    world = World(DESK, HEAD, node("n1", "desk"))
    for cell in DESK[:2]:
        assert world.placed() == [cell]
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


def test_a_cell_that_waits_for_another_node_blocks_no_other() -> None:
    """Its own kernels may be at fault: other cells run on the node where it failed."""
    world = World(DESK[:2], HEAD, node("n1", "desk"))
    assert world.placed() == DESK[:1]
    world.run(DESK[0], SICK[0])
    assert world.scheduler.ended(DESK[0], None) == ECC
    assert world.placed() == [DESK[1]]
    world.run(DESK[1], N1, probes=1)
    world.scheduler.ended(DESK[1], "its worker died")
    assert world.placed() == [DESK[1]]
    world.run(DESK[1], N1)
    world.scheduler.ended(DESK[1], None)
    assert world.placed() == [DESK[0]]


def test_an_autoscaler_is_asked_for_no_node_beyond_its_limit() -> None:
    """It would start one of another kind, which takes the place of another GPU's node."""
    world = World(DESK, HEAD)
    assert world.placed() == DESK[:1]
    world.scheduler.update(ClusterResources((HEAD, node("n1", "desk"))))
    assert world.placed() == []
    world.run(DESK[0], N1)
    world.scheduler.ended(DESK[0], None)
    assert world.placed() == [DESK[1]]


def test_a_trial_that_died_begins_before_any_later_one() -> None:
    """A worker that becomes free would go to a trial that is placed later."""
    world = World(DESK, node("n1", "desk"), node("n2", "desk"))
    assert world.placed() == DESK[:3]
    world.run(DESK[0], N1, probes=1)
    world.run(DESK[1], N2, probes=1)
    world.scheduler.ended(DESK[0], "its node is gone")
    assert world.placed() == DESK[:1]
    world.scheduler.ended(DESK[1], None)
    assert world.placed() == []
    world.run(DESK[0], N2)
    assert world.placed() == [DESK[3]]


def test_a_cell_without_a_replacement_node_is_given_up() -> None:
    """The cluster may keep an idle node: the wait for another one ends at its limit."""
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
    assert (world.faults[-1].kind, world.faults[-1].gpu) == ("no node", "desk")
    world.scheduler.started(DESK[0])  # another node came after all
    assert world.scheduler.died == {}
    assert not world.scheduler.is_over


def test_a_cell_that_fails_on_every_node_excludes_none() -> None:
    """A fault of its kernels looks the same; each node tries it once, then it is given up."""
    world = World(DESK[:1], node("n1", "desk"), node("n2", "desk"))
    for where, avoided in zip(SICK, [(), ("n1",)], strict=True):
        placement = world.scheduler.next()
        assert placement is not None
        assert (placement.task.cell, placement.avoid) == (DESK[0], avoided)
        world.run(DESK[0], where)
        moved = world.scheduler.ended(DESK[0], None)
    assert moved is None
    assert world.scheduler.is_over
    assert {fault.kind for fault in world.faults} == {"device"}


def test_only_trials_that_ran_die_when_ray_stops() -> None:
    """Trials that waited for a node are placed again as if never placed."""
    world = World([*DESK[:3], *LAP[:1]], node("n1", "desk"), node("n2", "desk"))
    assert world.placed() == [*DESK[:3], *LAP[:1]]
    world.run(DESK[0], N1, probes=1)
    for _ in range(2):
        world.scheduler.update(ClusterResources((node("n1", "desk"), node("n2", "desk"))))
        world.now += 11
    assert set(world.scheduler.no_node) == set(LAP[:1])
    assert world.scheduler.interrupted("the head is gone") == DESK[:1]
    died = [(f.cell, f.reason) for f in world.faults if f.kind == "died"]
    assert died == [(DESK[0], "the head is gone")]
    assert set(world.placed()) == set(DESK[:3])
    assert world.scheduler.died == {}
    world.scheduler.started(LAP[0])  # it was given up, and a node came after all
    assert not world.scheduler.no_node


def test_a_verdict_acquits_a_device() -> None:
    """Errors before it neither move the trial nor count against the node."""
    world = World(DESK[:2], node("n1", "desk"), node("n2", "desk"))
    world.placed()
    world.run(DESK[0], SICK[0], probes=1)
    world.run(DESK[0], N1, probes=1)
    world.scheduler.observed(observation(64, Outcome.OUT_OF_MEMORY, cell=DESK[0]))
    assert world.scheduler.ended(DESK[0], None) is None
    assert world.faults == []
    world.run(DESK[1], SICK[0])
    assert world.scheduler.ended(DESK[1], None) == ECC
    assert {fault.kind for fault in world.faults} == {"device"}


def test_an_error_before_the_node_is_known_moves_no_trial() -> None:
    """There is no node to keep the cell away from."""
    world = World([DESK[0], LAP[0]], node("n1", "desk"), node("n2", "desk"))
    world.placed()
    world.scheduler.started(DESK[0])
    world.scheduler.observed(observation(1, Outcome.FAILED, detail=ECC, cell=DESK[0]))
    world.scheduler.update(ClusterResources((node("n1", "desk"),)))
    assert world.scheduler.ended(DESK[0], None) is None
    assert world.faults == []


def test_a_trial_that_never_began_loses_no_time() -> None:
    """However long it waited for a node."""
    world = World(DESK[:1], node("n1", "desk"))
    world.placed()
    world.now += 500
    assert world.scheduler.ended(DESK[0], "Ray forgot it") == "Ray forgot it"
    assert [fault.lost_seconds for fault in world.faults] == [0]


def test_a_silent_trial_is_reported_with_a_complaint() -> None:
    """Its GPU is not given up, even where the list of nodes lacks the trial's node."""
    world = World(DESK[:2], node("n1", "desk"))
    world.placed()
    world.run(DESK[0], N1, probes=1)
    assert world.scheduler.update(ClusterResources(())) == {}
    world.now += 1e5
    silent = world.scheduler.update(ClusterResources(()))
    assert list(silent) == DESK[:1]
    assert "no report" in silent[DESK[0]]
    assert not world.scheduler.no_node


def test_placing_a_trial_does_not_look_at_every_node_again() -> None:
    """A cluster of a thousand nodes would take a millisecond for each, and so for each trial."""
    looks: list[str | None] = []

    @dataclass(frozen=True, slots=True)
    class WatchedNode(Node):
        def holding(self, request: Mapping[str, float]) -> int:
            looks.append(self.node_id)
            return Node.holding(self, request)

    nodes = [WatchedNode({"CPU": 1.0, "desk": 1.0}, None, f"n{number}") for number in range(4)]
    world = World(DESK, *nodes)
    before = len(looks)
    assert world.placed() == DESK
    assert len(looks) - before == len(nodes)
    world.scheduler.update(ClusterResources(tuple(nodes[:2])))
    assert world.placed() == []
