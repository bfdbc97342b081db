"""A sweep on a real Ray cluster whose trials train on ranks of two nodes, one of which is lost."""

import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import pytest
from builders.gangs import gone_within
from fakes.ray_cluster import Cluster, StartedNode
from fakes.ray_sweeps import observations

from orchestrator.run_folder.run_folder import RunFolder
from trials.records.observation import Observation, Outcome, largest_batch

SPEC = """\
name: nodes
gpus: [desk]
cells:
  - models: [llama-tiny]
    recipes: [{method: full, precision: fp32}]
    seq_lens: [32]
    parallel: [{gpus: 4, nodes: 2, strategy: fsdp2}]
workload: {examples: 100, epochs: 1}
seed: 3
max_batch_size: 8
boundary_repeats: 0
timing: {warmup_steps: 0, warmup_seconds: 0.0, max_steps: 6, max_seconds: 0.2}
catalog:
  gpus:
    - {key: desk, kind: cpu, usable_memory_bytes: 7700000, source: test, recorded: 2026-11-20}
  offers:
    - {gpu: desk, provider: rented, region: here, instance: single, usd_per_hour: 0.10,
       source: test, recorded: 2026-11-20}
    - {gpu: desk, provider: rented, region: here, instance: pair, usd_per_hour: 0.30,
       gpus_per_instance: 2, source: test, recorded: 2026-11-20}
"""
PATIENCE_SECONDS = 300.0  # for what takes seconds on an idle machine
SOON_SECONDS = 15.0  # a second where a core is free


class Sweep:
    """A sweep on a cluster, in the background."""

    def __init__(self, cluster: Cluster) -> None:
        self.out = cluster.home / "run"
        self._log = cluster.home / "run.log"
        spec = cluster.home / "nodes.yaml"
        spec.write_text(SPEC, encoding="utf-8")
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                ["python", "-m", "orchestrator", "sweep", str(spec), "--out", str(self.out)],
                env=cluster.env | {"RAY_ADDRESS": f"{cluster.address}:{cluster.gcs}"},
                cwd=cluster.home,
                stdout=log,
                stderr=log,
            )

    @property
    def said(self) -> str:
        """The whole output."""
        return self._log.read_text(encoding="utf-8")

    def measured(self) -> list[Observation]:
        """Observations by now whose steps ran."""
        found = observations(self.out) if (self.out / "observations.jsonl").exists() else []
        return [o for o in found if o.measurement is not None]

    def ranks(self, nodes: Iterable[StartedNode], besides: int) -> list[list[psutil.Process]]:
        """Ranks of a trial on each of its two nodes, once it has reported more probes than so many.

        A node of the trial has a fork server, the parent of the ranks, and these.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.said
            gangs = [node.gang for node in nodes] if len(self.measured()) > besides else []
            if [len(gang) for gang in gangs if gang] == [4, 4]:
                return [gang[2:] for gang in gangs]
            time.sleep(0.02)
        raise AssertionError(self.said)


def place(o: Observation) -> tuple[str | None, ...]:
    """Nodes of the ranks of a measurement, in their order."""
    assert o.measurement is not None
    return tuple(rank.node_id for rank in o.measurement.ranks)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunFolder]:
    """A complete sweep in which a rank of a second node was killed, then such a node."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as scratch:
        cluster = Cluster(tmp_path_factory.mktemp("nodes"), Path(scratch))
        try:
            cluster.start_head("--num-cpus=0", "--include-dashboard=false")
            nodes = [cluster.start_node("desk", amount=2) for _ in range(3)]
            sweep = Sweep(cluster)
            lose_a_rank_then_a_node(sweep, nodes)
            assert sweep.process.wait(timeout=600) == 0, sweep.said
            assert "Traceback" not in sweep.said
            yield RunFolder(sweep.out)
        finally:
            cluster.stop()


def lose_a_rank_then_a_node(sweep: Sweep, nodes: list[StartedNode]) -> None:
    """Kill the last rank, and all processes of a later trial's second node."""
    for is_node in (False, True):
        before = sweep.measured()
        ranks = sweep.ranks(nodes, besides=len(before))
        second = place(sweep.measured()[-1])[-1]
        victim = next(node for node in nodes if node.node_id == second)
        of_victim = ranks[nodes.index(victim)]
        if is_node:
            victim.kill()
        else:
            of_victim[-1].kill()
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
    (largest, miss) = largest_batch(probes) or (0, None)
    assert largest > 0
    assert miss is not None
    places = list(dict.fromkeys(place(o) for o in probes if o.measurement is not None))
    assert all(one[0] == one[1] != one[2] == one[3] for one in places)
    assert len({node for one in places for node in one}) == 3
    assert {o.environment.node_id for o in probes if o.environment} == {one[0] for one in places}
    (fault,) = run.faults().faults
    assert (fault.kind, fault.gpu, fault.node_id) == ("died", "2x2xdesk", places[0][0])
    assert "node" in fault.reason


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
    assert "4xdesk fsdp2, 2 nodes" in report
