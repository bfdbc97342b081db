"""Sweeps with killed, disconnected and faulty nodes, and with a replaced head.

Ray, the network and the trials' processes are real; a law with real arithmetic replaces the model,
as five sweeps of real ones would take minutes.
"""

import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from fakes import network_cluster
from fakes.law_worker import LawWorker
from fakes.network_cluster import NetworkCluster, NetworkNode
from fakes.ray_cluster import ClusterSweep
from fakes.ray_sweeps import observations

from orchestrator.planning.plan import trial_task
from orchestrator.ray_backend.trial_worker import NODE_LEAVES
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.spec.spec_file import parse_spec
from trials.child_process.forked_child import ProbeEnd
from trials.records.cell import by_cell
from trials.records.messages import ProbeRequest, Setup
from trials.records.observation import Observation, Outcome, largest_batch, without_superseded
from trials.run_trial import run_trial

# Whoever runs this without the rights is told so: a silent pass would say that it holds.
LACKING = network_cluster.missing_requirement()
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(LACKING is not None, reason=LACKING or ""),
]

SPEC = """\
name: network
gpus: [desk]
cells:
  - models: [llama-tiny]
    recipes: [{method: full, precision: fp32}]
    seq_lens: [32, 48, 64]
workload: {examples: 100, epochs: 1}
max_batch_size: 16
seed: SEED
catalog:
  gpus:
    - {key: desk, kind: cpu, usable_memory_bytes: 14000000, source: test, recorded: 2026-11-20}
"""
SEEDS = (1, 2, 3, 4, 5)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetworkCluster]:
    """A head without a core, and an undisturbed node."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as scratch:
        home = tmp_path_factory.mktemp("network")
        cluster = NetworkCluster(home, Path(scratch), stand_in=True)
        try:
            cluster.start_head("--num-cpus=0", "--include-dashboard=false")
            cluster.start_network_node("desk")
            yield cluster
        finally:
            cluster.stop()


class Law:
    """The prober of an undisturbed trial: the stand-in's law, without its processes."""

    def __init__(self, setup: Setup) -> None:
        self._worker = LawWorker(setup)

    def probe(self, request: ProbeRequest, *, fresh: bool = False) -> ProbeEnd:
        del fresh
        reply = self._worker.probe(request, lambda _: None)
        return ProbeEnd(
            reply.outcome, reply.detail, reply.measurement, self._worker.environment(), 14_000_000
        )


def of_trials_alone(text: str) -> list[Observation]:
    """The observations of undisturbed trials, none of which starts from what others found."""
    spec, recorded = parse_spec(text, "network.yaml"), list[Observation]()
    for cell in spec.all_cells():
        task = trial_task(spec, spec.merged_catalog(), cell, [])
        run_trial(task, Law(task.setup), recorded.append)
    return recorded


def faulty_node(cluster: NetworkCluster, device: str, fault: str) -> NetworkNode:
    """A node on which trials fail, as ``law_worker`` defines it."""
    file = cluster.home / f"fault-{fault}"
    file.write_text(fault, encoding="utf-8")
    return cluster.start_network_node(device, LAW_WORKER_FAULTS=str(file))


def found(observed: Sequence[Observation]) -> dict[str, tuple[int, set[int]]]:
    """The largest batch size of each cell, and the sizes that were timed."""
    sizes = {}
    for cell, of_cell in by_cell(observed).items():
        largest = largest_batch(of_cell)
        assert largest is not None, cell.key
        sizes[cell.key] = largest[0], {o.batch_size for o in of_cell if o.is_timing}
    return sizes


class Sweep(ClusterSweep):
    """A sweep in the background."""

    def observation_count(self, node: NetworkNode | None = None) -> int:
        """Number of observations by now, of one node or all; lines are counted for speed."""
        log = self.out / "observations.jsonl"
        written = log.read_text(encoding="utf-8") if log.exists() else ""
        return written.count("\n" if node is None else node.node_id)

    def cells_on(self, node: NetworkNode) -> set[str]:
        """Keys of the cells that this node has observations of."""
        return {
            o.cell.key
            for o in observations(self.out)
            if o.environment and o.environment.node_id == node.node_id
        }

    def wait(self, *, seconds: float = 120) -> int:
        """Wait until the sweep ends and return its exit code."""
        return self.process.wait(timeout=seconds)


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_and_disconnected_nodes_cost_only_time(cluster: NetworkCluster, seed: int) -> None:
    """Every observation is there once, and the lost time is reported."""
    nodes = [cluster.start_network_node("desk") for _ in range(2)]
    text = SPEC.replace("SEED", str(seed))
    sweep = Sweep(cluster, f"seed{seed}", text)
    chance = random.Random(seed)
    blows = {
        node: (chance.randint(1, 6), blow)
        for node, blow in zip(nodes, (NetworkNode.kill, NetworkNode.cut), strict=True)
    }
    while blows:
        assert sweep.process.poll() is None, sweep.said
        for node, (moment, blow) in list(blows.items()):
            if sweep.observation_count(node) >= moment:
                blow(node)
                del blows[node]
        time.sleep(0.02)
    assert sweep.wait() == 0, sweep.said
    observed = observations(sweep.out)
    assert found(observed) == found(of_trials_alone(text))
    assert len({o.key for o in observed}) == len(observed)
    faults = RunFolder(sweep.out).faults().faults
    assert {fault.node for fault in faults} == {node.address for node in nodes}
    assert sum(fault.lost_seconds for fault in faults) > 0
    report = (sweep.out / "report.md").read_text(encoding="utf-8")
    assert "cut short 2 times" in report
    assert all(node.address in report for node in nodes)
    assert "Traceback" not in sweep.said


