"""A sweep as a cluster's user runs it: a head, two nodes with different resources, a Ray job.

Nodes run a law in place of a model.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import psutil
import pytest
from fakes.metadata_server import metadata_server
from fakes.ray_cluster import Cluster
from fakes.ray_sweeps import LAW_PATH, SMALL_CELL, observations
from fakes.s3_server import CREDENTIALS

from orchestrator.clouds.preemption_notice import _own_node
from orchestrator.ray_backend.head import RECONNECT_VARIABLE
from orchestrator.ray_backend.own_ray import GCS
from trials.records.observation import Outcome, largest_batch

HUB_TOKEN = "hf_zXcVbNmAsDfGhJkLqWeRtYuIoP"  # noqa: S105 - of nobody
SAVED_TOKEN = ".cache/huggingface/token"  # noqa: S105 - a path
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
    """A head without GPUs and two nodes, each with a catalog key as its resource."""
    # Ray puts sockets there, and a socket's path may be no longer than 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as scratch:
        cluster = Cluster(tmp_path_factory.mktemp("cluster"), Path(scratch))
        try:
            cluster.env |= CREDENTIALS | {"HF_TOKEN": HUB_TOKEN}  # as they lie about in shells
            saved = cluster.home / SAVED_TOKEN
            saved.parent.mkdir(parents=True)
            saved.write_text(HUB_TOKEN, encoding="ascii")
            cluster.env |= {"PYTHONPATH": LAW_PATH}
            cluster.start_head()
            cluster.start_node("desk-a")
            cluster.start_node("desk-b", "A40")
            yield cluster
        finally:
            cluster.stop()


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> dict[str, str]:
    """Node id by resource."""
    return cluster.node_ids()


def answer_of_head(
    cluster: Cluster, method: str, path: str, body: str | None = None, **headers: str
) -> tuple[int, str]:
    """Status and text of an answer of the head, which Ray's own commands ask in the same way."""
    head = HTTPConnection("127.0.0.1", cluster.dashboard, timeout=60)
    with contextlib.closing(head):
        head.request(method, f"/api/jobs/{path}", body, headers)
        answer = head.getresponse()
        return answer.status, answer.read().decode()


def test_each_cell_runs_on_the_node_it_names_and_the_cluster_goes_down_after_it(
    cluster: Cluster, nodes: dict[str, str]
) -> None:
    """`launch` places each cell by its resource, or a core, and skips the rest.

    The tunnel drops during the sweep: the cluster goes down when the job has ended, and no
    sooner.
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
    assert [call.split() for call in calls] == [["up", "--yes", "--no-restart", "cluster.yaml"]]
    output, errors = launched.communicate(timeout=240)
    assert launched.returncode == 0, output + errors
    assert len((laptop / "tunnels").read_text(encoding="ascii").split()) >= 2
    calls = (laptop / "calls").read_text(encoding="utf-8").splitlines()
    assert [call.split() for call in calls[1:]] == [
        ["rsync-down", "cluster.yaml", f"{out}/", "runs/run/"],
        ["down", "--yes", "cluster.yaml"],
    ]
    observed = observations(out)
    where = {
        key: {o.environment.node_id for o in observed if o.cell.gpu == key and o.environment}
        for key in ("desk-a", "desk-b")
    }
    assert where == {key: {nodes[key]} for key in where}
    largest = {
        key: largest_batch([o for o in observed if o.cell.gpu == key])
        for key in ("desk-a", "desk-b", "desk-c")
    }
    sizes = {key: limit[0] for key, limit in largest.items() if limit is not None}
    assert sizes["desk-a"] < sizes["desk-b"] == sizes["desk-c"]  # memory: 14, 16 and 16 MB
    assert {o.outcome for o in observed} == {Outcome.FITS, Outcome.OUT_OF_MEMORY}
    # Each line once, though the log was asked for again.
    assert output.count("entrypoint for job") == 1
    assert "resource 'H100-SXM'" in output
    assert "Every offer" in output


def test_status_and_log_of_a_job_are_available_by_its_id(cluster: Cluster) -> None:
    """They outlive the job, on any machine that has the token."""
    token = {"Authorization": f"Bearer {cluster.token.read_text(encoding='ascii')}"}
    code, status = answer_of_head(cluster, "GET", "launch-cluster", **token)
    assert (code, json.loads(status)["status"]) == (200, "SUCCEEDED")
    code, log = answer_of_head(cluster, "GET", "launch-cluster/logs", **token)
    assert code == 200
    assert "resource 'H100-SXM'" in json.loads(log)["logs"]


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
def test_node_without_its_declared_gpu_measures_nothing(cluster: Cluster) -> None:
    """It carries the resource A40 without FlashAttention or a GPU: both are reported."""
    work, out = cluster.home / "pretending", cluster.home / "nothing"
    work.mkdir()
    (work / "pretending.yaml").write_text(PRETENDING, encoding="utf-8")
    job = cluster.submit(
        work,
        *("python", "-m", "orchestrator", "sweep", "pretending.yaml", "--out", str(out)),
        REAL_WORKER="1",
    )
    assert job.returncode == 1
    assert re.search(r"flash_attn .*A40.*finetune-cost\[gpu\]", job.stdout)
    (only,) = observations(out)  # what the next try cannot mend is tried once
    assert only.outcome is Outcome.FAILED
    assert only.detail is not None
    assert only.detail.startswith("DeviceError: A40: ")


WHO_USES_WHAT = """\
import json
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
    time.sleep(0.2)  # Ray reports it a little later
    taken = {
        key: node.is_taken({"CPU": 1, key: 1})
        for node in cluster_now().nodes
        for key in ("desk-a", "desk-b")
        if node.has(key)
    }
