"""The wait for nodes that start, return, are in use or start no worker."""

from dataclasses import replace

import pytest
from fakes.scheduled_cluster import DESK, ECC, HEAD, LAP, N1, N2, SICK, SPEC, World, node

from orchestrator.planning.cluster_resources import SCALES_TO, ClusterResources, Node
from orchestrator.planning.plan import make_plan
from orchestrator.scheduling.node_health import NodeHealth
from orchestrator.scheduling.node_queue import GpuQueue
from orchestrator.scheduling.node_wait import WORKER_SECONDS, NodeWait


def test_cells_are_skipped_when_all_their_nodes_are_excluded() -> None:
    """The scheduler does not wait for a node that is up but excluded."""
    world = World(DESK, node("n1", "desk"), nodes_out={"n1": f"10.0.0.1: {ECC}"})
    world.placed()
    for _ in range(2):
        world.scheduler.update(ClusterResources((node("n1", "desk"),)))
        world.now += 11
    assert world.scheduler.is_over
    assert set(world.scheduler.no_node) == set(DESK)
    (reason,) = set(world.scheduler.no_node.values())
    assert reason.endswith(f": 10.0.0.1: {ECC}")


def test_nothing_is_placed_on_a_node_that_is_leaving() -> None:
    """Its trial runs to the end; the wait for another node lasts as long as the user set."""
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
    assert "within 10 minutes" in world.scheduler.no_node[DESK[3]]


@pytest.mark.parametrize(("scales", "seconds"), [(True, 600), (False, 10)])
def test_the_wait_for_a_node_ends_and_other_cells_continue(
    scales: bool,  # noqa: FBT001 - a parameter
    seconds: float,
) -> None:
    """It lasts the set time on a cluster that starts nodes, and no time on one that does not."""
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


def test_a_lone_host_that_restarts_resumes_its_trial() -> None:
    """Ray restarts on it as a new node; the wait for it is that for any other node."""
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


def test_a_host_that_returned_is_no_longer_awaited_under_its_old_id() -> None:
    """Ray gives it a new id; if that node is excluded, no other is expected."""
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
    assert "10.0.0.67: " in world.scheduler.no_node[DESK[2]]


def test_an_absent_host_is_awaited_when_another_returned() -> None:
    """Each host that returns stands for one of them."""
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
    """The node is up, and Ray decides whose turn it is."""
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


def test_the_wait_for_a_free_node_without_a_worker_ends() -> None:
    """A late node gets time to start a worker; then its GPU is skipped with the reason."""
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
    reason = "the node with desk (n1) has been up and free for 2 minutes"
    assert reason in world.scheduler.no_node[DESK[0]]


@pytest.mark.parametrize(("wait", "patience"), [(600.0, 10.0), (5.0, 5.0)])
def test_a_wait_without_hope_ends_at_the_shorter_limit(wait: float, patience: float) -> None:
    """Ten seconds, for a list of nodes that lags behind; less where less was asked for."""
    desks = GpuQueue({"CPU": 1.0, "desk": 1.0})
    nodes = NodeHealth(ClusterResources(()), {})
    waits = NodeWait("desk", wait)
    assert waits.failure(desks, nodes, 100.0) is None
    assert waits.failure(desks, nodes, 100.0 + patience - 0.1) is None
    reason = waits.failure(desks, nodes, 100.0 + patience)
    assert reason is not None
    assert "is up" in reason
    waits.reset()
    assert waits.failure(desks, nodes, 100.0 + patience) is None


def test_a_free_node_has_two_minutes_from_the_time_that_it_is_free() -> None:
    """The clock starts anew when the node goes away; the reason has the minutes and the node."""
    there = NodeHealth(ClusterResources((node("n1" * 8, "desk"),)), {})
    gone = NodeHealth(ClusterResources((HEAD,)), {})
    placed = World(DESK[:1], node("n1", "desk"))
    placed.placed()
    desks = placed.scheduler._queues["desk"]
    waits = NodeWait("desk", 60.0)
    assert waits.failure(desks, there, 0.0) is None
    assert waits.failure(desks, there, WORKER_SECONDS - 0.1) is None
    reason = waits.failure(desks, there, WORKER_SECONDS)
    assert reason is not None
    assert "for 2 minutes" in reason
    assert f"({'n1' * 4})" in reason
    waits = NodeWait("desk", 600.0)
    assert waits.failure(desks, there, 0.0) is None
    assert waits.failure(desks, gone, 599.9) is None
    assert waits.failure(desks, there, 600.0) is None
    assert waits.failure(desks, there, 600.0 + WORKER_SECONDS - 0.1) is None
    assert "for 2 minutes" in str(waits.failure(desks, there, 600.0 + WORKER_SECONDS))


def test_a_free_node_is_waited_for_as_long_as_was_asked() -> None:
    """Even where no other can start or return: it may be slow to start a worker."""
    world = World(DESK[:1], node("n1", "desk"))
    world.placed()
    desks = world.scheduler._queues["desk"]
    nodes = NodeHealth(ClusterResources((node("n1", "desk"),)), {})
    assert not nodes.absent(desks)
    waits = NodeWait("desk", 600.0)
    assert waits.failure(desks, nodes, 0.0) is None
    assert waits.failure(desks, nodes, 599.0) is None
    assert "for 10 minutes" in str(waits.failure(desks, nodes, 600.0))


def test_the_reason_says_whether_a_node_was_to_start_or_to_return() -> None:
    """And how long it was waited for."""
    desks = GpuQueue({"CPU": 1.0, "desk": 1.0})
    for cluster, expected, parts in (
        ((HEAD,), set(), ("came within 1.5 minutes", "ray status")),
        ((), {"n1"}, ("came back within 1.5 minutes", "start one")),
        ((), set(), ("is up", "start one")),
    ):
        desks.expected_nodes = expected
        nodes = NodeHealth(ClusterResources(cluster), {})
        waits = NodeWait("desk", 90.0)
        waits.failure(desks, nodes, 0.0)
        assert (waits.failure(desks, nodes, 89.0) is None) == bool(cluster or expected)
        reason = str(waits.failure(desks, nodes, 90.0))
        assert "no node with desk" in reason
        assert all(part in reason for part in parts)
