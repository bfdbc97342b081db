"""Placement of trials when nodes, workers and devices fail, with a clock of the test."""

from fakes.scheduled_cluster import DESK, ECC, HEAD, LAP, N1, N2, SICK, World, node

from orchestrator.planning.cluster_resources import ClusterResources
from orchestrator.planning.faults import Faults
from orchestrator.reporting.sections.fault_section import faults_section
from orchestrator.scheduling.scheduler import PLACEMENTS
from trials.records.observation import Outcome


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
    world.now += 30
    assert world.scheduler.ended(DESK[0], "its node is gone") == "its node is gone"
    assert world.placed()[0] == DESK[0]
    world.run(DESK[0], N2)
    assert world.scheduler.ended(DESK[0], None) is None
    observations = world.observations[DESK[0]]
    assert len({o.key for o in observations}) == len(observations)
    smallest_miss = min(o.batch_size for o in before if o.outcome is Outcome.OUT_OF_MEMORY)
    assert all(o.batch_size < smallest_miss for o in observations[len(before) :])
    (fault,) = world.faults
    assert (fault.kind, fault.node, fault.lost_seconds) == ("died", "10.0.0.1", 30)


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


def test_a_cell_that_waits_for_another_node_blocks_no_other() -> None:
    """Its own kernels may be at fault: other cells run on the node where it failed."""
    world = World(DESK, HEAD, node("n1", "desk"))
    world.placed()
    world.run(DESK[0], SICK[0])
    assert world.scheduler.ended(DESK[0], None) == ECC
    assert world.placed() == [DESK[2]]
    world.run(DESK[1], N1)
    world.scheduler.ended(DESK[1], None)
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


def test_a_cell_that_fails_on_every_node_excludes_none() -> None:
    """A fault of its kernels looks the same; each node tries it once, then it is given up."""
    world = World(DESK[:1], node("n1", "desk"), node("n2", "desk"))
    for where in SICK:
        assert world.placed() == DESK[:1]
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
