"""Nodes as the scheduler trusts them: room, alternatives and absences."""

from dataclasses import replace

from fakes.scheduled_cluster import DESK, ECC, HEAD, N1, N2, World, node

from orchestrator.planning.cluster_resources import ClusterResources, Node
from orchestrator.scheduling.node_health import NodeHealth
from orchestrator.scheduling.node_queue import GpuQueue

FIRST, SECOND = node("n1", "desk"), node("n2", "desk")


def health(*nodes: Node, excluded: dict[str, str] | None = None) -> NodeHealth:
    """Nodes of a cluster, all trusted unless excluded."""
    return NodeHealth(ClusterResources(nodes), excluded or {})


def queue(*placed: int) -> GpuQueue:
    """The queue of desks, with some of its cells placed."""
    made = GpuQueue({"CPU": 1.0, "desk": 1.0})
    world = World(DESK)
    for index in placed:
        task = world._task(DESK[index])
        assert task is not None
        made.place(DESK[index], task)
    return made


def test_two_cells_exclude_a_node_that_one_cell_cannot() -> None:
    """A verdict in between starts the count anew, and an excluded node is excluded once."""
    nodes = health(FIRST, SECOND)
    assert nodes.blame(N1, DESK[0], ECC) is None
    assert nodes.blame(N1, DESK[0], ECC) is None
    nodes.acquit(N1)
    nodes.acquit(N2)
    assert nodes.blame(N1, DESK[1], ECC) is None
    reason = nodes.blame(N1, DESK[2], "the last error")
    assert reason is not None
    assert reason.startswith("2 ")
    assert "the last error" in reason
    assert nodes.excluded == {"n1": f"10.0.0.1: {reason}"}
    assert nodes.blame(N1, DESK[3], ECC) is None
    assert nodes.excluded == {"n1": f"10.0.0.1: {reason}"}


def test_room_is_that_of_trusted_nodes_and_one_more_or_of_those_that_can_start() -> None:
    """Excluded and leaving nodes hold nothing."""
    wide = Node({"CPU": 8.0, "desk": 3.0}, None, "n3")
    leaving = replace(SECOND, is_leaving=True)
    for nodes, excluded, room in (
        ((FIRST, SECOND, wide), {}, 6),
        ((FIRST, leaving, wide), {}, 5),
        ((FIRST, leaving, wide), {"n3": "sick"}, 2),
        ((HEAD, leaving), {}, 1),
        ((HEAD, FIRST, SECOND), {}, 2),
    ):
        assert health(*nodes, excluded=excluded).room("desk", queue(), died=()) == room
    assert health(FIRST, SECOND, wide).room("desk", queue(0, 1), died=()) == 4
    assert health(FIRST, SECOND, wide).room("desk", queue(0, 1), died={DESK[1]}) == 0


def test_a_cell_avoids_the_nodes_that_it_failed_on() -> None:
    """Beside those that are excluded or leaving; another cell avoids only these."""
    third = replace(node("n3", "desk"), is_leaving=True)
    nodes = health(FIRST, SECOND, third, excluded={"n0": "sick"})
    nodes.keep_away(DESK[0], N1, ECC)
    assert nodes.avoided_by(DESK[0]) == ("n0", "n1", "n3")
    assert nodes.avoided_by(DESK[1]) == ("n0", "n3")
    assert (nodes.has_failed(DESK[0]), nodes.has_failed(DESK[1])) == (True, False)
    assert nodes.has_another(DESK[0], queue())
    nodes.keep_away(DESK[0], N2, ECC)
    assert not nodes.has_another(DESK[0], queue())
    assert nodes.has_another(DESK[1], queue())
    assert [n.node_id for n in nodes.usable(queue(0))] == []
    assert [n.node_id for n in nodes.usable(queue(0, 1))] == ["n1", "n2"]
    nodes.cluster = ClusterResources((HEAD, FIRST))
    assert nodes.has_another(DESK[0], queue())


def test_failures_of_placed_cells_are_named_once() -> None:
    """In the order of the cells and nodes; those of other cells are left out."""
    nodes = health(FIRST, SECOND)
    nodes.keep_away(DESK[0], N1, "a")
    nodes.keep_away(DESK[0], N2, "b")
    nodes.keep_away(DESK[1], N1, "a")
    nodes.keep_away(DESK[2], N1, "c")
    assert nodes.failures(queue(0, 1, 3)).endswith(": a; b")


def test_nodes_that_may_return_are_absent() -> None:
    """Those that are up, excluded or never were expected are not."""
    leaving = replace(SECOND, is_leaving=True)
    desks = queue()
    desks.expected_nodes = {"n1", "n2", "n3", "n4"}
    assert health(FIRST, leaving, excluded={"n4": "sick"}).absent(desks) == {"n2", "n3"}