print(json.dumps(taken))
"""


def test_a_node_in_use_by_others_differs_from_one_with_our_placement(
    cluster: Cluster,
) -> None:
    """The wait for the second ends if it starts no worker."""
    address = f"{cluster.address}:{cluster.gcs}"
    result = cluster.run("python", "-c", WHO_USES_WHAT, address, timeout=120)
    assert json.loads(result.stdout.splitlines()[-1]) == {"desk-a": True, "desk-b": False}, (
        result.stderr
    )


@pytest.mark.parametrize(
    ("shown", "refusal"), [({}, 401), ({"Authorization": f"Bearer {'0' * 64}"}, 403)]
)
def test_a_job_of_somebody_without_the_token_is_refused(
    cluster: Cluster, shown: dict[str, str], refusal: int
) -> None:
    """Another token is refused too, and the job runs nothing."""
    left = cluster.home / "left-by-a-stranger"
    job = json.dumps({"entrypoint": f"touch {left}"})
    more = {"Content-Type": "application/json"} | shown
    code, said = answer_of_head(cluster, "POST", "", job, **more)
    assert code == refusal, said
    assert not left.exists()


def test_notice_of_a_cloud_drains_the_node(
    cluster: Cluster, nodes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the notice of an AWS spot instance, Ray starts nothing more on the node."""
    # A machine has a node of one cluster; this one may have several's.
    here = {"RAY_ADDRESS": f"{cluster.address}:{cluster.gcs}"}
    monkeypatch.setattr(cluster, "env", cluster.env | here)
    node = nodes["desk-a"]
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
    assert "(terminate), in 1" in ended.stderr
    left = cluster.staying_nodes()
    assert node not in left
    assert nodes["desk-b"] in left


def test_no_secret_is_written_down_anywhere(cluster: Cluster) -> None:
    """Neither files nor logs of the sweeps above have one."""
    secrets = [cluster.token.read_text(encoding="ascii"), HUB_TOKEN]
    secrets += [CREDENTIALS[name] for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")]
    files = [
        path
        for folder in (cluster.home, cluster.scratch)
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    ]
    where = {cluster.token, cluster.home / SAVED_TOKEN}
    assert where <= {*files}
    files = [path for path in files if path not in where]
    names = {path.name for path in files}
    assert {"observations.jsonl", "report.md", "gcs_server.out", "dashboard.log"} <= names
    leaks = [path for path in files if any(s.encode() in path.read_bytes() for s in secrets)]
    assert leaks == []


DRIVER = """
import sys, time
from orchestrator.console import log_to_stderr
from orchestrator.ray_backend.cluster import connected_cluster
log_to_stderr()
with connected_cluster(ask_for_packages=False):
    print("connected", flush=True)
    sys.stdin.read()
    import ray
    ray.nodes()
    time.sleep(600)
"""


def gcs_of(cluster: Cluster) -> psutil.Process:
    """The process of the head's GCS."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_ours = any(str(cluster.scratch) in word for word in process.cmdline())
            if process.name() == GCS and is_ours:
                return process
    raise AssertionError("no GCS runs")


def test_a_driver_whose_head_is_gone_ends_in_a_line(cluster: Cluster) -> None:
    """Even where it waits for the head; Ray itself would abort it with lines of its own.

    The last test of this cluster.
    """
    address = f"{cluster.address}:{cluster.gcs}"
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        env=cluster.env | {"RAY_ADDRESS": address, RECONNECT_VARIABLE: "12"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "connected\n"
        gcs_of(cluster).kill()
        _, errors = driver.communicate("", timeout=120)
    assert driver.returncode == 1
    assert errors == (
        f"RAY_ADDRESS={address}: the head has not answered for 6 s: see that it runs, and "
        "run the same command again, which continues where this stopped\n"
    )
