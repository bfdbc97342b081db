"""Processes of a driver that was killed: they end with it."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

DRIVER = """
import subprocess, sys, time
from orchestrator.ray_backend.orphans import ending_with_this_process
with ending_with_this_process():
    # As Ray's workers while they start: in a session of their own, and with children of theirs.
    script = "import subprocess; subprocess.Popen(['sleep', '600']); import time; time.sleep(600)"
    words = [sys.executable, "-c", script]
    child = subprocess.Popen(words, start_new_session=True, stdout=subprocess.DEVNULL)
    print(child.pid, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def driver() -> Iterator[subprocess.Popen[str]]:
    """A driver and a process that it started."""
    words = [sys.executable, "-c", DRIVER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, text=True, **pipes) as process:  # type: ignore[call-overload]
        yield process


def started_by(driver: "subprocess.Popen[str]") -> list[psutil.Process]:
    """The process that a driver started, and its child."""
    assert driver.stdout is not None
    process = psutil.Process(int(driver.stdout.readline()))
    while not process.children():
        psutil.wait_procs([process], timeout=0.1)
    return [process, *process.children()]


def test_processes_of_a_killed_driver_end(driver: "subprocess.Popen[str]") -> None:
    """Children of children too; no other process is touched."""
    bystander = subprocess.Popen(["sleep", "600"])
    processes = started_by(driver)
    driver.send_signal(signal.SIGKILL)
    assert psutil.wait_procs(processes, timeout=60)[1] == []
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_a_driver_that_ends_itself_leaves_them(driver: "subprocess.Popen[str]") -> None:
    """Ray ends its own then; the helper has ended before the driver does."""
    processes = started_by(driver)
    driver.communicate()
    assert driver.returncode == 0
    assert all(process.is_running() for process in processes)
    for process in processes:
        process.kill()


RAY_DRIVER = """
import os, signal, psutil
from orchestrator.ray_backend import orphans
from orchestrator.ray_backend.cluster import connected_cluster
with connected_cluster(ask_for_packages=True):
    for process in orphans.marked(os.environ[orphans.MARK]):
        print(process.pid, process.name(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_processes_with_a_title_of_rays_carry_the_mark() -> None:
    """A title would overwrite the variables of its process; all of them end with the driver."""
    words = [sys.executable, "-c", RAY_DRIVER]
    killed = subprocess.run(words, capture_output=True, text=True, check=False)
    marked = dict(line.split(maxsplit=1) for line in killed.stdout.splitlines())
    assert {"raylet", "gcs_server", "ray::DashboardAgent"} <= {*marked.values()}, killed.stderr
    pids = [int(pid) for pid in marked if psutil.pid_exists(int(pid))]
    assert psutil.wait_procs([psutil.Process(pid) for pid in pids], timeout=60)[1] == []
