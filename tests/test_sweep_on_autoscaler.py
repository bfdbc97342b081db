"""A sweep on a cluster without nodes: version 2 of Ray's autoscaler starts one for each GPU.

The node types are those of `deploy/aws.yaml`, spot and on-demand for each GPU; or one of two CPUs
that train together.
"""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from builders.clusters import shipped
from fakes.ray_cluster import Cluster
from fakes.ray_sweeps import LAW_PATH, SMALL_CELL, observations

from orchestrator.run_folder.run_folder import RunFolder
from trials.records.observation import largest_batch

FILE = yaml.safe_load(shipped("aws.yaml"))
STARTED = ("A10G", "L4", "L40S", "H100-SXM")
SPEC = f"""\
name: autoscaled
gpus: [{", ".join(STARTED)}, desk, H200-SXM]
{SMALL_CELL.replace("[32]", "[16, 32]").replace("batch_size: 32", "batch_size: 4")}catalog:
  gpus:
    - {{key: desk, kind: cpu, usable_memory_bytes: 16000000, source: test, recorded: 2026-11-20}}
"""


# A file whose nodes have two of a CPU that a trial trains on together.
PAIR_TYPE = {"max_workers": 1, "resources": {"CPU": 2, "pair": 2}}
PAIRS = FILE | {
    "max_workers": 1,
    "available_node_types": {
        "head": FILE["available_node_types"]["head"]
        | {"resources": {"CPU": 1, "scales-to-2xpair": 1}},
        "2xpair-on-demand": PAIR_TYPE,
    },
}
TOGETHER = "\n    parallel: [{gpus: 2, strategy: fsdp2}]"
PAIR_SPEC = f"""\
name: pairs
gpus: [pair]
{SMALL_CELL.replace("[32]", f"[32]{TOGETHER}")}catalog:
  gpus:
    - {{key: pair, kind: cpu, usable_memory_bytes: 14000000, source: test, recorded: 2026-11-20}}
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster that has not begun."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as scratch:
        cluster = Cluster(tmp_path, Path(scratch))
        try:
            yield cluster
        finally:
            cluster.stop()


def swept(cluster: Cluster, spec: str, wait_minutes: str) -> tuple[Path, str]:
    """Run folder and messages of a sweep on a cluster."""
    (cluster.home / "spec.yaml").write_text(spec, encoding="utf-8")
    out = cluster.home / "run"
    cluster.env |= {"RAY_ADDRESS": f"127.0.0.1:{cluster.gcs}"}
    sweep = ("python", "-m", "orchestrator", "sweep", "spec.yaml", "--out", str(out))
    ended = cluster.run(*sweep, "--wait-for-nodes", wait_minutes, timeout=360)
    assert ended.returncode == 0, ended.stderr
    return out, ended.stderr


def test_every_gpu_has_its_own_node_started_from_none(cluster: Cluster) -> None:
    """A GPU without a node type is skipped at once, one whose node never starts after the wait.

    Nodes run a law in place of an absent GPU.
    """
    cluster.env |= {"PYTHONPATH": LAW_PATH}
    assert sorted(cluster.start_autoscaling_head(FILE, "desk")) == sorted(STARTED)
    assert not {*STARTED} & cluster.node_ids().keys()
    out, said = swept(cluster, SPEC, "1")
    assert 0 < said.index("resource 'H200-SXM'") < said.index(": started\n")
    assert re.search(r"^.*desk: .*within 1 minutes", said, re.MULTILINE)
    plan = RunFolder(out).plan()
    assert plan is not None
    assert [skip.cell.gpu for skip in plan.skipped] == [*["H200-SXM"] * 2, *["desk"] * 2]
    observed = observations(out)
    nodes = cluster.node_ids()
    assert len({nodes[key] for key in STARTED}) == FILE["max_workers"] == 4
    for key in STARTED:
        of_gpu = [o for o in observed if o.cell.gpu == key]
        assert largest_batch(of_gpu) is not None
        assert {o.environment.node_id for o in of_gpu if o.environment} == {nodes[key]}
    rented = RunFolder(out).rented().nodes
    *_, priced = (line for line in said.splitlines() if line.startswith("priced as: "))
    for key in STARTED:  # the cheapest kind, by its own price
        labels = FILE["available_node_types"][f"{key.lower()}-spot"]["labels"]
        assert rented[nodes[key]].labels == labels
        instance, region = (labels[f"finetune-cost/{name}"] for name in ("instance", "region"))
        assert re.search(rf"\b{key} aws {instance} \S+ in {region} at ", priced)


@pytest.mark.long
def test_ranks_that_train_together_get_a_node_with_room_for_all(cluster: Cluster) -> None:
    """The node is started for them, and every rank is on it."""
    assert cluster.start_autoscaling_head(PAIRS) == ["2xpair"]
    out, _ = swept(cluster, PAIR_SPEC, "3")
    node = cluster.node_ids()["pair"]
    observed = observations(out)
    assert largest_batch(observed) is not None
    measured = [o.measurement for o in observed if o.measurement is not None]
    assert {rank.node_id for m in measured for rank in m.ranks} == {node}
    assert {len(m.ranks) for m in measured} == {2}