def test_nothing_begins_on_a_node_that_is_to_be_preempted(cluster: NetworkCluster) -> None:
    """A notice is a drain to Ray: the trial that runs there is the last."""
    spot = cluster.start_network_node("desk")
    text = SPEC.replace("SEED", "7").replace("[32, 48, 64]", "[32, 40, 48, 56, 64, 72, 80, 88]")
    sweep = Sweep(cluster, "preempted", text)
    while sweep.observation_count(spot) < 2:
        assert sweep.process.poll() is None, sweep.said
        time.sleep(0.02)
    cluster.give_notice(spot)
    before = sweep.cells_on(spot)
    assert sweep.wait() == 0, sweep.said
    # One may have begun while the notice was given; the next, if it waited for it, says why not.
    assert len(sweep.cells_on(spot) - before) <= 1
    faults = {(fault.node, fault.reason) for fault in RunFolder(sweep.out).faults().faults}
    assert faults <= {(spot.address, NODE_LEAVES)}
    observed = observations(sweep.out)
    assert found(observed) == found(of_trials_alone(text))
    assert len({o.key for o in observed}) == len(observed)
    spot.kill()


def test_a_node_with_a_faulty_device_is_named_and_its_trials_complete_elsewhere(
    cluster: NetworkCluster,
) -> None:
    """Every probe fails with a device error; at most two trials are needed to see it."""
    sick = faulty_node(cluster, "desk", "sick")
    text = SPEC.replace("SEED", "0").replace("[32, 48, 64]", "[32, 48, 64, 80]")
    sweep = Sweep(cluster, "sick", text)
    assert sweep.wait() == 0, sweep.said
    observed = observations(sweep.out)
    assert found(observed) == found(of_trials_alone(text))
    failed = [o for o in observed if o.outcome is Outcome.FAILED]
    assert {o.environment.node_id for o in failed if o.environment} == {sick.node_id}
    faults_told = RunFolder(sweep.out).faults().faults
    assert {fault.node for fault in faults_told} == {sick.address}
    assert "uncorrectable ECC" in faults_told[0].reason
    assert sick.address in (sweep.out / "report.md").read_text(encoding="utf-8")
    sick.kill()


def test_timings_of_a_slow_node_are_repeated_before_the_ranking(
    cluster: NetworkCluster,
) -> None:
    """The node does twenty times the work: it is named, and its timings do not count."""
    slow = faulty_node(cluster, "desk", "slow")
    text = SPEC.replace("SEED", "8").replace("[32, 48, 64]", "[32, 36, 40, 44, 48, 52]")
    sweep = Sweep(cluster, "slower", text)
    assert sweep.wait() == 0, sweep.said
    observed = observations(sweep.out)
    assert found(observed) == found(of_trials_alone(text))
    there = {o.key for o in observed if o.environment and o.environment.node_id == slow.node_id}
    assert {o.key for o in observed if o.is_timing} & there
    assert not {o.key for o in without_superseded(observed) if o.is_timing} & there
    assert "again elsewhere" in sweep.said
    slow.kill()


def test_a_probe_that_hangs_is_killed_with_its_reason_and_tried_again(
    cluster: NetworkCluster,
) -> None:
    """It costs its timeout; the sweep continues and every cell completes."""
    node = faulty_node(cluster, "hanging", "hang")
    text = SPEC.replace("SEED", "5\nprobe_timeout_seconds: 4").replace("desk", "hanging")
    sweep = Sweep(cluster, "hanging", text)
    assert sweep.wait() == 0, sweep.said
    observed = observations(sweep.out)
    (hung,) = [o for o in observed if not o.outcome.is_verdict]
    assert (hung.outcome, hung.detail[-12:]) == (Outcome.TIMED_OUT, "4 s, batch 1")
    assert found(observed) == found(of_trials_alone(text))
    assert "Traceback" not in sweep.said
    node.kill()


def test_a_node_that_starts_no_worker_is_given_up_in_time(cluster: NetworkCluster) -> None:
    """The node is up and free: its cells are skipped, and the sweep ends."""
    broken = cluster.home / "broken"
    broken.mkdir()
    ends = "import os, sys\nif 'default_worker.py' in ' '.join(sys.orig_argv):\n    os._exit(1)\n"
    (broken / "sitecustomize.py").write_text(ends, encoding="utf-8")
    mute = cluster.start_network_node("mute", PYTHONPATH=str(broken))
    text = SPEC.replace("SEED", "6").replace("desk", "mute")
    sweep = Sweep(cluster, "mute", text, "--wait-for-nodes", "0.2")
    assert sweep.wait(seconds=240) == 1, sweep.said
    assert f"mute ({mute.node_id[:8]}) " in sweep.said
    assert "Traceback" not in sweep.said
    mute.kill()


def test_a_sweep_resumes_under_a_new_head(
    cluster: NetworkCluster,
) -> None:
    """The old head takes all nodes and the driver with it; the log has what was observed."""
    text = SPEC.replace("SEED", "9")
    sweep = Sweep(cluster, "head", text)
    while sweep.observation_count() < 3:
        assert sweep.process.poll() is None, sweep.said
        time.sleep(0.02)
    cluster.lose()
    os.kill(sweep.process.pid, signal.SIGKILL)
    sweep.process.wait()
    before = [o.key for o in observations(sweep.out)]
    cluster.start_head("--num-cpus=0", "--include-dashboard=false")
    cluster.start_network_node("desk")
    assert Sweep(cluster, "head", text).wait() == 0, sweep.said
    observed = observations(sweep.out)
    keys = [o.key for o in observed]
    assert keys[: len(before)] == before
    assert found(observed) == found(of_trials_alone(text))
    assert len(keys) == len(set(keys))
    plan = json.loads((sweep.out / "plan.json").read_text(encoding="utf-8"))
    assert len(plan["complete"]) == 3
