"""A sweep as a cluster's user runs it: a head, two nodes with different resources, a Ray job."""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ray_sweeps import environment, observations

from trials.observation import Outcome, largest_batch

SPEC = """\
name: cluster
gpus: [desk-a, desk-b, desk-c, H100-SXM]
cells:
  - models: [llama-tiny]
    recipes: [{method: full, precision: fp32}]
    seq_lens: [32]
workload: {queries: 100, epochs: 1}
max_batch_size: 32
timing: {warmup_steps: 0, warmup_seconds: 0.0, max_steps: 6, max_seconds: 0.2}
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


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Cluster:
    """Ray nodes on this machine, each in the foreground of a process group of its own."""

    def __init__(self, home: Path, scratch: Path) -> None:
        self.home = home
        self.gcs, self.dashboard = free_port(), free_port()
        token = home / "token"
        token.write_text(secrets.token_hex(32), encoding="ascii")
        # A cluster without a token runs whatever anyone on the network sends it.
        self.env = environment(home, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token))
        del self.env["RAY_ADDRESS"]
        self._scratch = scratch
        self._nodes: list[subprocess.Popen[bytes]] = []

    def start_head(self) -> None:
        """A head that also answers job submissions."""
        self._start(
            "--head",
            f"--port={self.gcs}",
            f"--dashboard-port={self.dashboard}",
            "--dashboard-host=127.0.0.1",
            f"--temp-dir={self._scratch}",
        )

    def start_node(self, *carried: str) -> None:
        """A node that carries one of each of these resources."""
        resources = json.dumps(dict.fromkeys(carried, 1))
        self._start(f"--address=127.0.0.1:{self.gcs}", f"--resources={resources}")

    def _start(self, *arguments: str) -> None:
        """One node; returns when it is up, as two at once may choose the same ports."""
        log = self.home / f"node-{len(self._nodes)}.log"
        with log.open("ab") as written:
            node = subprocess.Popen(
                [
                    *("ray", "start", "--block", "--disable-usage-stats", "--num-cpus=1"),
                    "--object-store-memory=80000000",
                    # Its default is one fixed port, which only one node of a machine can have.
                    f"--dashboard-agent-listen-port={free_port()}",
                    *arguments,
                ],
                env=self.env,
                cwd=self.home,
                stdout=written,
                stderr=written,
                start_new_session=True,
            )
        self._nodes.append(node)
        deadline = time.monotonic() + 60
        while "Ray runtime started" not in log.read_text(encoding="utf-8"):
            assert node.poll() is None, log.read_text(encoding="utf-8")
            assert time.monotonic() < deadline, log.read_text(encoding="utf-8")
            time.sleep(0.1)

    def node_ids(self) -> dict[str, str]:
        """The node that carries each resource, asked of Ray itself."""
        script = (
            "import json, ray\n"
            f"ray.init('127.0.0.1:{self.gcs}', log_to_driver=False)\n"
            "carried = {k: n['NodeID'] for n in ray.nodes() for k in n['Resources']}\n"
            "print('NODES' + json.dumps(carried))\n"
        )
        answer = self.run("python", "-c", script, timeout=60)
        return dict(json.loads(answer.stdout.partition("NODES")[2].splitlines()[0]))

    def run(self, *command: str, timeout: float) -> subprocess.CompletedProcess[str]:
        """A command of a user of this cluster."""
        return subprocess.run(
            command,
            env=self.env,
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def submit(self, work: Path, *command: str) -> subprocess.CompletedProcess[str]:
        """`ray job submit`, again while the head's agent is still starting, as Ray asks for."""
        address = f"--address=http://127.0.0.1:{self.dashboard}"
        submit = ("ray", "job", "submit", address, f"--working-dir={work}", "--", *command)
        deadline = time.monotonic() + 60
        while True:
            job = self.run(*submit, timeout=240)
            if "try again later" not in job.stderr or time.monotonic() > deadline:
                return job
            time.sleep(1)

    def stop(self) -> None:
        """Ends every node at once: a polite end drains for half a minute."""
        sessions = {node.pid for node in self._nodes}
        for process in psutil.process_iter():
            # Ray's processes outlive the one that started them, but stay in its session.
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) in sessions:
                    process.kill()
        for node in self._nodes:
            node.wait(timeout=20)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A head without GPUs and two nodes, each carrying a catalog key as its resource."""
    # Ray puts sockets there, and a socket's path may be no longer than 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as scratch:
        cluster = Cluster(tmp_path_factory.mktemp("cluster"), Path(scratch))
        try:
            cluster.start_head()
            cluster.start_node("desk-a")
            cluster.start_node("desk-b", "A40")
            yield cluster
        finally:
            cluster.stop()


def test_each_cell_runs_on_the_node_it_names(cluster: Cluster) -> None:
    """`ray job submit` measures where the resource is, falls back to a core, skips what is not."""
    work, out = cluster.home / "work", cluster.home / "run"
    work.mkdir()
    (work / "cluster.yaml").write_text(SPEC, encoding="utf-8")
    job = cluster.submit(
        work, "python", "-m", "orchestrator", "sweep", "cluster.yaml", "--out", str(out)
    )
    assert job.returncode == 0, job.stdout + job.stderr
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
    assert "no node of the cluster has a core and the resource 'H100-SXM'" in job.stdout


PRETENDING = """\
name: pretending
gpus: [A40]
cells:
  - models: [llama-tiny]
    recipes: [{method: full}, {method: full, attention: flash_attention_2}]
    seq_lens: [32]
workload: {queries: 100, epochs: 1}
"""


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
