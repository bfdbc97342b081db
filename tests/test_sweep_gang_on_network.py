"""Trials on ranks of two nodes that have addresses of their own: a cut cable, and a lost driver."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders.gangs import gone_within
from fakes import network_cluster
from fakes.gang_sweeps import GangSweep, place
from fakes.network_cluster import NetworkCluster, NetworkNode

from orchestrator.run_folder.run_folder import RunFolder
from trials.records.observation import largest_batch

LACKING = network_cluster.missing_requirement()
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(LACKING is not None, reason=LACKING or ""),
]
GONE_SECONDS = 60.0  # some seconds on an idle machine: Ray has to find out first


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetworkCluster]:
    """A head without a core."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as scratch:
        home = tmp_path_factory.mktemp("network")
        cluster = NetworkCluster(home, Path(scratch), stand_in=False)
        try:
            cluster.start_head("--num-cpus=0", "--include-dashboard=false")
            yield cluster
        finally:
            cluster.stop()


@pytest.fixture(scope="module")
def nodes(cluster: NetworkCluster) -> list[NetworkNode]:
    """Three nodes."""
    return [cluster.start_network_node("desk") for _ in range(3)]


def assert_complete(sweep: GangSweep) -> None:
    """Check that a sweep has ended with every probe once, each on two nodes."""
    assert sweep.process.wait(timeout=600) == 0, sweep.said
    assert "Traceback" not in sweep.said
    probes = RunFolder(sweep.out).observations()
    assert len({o.key for o in probes}) == len(probes)
    assert largest_batch(probes) is not None
    assert all(len(set(place(o))) == 2 for o in sweep.measured())


def test_ranks_on_all_nodes_end_with_the_driver_and_its_sweep_continues(
    cluster: NetworkCluster, nodes: list[NetworkNode]
) -> None:
    """Kill -9 of the driver in the middle of a probe; the same command measures the rest."""
    sweep = GangSweep(cluster, 2, "orphans")
    ranks = sweep.ranks(nodes, besides=0)
    sweep.process.kill()
    sweep.process.wait()
    assert gone_within([rank for of_node in ranks for rank in of_node], GONE_SECONDS)
    assert_complete(GangSweep(cluster, 2, "orphans"))


def test_a_node_whose_cable_is_cut_is_replaced(
    cluster: NetworkCluster, nodes: list[NetworkNode]
) -> None:
    """No connection is closed: Ray's health check finds it out, and the ranks that wait end."""
    sweep = GangSweep(cluster, 2)
    ranks = sweep.ranks(nodes, besides=0)
    victim = next(node for node in nodes if node == sweep.second_node(nodes))
    victim.cut()
    waiting = [
        rank for node, own in zip(nodes, ranks, strict=True) for rank in own if node != victim
    ]
    assert gone_within(waiting, GONE_SECONDS)
    assert_complete(sweep)
    (fault,) = RunFolder(sweep.out).faults().faults
    assert victim.address in fault.reason
