"""Sweeps on a Ray of their own that dies, or is ended: nothing is lost, and no folder is left."""

import contextlib
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fakes.ray_sweeps import LAW_PATH, SPEC, observations, start_sweep

from orchestrator.ray_backend.own_ray import GCS


@pytest.fixture
def place() -> Iterator[Path]:
    """A place for folders of Ray, short enough for its sockets; a test leaves it empty."""
    folder = Path(f"/tmp/t{secrets.token_hex(4)}")  # noqa: S108 - as above
    folder.mkdir()
    yield folder
    folder.rmdir()


def sweep_until(place: Path, home: Path, results: int, **variables: str) -> subprocess.Popen[bytes]:
    """A sweep that has so many results."""
    (home / "small.yaml").write_text(SPEC, encoding="utf-8")
    out = home / "run"
    variables |= {"RAY_TMPDIR": str(place), "PYTHONPATH": LAW_PATH}  # laws in place of a model
    sweep = start_sweep(home / "small.yaml", out, home, **variables)
    while sweep.poll() is None and not (out.exists() and len(observations(out)) >= results):
        time.sleep(0.1)
    assert sweep.poll() is None, out.with_suffix(".log").read_text()
    return sweep


def is_trial(process: psutil.Process) -> bool:
    """Whether this is a worker of Ray that runs a trial."""
    with contextlib.suppress(psutil.NoSuchProcess, IndexError):
        return process.cmdline()[0].startswith("ray::TrialOnNode")  # between two results, too
    return False


@pytest.mark.long
def test_a_sweep_whose_gcs_is_killed_goes_on(place: Path, tmp_path: Path) -> None:
    """On another Ray; a driver that waits for the dead one ends, and the same command continues."""
    sweep, log = sweep_until(place, tmp_path, 3), tmp_path / "run.log"
    before = {o.key for o in observations(tmp_path / "run")}
    (gcs,) = [p for p in psutil.Process(sweep.pid).children() if p.name() == GCS]
    gcs.kill()
    code = sweep.wait(timeout=600)
    text = log.read_text(encoding="utf-8")
    assert "Ray on this machine has ended: its gcs_server died" in text
    if code:
        assert "run the same command again" in text.splitlines()[-1]
        assert code == 1
        subprocess.run(["rm", "-r", *place.iterdir()], check=True)  # its logs, which the line names
        assert sweep_until(place, tmp_path, 0).wait(timeout=600) == 0, log.read_text()
    keys = [o.key for o in observations(tmp_path / "run")]
    assert before <= set(keys)
    assert len(keys) == len(set(keys))
    assert "rpc_client" not in text
    assert "Traceback" not in text
    assert (tmp_path / "run" / "ranking.csv").exists()
    assert list(place.iterdir()) == []


@pytest.mark.long
def test_a_sweep_that_is_stopped_leaves_no_folder(place: Path, tmp_path: Path) -> None:
    """Nor a process; until then, its trials have the priority of the command."""
    (tmp_path / "fault").write_text("wait", encoding="utf-8")  # so that no trial ends
    sweep = sweep_until(place, tmp_path, 1, LAW_WORKER_FAULTS=str(tmp_path / "fault"))
    driver = psutil.Process(sweep.pid)
    begun = driver.children(recursive=True)
    trials = [process for process in begun if is_trial(process)]
    assert trials
    assert {process.nice() for process in trials} == {driver.nice()}
    assert list(place.iterdir())
    sweep.terminate()
    assert sweep.wait(timeout=60) == 128 + signal.SIGTERM
    assert list(place.iterdir()) == []
    assert psutil.wait_procs(begun, timeout=60)[1] == []
