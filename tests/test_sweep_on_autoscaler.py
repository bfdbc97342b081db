"""A sweep on a cluster that has no node yet: each GPU's trial has its own started."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_cluster import Cluster
from ray_sweeps import SMALL_CELL, observations

from orchestrator.store import RunFolder
from trials.observation import Outcome, largest_batch

SPEC = (
    """\
name: autoscaled
gpus: [desk-a, desk-b, desk-c, A40, H200-SXM]
"""
    + SMALL_CELL
    + """\
catalog:
  gpus:
    - {key: desk-a, kind: cpu, usable_memory_bytes: 14000000, source: test, recorded: 2026-11-20}
    - {key: desk-b, kind: cpu, usable_memory_bytes: 16000000, source: test, recorded: 2026-11-20}
    - {key: desk-c, kind: cpu, usable_memory_bytes: 16000000, source: test, recorded: 2026-11-20}
"""
)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A head, and what its autoscaler could start."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as scratch:
        cluster = Cluster(tmp_path, Path(scratch))
        try:
            cluster.start_autoscaling_head(
                {
                    "a": {"CPU": 1, "desk-a": 1},
                    "b": {"CPU": 1, "desk-b": 1},
                    "gpu": {"CPU": 1, "GPU": 1, "A40": 1},
                },
                "desk-c",
            )
            yield cluster
        finally:
            cluster.stop()


def test_every_gpu_has_its_own_node_started_from_none(cluster: Cluster) -> None:
    """What no node type has is skipped at once, and what is said to start and does not, in time.

    What is not the GPU it says measures nothing.
    """
    assert not {"desk-a", "desk-b", "A40"} & cluster.node_ids().keys()
    (cluster.home / "spec.yaml").write_text(SPEC, encoding="utf-8")
    out = cluster.home / "run"
    cluster.env |= {"RAY_ADDRESS": f"127.0.0.1:{cluster.gcs}"}
    sweep = ("python", "-m", "orchestrator", "sweep", "spec.yaml", "--out", str(out))
    swept = cluster.run(*sweep, "--wait-for-nodes", "0.3", timeout=240)
    assert "H200-SXM" in swept.stderr
    assert "no node of the cluster has a core and the resource 'H200-SXM'" in swept.stderr
    assert "desk-c: no node with desk-c came within 0.3 minutes" in swept.stderr
    plan = RunFolder(out).plan()
    assert plan is not None
    assert [skip.cell.gpu for skip in plan.skipped] == ["H200-SXM", "desk-c"]
    (gone,) = plan.given_up
    assert "failed on all of them: DeviceError: A40: CUDA shows no GPU" in gone.reason
    seen = observations(out)
    nodes = cluster.node_ids()
    for key in ("desk-a", "desk-b"):
        mine = [o for o in seen if o.cell.gpu == key]
        assert largest_batch(mine) is not None
        assert {o.environment.node_id for o in mine if o.environment} == {nodes[key]}
    (refused,) = [o for o in seen if o.cell.gpu == "A40"]
    assert refused.outcome is Outcome.FAILED
    assert "A40" in nodes
    assert len({nodes[key] for key in ("desk-a", "desk-b", "A40")}) == 3
    assert swept.returncode == 1  # the A40 is none
