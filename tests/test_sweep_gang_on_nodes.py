"""A sweep on a real Ray cluster whose trials train on ranks of two nodes, one of which is lost."""

import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from builders.gangs import gone_within
from fakes.gang_sweeps import GangSweep, place
from fakes.ray_cluster import Cluster, StartedNode

from orchestrator.run_folder.run_folder import RunFolder
from trials.records.observation import Outcome, largest_batch

COLLECTIVES = {"all-gather", "reduce-scatter", "all-reduce"}
SOON_SECONDS = 15.0  # a second where a core is free

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunFolder]:
    """A complete sweep in which a rank of a second node was killed, then such a node."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as scratch:
        cluster = Cluster(tmp_path_factory.mktemp("nodes"), Path(scratch))
        try:
            cluster.start_head("--num-cpus=0", "--include-dashboard=false")
            nodes = [cluster.start_node("desk", amount=2) for _ in range(3)]
            sweep = GangSweep(cluster, gpus=4, copies=2)
            lose_a_rank_then_a_node(sweep, nodes)
            assert sweep.process.wait(timeout=1200) == 0, sweep.said
            assert "Traceback" not in sweep.said
            yield RunFolder(sweep.out)
        finally:
            cluster.stop()


def lose_a_rank_then_a_node(sweep: GangSweep, nodes: Sequence[StartedNode]) -> None:
    """Kill the last rank, and later all processes of the trial's second node."""
    for is_node in (False, True):
        ranks = sweep.ranks(nodes, besides=len(sweep.measured()))
        victim = sweep.second_node(nodes)
        if is_node:
            victim.kill()
        else:
            ranks[nodes.index(victim)][-1].kill()
        assert gone_within([rank for of_node in ranks for rank in of_node], SOON_SECONDS)


def test_a_killed_rank_of_a_second_node_costs_one_probe(run: RunFolder) -> None:
    """It failed by that rank, and the trial went on."""
    failed = [o.detail for o in run.observations() if o.outcome is Outcome.FAILED]
    assert failed == ["rank 3: the child was killed by SIGKILL"]


def test_a_lost_second_node_is_replaced_and_nothing_is_lost_or_measured_twice(
    run: RunFolder,
) -> None:
    """Every probe is there once, its ranks on two nodes; the fault says what happened."""
    probes = run.observations()
    assert len({o.key for o in probes}) == len(probes)
    places = list(dict.fromkeys(place(o) for o in probes if o.measurement is not None))
    for one in places:
        half = len(one) // 2
        assert one == (one[0],) * half + (one[-1],) * half
        assert one[0] != one[-1]
    assert len({node for one in places for node in one}) == 3
    assert {o.environment.node_id for o in probes if o.environment} == {one[0] for one in places}
    (fault,) = run.faults().faults
    assert (fault.kind, fault.gpu) == ("died", "2x2xdesk")
    assert fault.node_id in {one[0] for one in places}
    assert "node" in fault.reason


def test_shards_and_copies_train_on_two_nodes(run: RunFolder) -> None:
    """Its largest batch and the times of its steps and collectives are there."""
    probes = run.observations()
    assert {o.cell.parallel.strategy for o in probes if o.cell.parallel} == {"hsdp"}
    (largest, miss) = largest_batch(probes) or (0, None)
    assert largest > 0
    assert miss is not None
    assert {o.batch_size for o in probes if o.is_timing} >= {largest}
    links = run.links()
    assert {time.collective for link in links for time in link.times} == COLLECTIVES
    assert all(link.detail is None and len(link.node_ids) == 2 for link in links)
    assert len({frozenset(link.node_ids) for link in links}) == len(links)


def test_ranks_on_two_nodes_are_priced_by_two_whole_instances(run: RunFolder) -> None:
    """An instance with one GPU does not do; throughput is that of all ranks."""
    ranking = json.loads((Path(str(run.path)) / "ranking.json").read_text(encoding="utf-8"))
    (row,) = ranking["offers"]
    assert row["instance"] == "pair"
    assert row["usd_per_hour"] == pytest.approx(0.60)
    steps = [
        seconds
        for o in run.observations()
        if o.is_timing and o.batch_size == row["batch_size"]
        for seconds in o.micro_batch_seconds
    ]
    expected = 4 * row["batch_size"] / statistics.median(steps)
    assert row["examples_per_second"] == pytest.approx(expected)
    report = (Path(str(run.path)) / "report.md").read_text(encoding="utf-8")
    assert "4xdesk hsdp, 2 nodes" in report
