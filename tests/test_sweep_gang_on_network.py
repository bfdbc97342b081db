"""Trials on ranks of two nodes with addresses of their own: driver, raylet and cable are lost."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders.gangs import gone_within
from fakes import network_cluster
from fakes.gang_sweeps import GangSweep, place
from fakes.network_cluster import NetworkCluster, NetworkNode

from orchestrator.ray_backend.trial_worker import NODE_LEAVES
from orchestrator.run_folder.run_folder import RunFolder
from trials.recipes.parallel import STRATEGIES
from trials.records.observation import largest_batch

LACKING = network_cluster.missing_requirement()
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(LACKING is not None, reason=LACKING or ""),
]
ZERO = "zero: {reduce_bucket_size: 20000, allgather_bucket_size: 20000}"
ALL = f"""\
  - models: [llama-tiny]
    recipes: [{{method: lora, lora_rank: 4, precision: bf16}}]
    seq_lens: [32]
    parallel:
      - {{gpus: 4, nodes: 2, strategy: hsdp, replicas: 2}}
      - {{gpus: 2, nodes: 2, strategy: ddp}}
      - {{gpus: 2, nodes: 2, strategy: deepspeed-zero2, {ZERO}}}
      - {{gpus: 4, nodes: 2, strategy: tp}}
      - {{gpus: 4, nodes: 2, strategy: deepspeed-zero1, {ZERO}}}
      - {{gpus: 4, nodes: 2, strategy: deepspeed-zero3}}
"""
DDP = """\
  - models: [llama-tiny]
    recipes: [{method: lora, lora_rank: 4, precision: bf16}]
    seq_lens: [32]
    parallel: [{gpus: 4, nodes: 2, strategy: ddp}]
"""
SOON_SECONDS = 1.0  # by the kernel; Ray alone takes three
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
    return [cluster.start_network_node("desk", amount=2) for _ in range(3)]


def assert_complete(sweep: GangSweep) -> None:
    """Check that a sweep has ended with every probe once, each on two nodes."""
    assert sweep.process.wait(timeout=2400) == 0, sweep.said
    assert "Traceback" not in sweep.said
    probes = RunFolder(sweep.out).observations()
    assert len({o.key for o in probes}) == len(probes)
    for key in {o.cell.key for o in probes}:
        assert largest_batch([o for o in probes if o.cell.key == key]) is not None
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


def test_ranks_end_with_the_raylet_of_their_second_node_and_it_is_replaced(
    cluster: NetworkCluster, nodes: list[NetworkNode]
) -> None:
    """Kill -9 of Ray's process alone: no rank is left on either node, and the trial goes on."""
    sweep = GangSweep(cluster, 2, "raylet")
    ranks = sweep.ranks(nodes, besides=0)
    victim = next(node for node in nodes if node == sweep.second_node(nodes))
    worker = victim.gang[0].parent()
    assert worker is not None
    victim.kill_raylet()
    assert gone_within([worker], SOON_SECONDS)
    assert gone_within([rank for of_node in ranks for rank in of_node], GONE_SECONDS)
    assert_complete(sweep)
    (fault,) = RunFolder(sweep.out).faults().faults
    assert victim.address in fault.reason
    nodes[nodes.index(victim)] = cluster.start_network_node("desk", amount=2)


@pytest.mark.usefixtures("nodes")
def test_every_strategy_trains_on_two_nodes_that_have_addresses(cluster: NetworkCluster) -> None:
    """Two or four ranks by DeepSpeed's stages, hsdp, ddp and tp, in groups of a node."""
    sweep = GangSweep(cluster, 2, "strategies", ALL)
    assert_complete(sweep)
    layouts = [o.cell.parallel for o in sweep.measured()]
    assert {layout.strategy for layout in layouts if layout is not None} == set(STRATEGIES)


def test_no_trial_of_ranks_begins_where_a_node_is_to_be_preempted(
    cluster: NetworkCluster, nodes: list[NetworkNode]
) -> None:
    """The trial that runs on its second node is the last there."""
    sweep = GangSweep(cluster, 4, "preempted", DDP)
    while not sweep.measured():
        assert sweep.process.poll() is None, sweep.said
        time.sleep(0.02)
    spot = next(node for node in nodes if node == sweep.second_node(nodes))
    cluster.give_notice(spot)
    before = cells_on(sweep, spot)
    assert_complete(sweep)
    assert len(before) == 1
    assert cells_on(sweep, spot) == before
    assert {o.cell.key for o in sweep.measured()} > before
    # None waits there for a worker of its second part either.
    assert {fault.reason for fault in RunFolder(sweep.out).faults().faults} <= {NODE_LEAVES}
    spot.kill()
    nodes[nodes.index(spot)] = cluster.start_network_node("desk", amount=2)


def cells_on(sweep: GangSweep, node: NetworkNode) -> set[str]:
    """Cells that were measured on a node by now."""
    return {o.cell.key for o in sweep.measured() if node.node_id in place(o)}


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
