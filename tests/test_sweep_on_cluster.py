"""A sweep as a cluster's user runs it: a head, two nodes with different resources, a Ray job."""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.metadata_server import metadata_server
from fakes.ray_cluster import Cluster
from fakes.ray_sweeps import SMALL_CELL, observations
from fakes.s3_server import CREDENTIALS

from orchestrator.clouds.preemption_notice import _own_node
from trials.records.observation import Outcome, largest_batch

SPEC = (
    """\
name: cluster
gpus: [desk-a, desk-b, desk-c, H100-SXM]
"""
    + SMALL_CELL
    + """\
catalog:
  gpus:
    - {key: desk-a, kind: cpu, usable_memory_bytes: 14000000, source: test, recorded: 2026-11-20}
    - {key: desk-b, kind: cpu, usable_memory_bytes: 16000000, source: test, recorded: 2026-11-20}
    - {key: desk-c, kind: cpu, usable_memory_bytes: 16000000, source: test, recorded: 2026-11-20}
  offers:
    - {gpu: desk-a, provider: own, region: here, instance: a, usd_per_hour: 0.1,
       source: test, recorded: 2026-11-20}
    - {gpu: desk-b, provider: own, region: here, instance: b, usd_per_hour: 0.3,
       source: test, recorded: 2026-11-20}
"""
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A head without GPUs and two nodes, each carrying a catalog key as its resource."""
    # Ray puts sockets there, and a socket's path may be no longer than 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as scratch:
        cluster = Cluster(tmp_path_factory.mktemp("cluster"), Path(scratch))
        try:
            cluster.env |= CREDENTIALS  # as they lie about in shells
            cluster.start_head()
            cluster.start_node("desk-a")
            cluster.start_node("desk-b", "A40")
            yield cluster
        finally:
            cluster.stop()


def test_each_cell_runs_on_the_node_it_names_and_the_cluster_goes_down_after_it(
    cluster: Cluster,
) -> None:
    """`launch` measures where the resource is, falls back to a core, skips what is not.

    The tunnel drops on the way: the cluster goes down when the job has ended, and no sooner.
    """
    work, out = cluster.home / "work", cluster.home / "run"
    work.mkdir()
    (work / "cluster.yaml").write_text(SPEC, encoding="utf-8")
    launched = cluster.launch(work / "cluster.yaml", "--out", str(out))
    laptop = cluster.home / "laptop"
    while not (out / "observations.jsonl").exists():
        assert launched.poll() is None, launched.communicate()
        time.sleep(0.1)
    os.kill(int((laptop / "tunnels").read_text(encoding="ascii").split()[-1]), signal.SIGKILL)
    calls = (laptop / "calls").read_text(encoding="utf-8").splitlines()
    assert calls == ["up --yes --no-restart cluster.yaml"]
    said, told = launched.communicate(timeout=240)
    assert launched.returncode == 0, said + told
    assert len((laptop / "tunnels").read_text(encoding="ascii").split()) >= 2
    calls = (laptop / "calls").read_text(encoding="utf-8").splitlines()
    assert calls[1:] == [f"rsync-down cluster.yaml {out}/ runs/run/", "down --yes cluster.yaml"]
    seen = observations(out)
    where = {
        key: {o.environment.node_id for o in seen if o.cell.gpu == key and o.environment}
        for key in ("desk-a", "desk-b")
    }
    nodes = cluster.node_ids()
    assert where == {key: {nodes[key]} for key in where}
    largest = {
        key: largest_batch([o for o in seen if o.cell.gpu == key])
        for key in ("desk-a", "desk-b", "desk-c")
    }
    sizes = {key: known[0] for key, known in largest.items() if known is not None}
    assert sizes["desk-a"] < sizes["desk-b"] == sizes["desk-c"]  # memory: 14, 16 and 16 MB
    assert {o.outcome for o in seen} == {Outcome.FITS, Outcome.OUT_OF_MEMORY}
    # Each line once, though the log was asked for again.
    assert said.count("Running entrypoint for job launch-cluster") == 1
    assert "no node of the cluster has a core and the resource 'H100-SXM'" in said
    assert "Every offer, the fits and the limits" in said


def test_a_job_is_asked_for_by_its_id(cluster: Cluster) -> None:
    """Its state and its log, long after it has ended, from any machine that has the token."""
    address = f"--address=http://127.0.0.1:{cluster.dashboard}"
    status = cluster.run("ray", "job", "status", address, "launch-cluster", timeout=60)
    assert "Job 'launch-cluster' succeeded" in status.stdout
    log = cluster.run("ray", "job", "logs", address, "launch-cluster", timeout=60)
    assert "no node of the cluster has a core and the resource 'H100-SXM'" in log.stdout


PRETENDING = """\
name: pretending
gpus: [A40]
cells:
  - models: [llama-tiny]
    recipes: [{method: full}, {method: full, attention: flash_attention_2}]
    seq_lens: [32]
workload: {examples: 100, epochs: 1}
"""


@pytest.mark.long
def test_node_that_is_not_what_it_says_measures_nothing(cluster: Cluster) -> None:
    """It carries the resource A40 and has neither FlashAttention nor the GPU: both are told."""
    work, out = cluster.home / "pretending", cluster.home / "nothing"
    work.mkdir()
    (work / "pretending.yaml").write_text(PRETENDING, encoding="utf-8")
    job = cluster.submit(
        work, "python", "-m", "orchestrator", "sweep", "pretending.yaml", "--out", str(out)
    )
    assert job.returncode == 1
    assert "flash_attn cannot be imported on the node with A40: install the extra" in job.stdout
    (only,) = observations(out)  # what the next try cannot mend is tried once
    assert only.outcome is Outcome.FAILED
    assert only.detail is not None
    assert only.detail.startswith("DeviceError: A40: CUDA shows no GPU to this process")


WHO_USES_WHAT = """\
import sys
import time

import ray
from orchestrator.ray_backend.cluster import cluster_now

ray.init(sys.argv[1], log_to_driver=False)


@ray.remote(num_cpus=1, resources={"desk-a": 1})
class Somebody:
    def is_here(self):
        return True


somebody = Somebody.remote()
ray.get(somebody.is_here.remote())
ours = ray.util.placement_group([{"CPU": 1, "desk-b": 1}])
ray.get(ours.ready())
until = time.monotonic() + 20
taken = {}
while not taken.get("desk-a") and time.monotonic() < until:
    time.sleep(0.2)  # Ray tells of it a little later
    taken = {
        key: node.is_taken({"CPU": 1, key: 1})
        for node in cluster_now().nodes
        for key in ("desk-a", "desk-b")
        if node.has(key)
    }
print("TAKEN", sorted(key for key in taken if taken[key]), "OF", sorted(taken))
"""


def test_a_node_that_others_use_is_told_from_one_where_our_own_trial_is_to_start(
    cluster: Cluster,
) -> None:
    """The first is waited for; the second, if it starts no worker, not without end."""
    address = f"{cluster.address}:{cluster.gcs}"
    told = cluster.run("python", "-c", WHO_USES_WHAT, address, timeout=120)
    assert "TAKEN ['desk-a'] OF ['desk-a', 'desk-b']" in told.stdout, told.stderr


@pytest.mark.parametrize("shown", [{"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "0" * 64}])
def test_a_job_of_somebody_without_the_token_is_refused(
    cluster: Cluster, shown: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it run anything for one that shows another."""
    env = {k: v for k, v in cluster.env.items() if k != "RAY_AUTH_TOKEN_PATH"} | shown
    monkeypatch.setattr(cluster, "env", env)
    left = cluster.home / "left-by-a-stranger"
    (cluster.home / "strange").mkdir(exist_ok=True)
    job = cluster.submit(cluster.home / "strange", "touch", str(left))
    assert job.returncode != 0
    assert "AuthenticationError" in job.stderr
    assert not left.exists()


def test_notice_of_a_cloud_drains_the_node(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a spot node of AWS asks for it: Ray begins nothing there any more."""
    # A machine has a node of one cluster; this one may have several's.
    here = {"RAY_ADDRESS": f"{cluster.address}:{cluster.gcs}"}
    monkeypatch.setattr(cluster, "env", cluster.env | here)
    node = cluster.node_ids()["desk-a"]
    # Where it is alone on its machine, it is found by its process.
    assert [word.partition("=")[0] for word in _own_node()] == ["--node-id", "--address"]
    with metadata_server() as metadata:
        metadata.spot_action_in = 120
        ended = cluster.run(
            *(sys.executable, "-m", "orchestrator", "node-notice", "aws"),
            *("--metadata", metadata.address, "--node-id", node),
            timeout=60,
        )
    assert ended.returncode == 0, ended.stderr
    assert "AWS takes this spot instance away (terminate), in 1" in ended.stderr
    left = cluster.staying_nodes()
    assert node not in left
    assert cluster.node_ids()["desk-b"] in left


def test_no_secret_is_written_down_anywhere(cluster: Cluster) -> None:
    """Neither in what the sweeps before made, nor in what Ray and they said of it."""
    secrets = [cluster.token.read_text(encoding="ascii")]
    secrets += [CREDENTIALS[name] for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")]
    files = [
        path
        for folder in (cluster.home, cluster.scratch)
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and path != cluster.token
    ]
    names = {path.name for path in files}
    assert {"observations.jsonl", "report.md", "gcs_server.out", "dashboard.log"} <= names
    told = [path for path in files if any(s.encode() in path.read_bytes() for s in secrets)]
    assert told == []
