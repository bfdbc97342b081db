"""The Ray that a command starts on this machine: its folder, and its death."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gpu_catalog.errors import UserError
from orchestrator.ray_backend import own_ray as module
from orchestrator.ray_backend.errors import ClusterError, RayEndedError
from orchestrator.ray_backend.own_ray import GCS, check_own_ray, own_ray

DRIVER = """
import os, psutil, sys
from orchestrator.console import log_to_stderr
from orchestrator.ray_backend import orphans, own_ray
from orchestrator.ray_backend.cluster import connected_cluster, ray_logs
log_to_stderr()
own_ray.BLOCKED_SECONDS = 2.0
with own_ray.own_ray() as folder:
    print(folder, flush=True)
    with connected_cluster(ask_for_packages=True, folder=folder):
        import ray
        logs = ray_logs(ray.nodes())
        print(logs.is_relative_to(folder), (logs / "raylet.out").exists())
        print(*(p.name() for p in orphans.marked(os.environ[orphans.MARK])), flush=True)
        (gcs,) = [p for p in psutil.Process().children() if p.name() == "gcs_server"]
        gcs.kill()
        ray.nodes()
"""
# SIGINT is heeded as in a terminal; tests that a shell runs in the background inherit ignoring it.
STARTING = f"""
import signal, time
import sys
from orchestrator.cli import interruptions
signal.signal(signal.SIGINT, signal.default_int_handler)
interruptions.heed_interruptions()

def end(*error):  # as a command does, whatever error the interruption became
    if interruptions.is_interrupted():
        interruptions.end_interrupted(interruptions.exit_code())
    sys.__excepthook__(*error)

sys.excepthook = end
{DRIVER.partition("        import ray")[0]}        time.sleep(600)
"""


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place for folders of Ray, short enough for its sockets; a test leaves it empty."""
    folder = Path(f"/tmp/t{secrets.token_hex(4)}")  # noqa: S108 - as above
    folder.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    monkeypatch.setenv("RAY_ADDRESS", "local")
    yield folder
    folder.rmdir()


@pytest.mark.parametrize("error", [UserError("the bucket is gone"), KeyboardInterrupt(), None])
@pytest.mark.usefixtures("place")
def test_no_folder_is_left_unless_ray_failed(error: BaseException | None) -> None:
    """However the command ends."""
    with contextlib.suppress(UserError, KeyboardInterrupt), own_ray() as folder:
        (folder / "session_latest" / "logs").mkdir(parents=True)
        if error:
            raise error
    assert not folder.exists()


@pytest.mark.usefixtures("place")
def test_an_error_of_ray_says_where_its_logs_are() -> None:
    """They stay; an error before Ray wrote any says nothing of them."""
    with pytest.raises(RayEndedError, match=r"^it died$"), own_ray():
        raise RayEndedError("it died")

    def fail(folder: Path) -> None:
        (folder / "session_latest" / "logs").mkdir(parents=True)
        raise ClusterError("Ray cannot be started")

    with pytest.raises(ClusterError) as error, own_ray() as folder:
        fail(folder)
    logs = folder / "session_latest" / "logs"
    assert str(error.value) == f"Ray cannot be started. Ray's logs are in {logs}"
    assert logs.is_dir()
    remove(folder)


def remove(folder: Path) -> None:
    """Remove a folder that was kept."""
    assert (folder / "kept").exists()
    subprocess.run(["rm", "-r", folder], check=True)


@pytest.mark.parametrize("name", [GCS, "raylet"])
def test_an_own_ray_without_its_raylet_or_gcs_has_ended(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the driver has waited for the process or not; another Ray has none here."""
    check_own_ray()
    with subprocess.Popen(["sleep", "600"]) as process:
        monkeypatch.setitem(module._vital, name, psutil.Process(process.pid))
        check_own_ray()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(RayEndedError, match=f"its {name} died"):
            check_own_ray()
        process.wait()
        with pytest.raises(RayEndedError, match=f"its {name} died"):
            check_own_ray()


@pytest.mark.long
def test_a_driver_that_waits_for_a_dead_gcs_ends_in_a_line(place: Path) -> None:
    """Ray itself would abort it after a minute; its processes end with it, and its logs stay.

    They carry the driver's mark, although Ray gives them titles, which overwrite variables.
    """
    ended = subprocess.run(
        [sys.executable, "-c", DRIVER], capture_output=True, text=True, timeout=240, check=False
    )
    path, are_there, *marked = ended.stdout.splitlines()
    folder = Path(path)
    assert are_there == "True True"
    assert {"raylet", "gcs_server", "ray::DashboardAgent"} <= {*marked[0].split()}
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == (
        "Ray on this machine has ended: its gcs_server died, as when it is killed or memory runs "
        "out: run the same command again, which continues where this stopped. Ray's logs are in "
        f"{folder}/session_latest/logs"
    )
    assert "Failed to connect to GCS" not in ended.stderr
    assert "Traceback" not in ended.stderr
    assert psutil.wait_procs(named(place), timeout=60)[1] == []
    assert (folder / "session_latest" / "logs" / "gcs_server.out").exists()
    remove(folder)


def named(place: Path) -> list[psutil.Process]:
    """Processes whose command names a place: the helper, and all of Ray's own."""
    running = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(str(place) in word for word in process.cmdline()):
                running.append(process)
    return running


def starts_gcs(place: Path) -> bool:
    """Whether Ray's first process is there."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(process.name() == GCS for process in named(place))
    return False


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)]
)
def test_a_driver_that_ends_while_ray_starts_leaves_nothing(
    number: signal.Signals, code: int, place: Path
) -> None:
    """Neither a process, nor the folder."""
    words = [sys.executable, "-c", STARTING]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as driver:
        while not starts_gcs(place):
            assert driver.poll() is None
            time.sleep(0.01)
        driver.send_signal(number)
        begun = named(place)
        try:
            _, printed = driver.communicate(timeout=60)
        finally:
            driver.kill()
        assert driver.returncode == code, printed.decode()
    assert psutil.wait_procs([*begun, *named(place)], timeout=60)[1] == []
    assert list(place.iterdir()) == []
