"""The head of a cluster that a driver has joined."""

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray
from fakes.ray_cluster import Cluster

from orchestrator.ray_backend import head
from orchestrator.ray_backend.head import RECONNECT_VARIABLE, watched_head
from orchestrator.ray_backend.own_ray import GCS

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


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A head alone."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as scratch:
        cluster = Cluster(tmp_path, Path(scratch))
        try:
            cluster.start_head("--include-dashboard=false")
            yield cluster
        finally:
            cluster.stop()


def gcs_of(cluster: Cluster) -> psutil.Process:
    """The process of the head's GCS."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_ours = any(str(cluster.scratch) in word for word in process.cmdline())
            if process.name() == GCS and is_ours:
                return process
    raise AssertionError("no GCS runs")


@pytest.mark.parametrize("reconnect_seconds", ["", "a minute", "8", "0.2", "0"])
def test_a_driver_goes_on_while_its_head_answers(
    reconnect_seconds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However short a time Ray is told to wait for the head, and whether that is a number."""
    ended: list[str] = []
    monkeypatch.setattr(head, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(head, "end_at_once", ended.append)
    monkeypatch.setenv(RECONNECT_VARIABLE, reconnect_seconds)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        context = SimpleNamespace(gcs_address=address)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
        with watched_head(address):
            time.sleep(0.2)
            assert ended == []


def test_a_driver_ends_before_ray_would_abort_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Ray's own wait is shorter than the usual lead."""
    ended: list[float] = []
    monkeypatch.setattr(head, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(head, "end_at_once", lambda _: ended.append(time.monotonic()))
    monkeypatch.setenv(RECONNECT_VARIABLE, "4")
    with socket.socket() as free:  # bound and not listening: connections are refused
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        context = SimpleNamespace(gcs_address=address)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
        begun = time.monotonic()
        with watched_head(address):
            while not ended and time.monotonic() < begun + 10:
                time.sleep(0.01)
    assert 1.9 < ended[0] - begun < 4


def test_a_driver_whose_head_is_gone_ends_in_a_line(cluster: Cluster) -> None:
    """Even where it waits for the head; Ray itself would abort it with lines of its own."""
    address = f"{cluster.address}:{cluster.gcs}"
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        env=cluster.env | {"RAY_ADDRESS": address, RECONNECT_VARIABLE: "20"},
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
        f"RAY_ADDRESS={address}: the head has not answered for 12 s: see that it runs, and "
        "run the same command again, which continues where this stopped\n"
    )
