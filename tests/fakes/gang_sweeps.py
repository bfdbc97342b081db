"""Small sweeps on a real Ray cluster whose trials train on ranks of two nodes."""

import time
from collections.abc import Sequence

import psutil

from fakes.ray_cluster import Cluster, ClusterSweep, StartedNode
from fakes.ray_sweeps import observations
from trials.records.observation import Observation

SPEC = """\
name: nodes
gpus: [desk]
cells:
  - models: [llama-tiny]
    recipes: [{method: full, precision: fp32}]
    seq_lens: [LENGTH]
    parallel: [{gpus: GPUS, nodes: 2, STRATEGY}]
MORE
workload: {examples: 100, epochs: 1}
seed: 3
max_batch_size: 8
boundary_repeats: 0
timing: {warmup_steps: 0, warmup_seconds: 0.0, max_steps: 6, max_seconds: 0.2}
catalog:
  gpus:
    - {key: desk, kind: cpu, usable_memory_bytes: MEMORY, source: test, recorded: 2026-11-20}
  offers:
    - {gpu: desk, provider: rented, region: here, instance: single, usd_per_hour: 0.10,
       source: test, recorded: 2026-11-20}
    - {gpu: desk, provider: rented, region: here, instance: pair, usd_per_hour: 0.30,
       gpus_per_instance: 2, source: test, recorded: 2026-11-20}
"""
PATIENCE_SECONDS = 300.0  # for what takes seconds on an idle machine


class GangSweep(ClusterSweep):
    """A sweep in the background whose trials have ranks on two nodes of a cluster.

    Args:
        cluster: the cluster.
        gpus: ranks of a trial.
        name: name of its run; another sweep with that name continues it.
        more: further cells.
        copies: copies of the model, each in shards; None for shards alone.
    """

    def __init__(
        self,
        cluster: Cluster,
        gpus: int,
        name: str = "run",
        more: str = "",
        copies: int | None = None,
    ) -> None:
        self._processes = 2 + gpus // 2  # of a node: fork server, parent of its ranks, and these
        # Of 32 tokens, four or five examples fit, of 64 half as many. Of less than 2^23 bytes none
        # are left for timed collectives.
        words = {
            "GPUS": str(gpus),
            "MEMORY": {2: "10500000", 4: "8400000"}[gpus // (copies or 1)],
            "LENGTH": "32" if copies is None else "64",
            "STRATEGY": f"strategy: hsdp, replicas: {copies}" if copies else "strategy: fsdp2",
            "MORE\n": more,
        }
        text = SPEC
        for word, value in words.items():
            text = text.replace(word, value)
        super().__init__(cluster, name, text)

    def measured(self) -> list[Observation]:
        """Observations by now whose steps ran."""
        found = observations(self.out) if (self.out / "observations.jsonl").exists() else []
        return [o for o in found if o.measurement is not None]

    def ranks(self, nodes: Sequence[StartedNode], besides: int) -> list[list[psutil.Process]]:
        """Ranks on each node, once there are some, and more measurements than so many."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.said
            gangs = [node.gang for node in nodes] if len(self.measured()) > besides else []
            if [len(gang) for gang in gangs if gang] == [self._processes] * 2:
                return [gang[2:] for gang in gangs]
            time.sleep(0.02)
        raise AssertionError(self.said)

    def second_node(self, nodes: Sequence[StartedNode]) -> StartedNode:
        """The second node of the trial that has reported last."""
        node_id = place(self.measured()[-1])[-1]
        return next(node for node in nodes if node.node_id == node_id)


def place(o: Observation) -> tuple[str | None, ...]:
    """Nodes of the ranks of a measurement, in their order."""
    assert o.measurement is not None
    return tuple(rank.node_id for rank in o.measurement.ranks)
