"""Processes and folder of a driver that was killed: they end with it."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from orchestrator.ray_backend.orphans import end_leftovers, folder_of_own_ray, keep_logs

DRIVER = """
import subprocess, sys, time
from orchestrator.ray_backend.orphans import folder_of_own_ray
with folder_of_own_ray() as folder:
    # As Ray's workers while they start: in a session of their own, and with children of theirs.
    script = "import subprocess; subprocess.Popen(['sleep', '600']); import time; time.sleep(600)"
    words = [sys.executable, "-c", script]
    child = subprocess.Popen(words, start_new_session=True, stdout=subprocess.DEVNULL)
    (folder / "session").mkdir()
    print(child.pid, folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def driver() -> Iterator[subprocess.Popen[str]]:
    """A driver and a process that it started."""
    words = [sys.executable, "-c", DRIVER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, text=True, **pipes) as process:  # type: ignore[call-overload]
        yield process


def started_by(driver: "subprocess.Popen[str]") -> tuple[list[psutil.Process], Path]:
    """The process that a driver started and its child, and the driver's folder for Ray."""
    assert driver.stdout is not None
    pid, _, folder = driver.stdout.readline().strip().partition(" ")
    process = psutil.Process(int(pid))
    while not process.children():
        psutil.wait_procs([process], timeout=0.1)
    return [process, *process.children()], Path(folder)


def helpers(folder: Path) -> list[psutil.Process]:
    """The helper that removes a folder."""
    running = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(folder) in process.cmdline():
                running.append(process)
    return running


def test_processes_and_folder_of_a_killed_driver_end(driver: "subprocess.Popen[str]") -> None:
    """Children of children too; no other process is touched."""
    bystander = subprocess.Popen(["sleep", "600"])
    processes, folder = started_by(driver)
    helper = helpers(folder)
    assert helper
    driver.send_signal(signal.SIGKILL)
    assert psutil.wait_procs([*processes, *helper], timeout=60)[1] == []
    assert not folder.exists()
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_a_later_driver_ends_what_one_without_its_helper_left(
    driver: "subprocess.Popen[str]",
) -> None:
    """Driver and helper may be killed together. A driver that runs keeps its processes."""
    processes, folder = started_by(driver)
    (helper,) = helpers(folder)
    helper.kill()
    with folder_of_own_ray():
        pass
    assert (folder / "session").is_dir()
    assert all(process.is_running() for process in processes)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    with folder_of_own_ray() as later:
        pass
    assert psutil.wait_procs(processes, timeout=60)[1] == []
    assert not folder.exists()
    assert not later.exists()


def test_what_others_have_under_such_a_name_stays(tmp_path: Path) -> None:
    """No file of a driver: bytes of anything, a pipe, or a folder."""
    for name in ("ray-bytes", "ray-pipe", "ray-folder"):
        (tmp_path / name).mkdir()
    (tmp_path / "ray-bytes" / "owner").write_bytes(b"\xff\x00" * 100)
    os.mkfifo(tmp_path / "ray-pipe" / "owner")
    (tmp_path / "ray-folder" / "owner").mkdir()
    end_leftovers(tmp_path)
    assert len(list(tmp_path.glob("ray-*/owner"))) == 3


def test_a_driver_that_ends_itself_leaves_its_processes(driver: "subprocess.Popen[str]") -> None:
    """Ray ends its own then; the helper has ended, and the folder is gone, before the driver."""
    processes, folder = started_by(driver)
    assert (folder / "session").is_dir()
    driver.communicate()
    assert driver.returncode == 0
    assert not folder.exists()
    assert all(process.is_running() for process in processes)
    for process in processes:
        process.kill()


def test_only_a_folder_with_logs_can_be_kept(tmp_path: Path) -> None:
    """Ray may fail before it writes any."""
    assert keep_logs(tmp_path) is None
    with folder_of_own_ray() as folder:
        logs = folder / "session_latest" / "logs"
        logs.mkdir(parents=True)
        assert keep_logs(folder) == logs
    assert logs.is_dir()
    assert not list(folder.glob("owner"))  # a normal end leaves processes to Ray
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["RAY_TMPDIR", "TMPDIR"])
def test_the_folder_is_where_ray_has_its_own(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless that place is too deep for the sockets below it."""
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    place = Path("/tmp") / f"t{os.getpid()}"  # noqa: S108 - the tests' own places are too deep
    place.mkdir()
    monkeypatch.setenv(name, str(place))
    with folder_of_own_ray() as folder:
        assert folder.parent == place
    deep = tmp_path / ("d" * 30)
    deep.mkdir()
    monkeypatch.setenv(name, str(deep))
    monkeypatch.setattr("tempfile.tempdir", None)
    with folder_of_own_ray() as folder:
        assert folder.parent == Path("/tmp")  # noqa: S108 - as above
    place.rmdir()


RAY_DRIVER = """
import os, signal, sys
import ray
from orchestrator.ray_backend import orphans
from orchestrator.ray_backend.cluster import connected_cluster, ray_logs
from orchestrator.ray_backend.own_ray import own_ray
with own_ray() as folder, connected_cluster(ask_for_packages=True, folder=folder):
    logs = ray_logs(ray.nodes())
    print(folder, logs, logs.is_relative_to(folder), (logs / "raylet.out").exists())
    for process in orphans.marked(os.environ[orphans.MARK]):
        print(process.pid, process.name(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
def test_an_own_ray_ends_with_its_killed_driver() -> None:
    """All of its processes do, those with titles too, and its folder is removed."""
    words = [sys.executable, "-c", RAY_DRIVER]
    killed = subprocess.run(words, capture_output=True, text=True, check=False)
    first, *lines = killed.stdout.splitlines()
    folder, _, *are_there = first.split()
    assert are_there == ["True", "True"], killed.stderr
    marked = dict(line.split(maxsplit=1) for line in lines)
    assert {"raylet", "gcs_server", "ray::DashboardAgent"} <= {*marked.values()}, killed.stderr
    pids = [int(pid) for pid in marked if psutil.pid_exists(int(pid))]
    assert psutil.wait_procs([psutil.Process(pid) for pid in pids], timeout=60)[1] == []
    assert psutil.wait_procs(helpers(Path(folder)), timeout=60)[1] == []
    assert not Path(folder).exists()
