"""Sweeps on a real Ray on this machine: undisturbed, with killed children, and resumed."""

import os
import random
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from fakes.ray_sweeps import LAW_PATH, SPEC, environment, observations, start_sweep
from fakes.terminal import shown, without_style
from tensorboardX.proto import event_pb2

from orchestrator.run_folder.run_folder import RunFolder
from trials.records.observation import Outcome, largest_batch

pytestmark = pytest.mark.long
KILLS = 10
DIED = ": died: "  # what the driver says of a trial whose Ray worker is gone


# Ray's names of its processes, and the lines that Tune and Ray print of their own.
FOREIGN = re.compile(
    r"TrialOnNode_|Last result|Trial name|Trial status|Logical resource|tune_hash|"
    r"\((raylet|autoscaler|pid=|TrialOnNode|bundle_reservation)|"
    r"Started a local Ray|View detailed results|Configuration for experiment|"
    r"(INFO|WARNING|ERROR) \w+\.py:\d+"
)


def foreign_lines(text: str) -> list[str]:
    """Lines that Ray or Tune wrote."""
    return [line for line in text.splitlines() if FOREIGN.search(line)]


def wait_until(true: Callable[[], bool], *, seconds: float) -> bool:
    """Return whether a condition came true in time."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A separate home directory with the specification."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "small.yaml").write_text(SPEC, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def undisturbed(home: Path) -> Path:
    """A complete sweep in which only a child and a Ray worker were killed."""
    out = home / "undisturbed"
    logged = {"MLFLOW_TRACKING_URI": (home / "mlflow").as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    tools = ("--log-to", "tensorboard", "--log-to", "mlflow")
    sweep = start_sweep(home / "small.yaml", out, home, *tools, **logged)
    assert wait_until((out / "sweep.yaml").exists, seconds=60)
    (out / "trials").mkdir()  # planted while Ray starts
    for trap in (out / "colorsys.py", out / "trials" / "__init__.py"):
        trap.write_text(f"open({str(out / 'executed')!r}, 'a').close()\n", encoding="utf-8")
    log = out.with_suffix(".log")
    killed = kill_until_reported(
        sweep, kill_a_child, lambda: any(not o.outcome.is_verdict for o in observations(out))
    ) and kill_until_reported(sweep, kill_a_ray_worker, lambda: DIED in log.read_text())
    assert sweep.wait(timeout=600) == 0, log.read_text()
    assert killed, log.read_text()
    return out


def kill_until_reported(
    sweep: subprocess.Popen[bytes], kill: Callable[[int], bool], reported: Callable[[], bool]
) -> bool:
    """Kill until a kill is reported, since one may meet a process that has just ended."""
    while sweep.poll() is None:
        if kill(sweep.pid) and wait_until(reported, seconds=30):
            return True
    return False


def trial_processes(driver: int) -> list[psutil.Process]:
    """The fork servers and children of a driver's trials."""
    family = psutil.Process(driver).children(recursive=True)
    return [process for process in family if _is_worker(process)]


def kill_a_child(driver: int) -> bool:
    """Kill the first trial's child that appears."""
    children: list[psutil.Process] = []

    def child_appears() -> bool:
        children[:] = [p for p in trial_processes(driver) if _is_worker(p.parent())]
        return bool(children)

    if not wait_until(child_appears, seconds=120):
        return False
    return _killed(children[0])


def kill_a_ray_worker(driver: int) -> bool:
    """Kill the first Ray worker with a trial, as Ray does when a node runs low on memory."""
    workers: list[psutil.Process] = []

    def worker_appears() -> bool:
        nurseries = [p for p in trial_processes(driver) if not _is_worker(p.parent())]
        workers[:] = [parent for p in nurseries if (parent := p.parent()) is not None]
        return bool(workers)

    if not wait_until(worker_appears, seconds=120):
        return False
    return _killed(workers[0])


def _killed(process: psutil.Process) -> bool:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return False
    return True


def alive(process: psutil.Process) -> bool:
    """Return whether the process still runs; a zombie does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_worker(process: psutil.Process | None) -> bool:
    try:
        return process is not None and "trials.training.worker" in process.cmdline()
    except psutil.Error:
        return False


def test_lines_of_ray_and_tune_do_not_reach_the_log_of_a_job(undisturbed: Path) -> None:
    """Each line is the program's own: its progress, a remark, or the result."""
    log = undisturbed.with_suffix(".log").read_text(encoding="utf-8")
    assert "started" in log
    assert foreign_lines(log) == []


@pytest.mark.parametrize(("rows", "columns"), [(24, 80), (50, 200)])
def test_a_terminal_shows_a_live_table_and_no_lines_of_ray_and_tune(
    home: Path, rows: int, columns: int
) -> None:
    """The bar and the table are no wider than the terminal."""
    out = home / f"terminal-{columns}"
    arguments = [sys.executable, "-m", "orchestrator", "sweep", "one.yaml", "--out", str(out)]
    one = SPEC.replace("[24, 32, 40]", "[24]").replace("max_batch_size: 32", "max_batch_size: 2")
    (home / "one.yaml").write_text(one, encoding="utf-8")
    settings = environment(home, PYTHONPATH=LAW_PATH)  # a law in place of the model
    code, written = shown(arguments, settings, home, rows=rows, columns=columns)
    assert code == 0, written
    text = without_style(written)
    assert "elapsed, 0/1 done" in text
    assert "largest batch" in text
    assert foreign_lines(text) == []
    live = [line for line in re.split(r"[\r\n]+", text) if "elapsed" in line or " trial" in line]
    assert max(map(len, live)) <= columns


def test_every_cell_is_closed_from_both_sides_and_the_files_are_there(undisturbed: Path) -> None:
    """Each cell has a fit at b and a miss at b+1 or the limit, then come fits and a ranking."""
    observed = observations(undisturbed)
    cells = RunFolder(undisturbed).spec().all_cells()
    for cell in cells:
        limit = largest_batch([o for o in observed if o.cell == cell])
        assert limit is not None
        largest, miss = limit
        assert largest >= 1
        assert miss is not None
        assert (miss.batch_size, miss.outcome) == (largest + 1, Outcome.OUT_OF_MEMORY)
    names = {path.name for path in undisturbed.iterdir()}
    assert {"fits.json", "ranking.csv", "ranking.json", "report.md", "sweep.yaml"} <= names
    ranking = (undisturbed / "ranking.csv").read_text(encoding="utf-8").splitlines()
    assert len(ranking) == 1 + len(cells)


def test_no_python_file_in_the_run_folder_is_executed(undisturbed: Path) -> None:
    """Neither the driver nor a Ray worker nor a child imports from the run folder."""
    assert not (undisturbed / "executed").exists()


def test_a_child_killed_in_a_sweep_is_recorded_and_its_probe_repeated(undisturbed: Path) -> None:
    """The kill is a FAILED observation; the repeated probe ends in a verdict."""
    observed = observations(undisturbed)
    failed, *_ = [o for o in observed if o.outcome is Outcome.FAILED]
    assert "SIGKILL" in (failed.detail or "")
    again = [
        o
        for o in observed
        if (o.cell, o.purpose, o.batch_size, o.repeat)
        == (failed.cell, failed.purpose, failed.batch_size, failed.repeat)
    ]
    assert [o.attempt for o in again] == list(range(1, len(again) + 1))
    assert again[-1].outcome.is_verdict


def test_a_ray_worker_killed_in_a_sweep_is_reported_and_its_trial_restarted(
    undisturbed: Path,
) -> None:
    """One line without a traceback reports it; no observation is repeated."""
    log = undisturbed.with_suffix(".log").read_text(encoding="utf-8")
    assert DIED in log
    assert "Traceback" not in log
    keys = [o.key for o in observations(undisturbed)]
    assert len(keys) == len(set(keys))


def scalars(file: Path) -> dict[str, list[float]]:
    """Scalars of a TensorBoard event file by tag."""
    values_by_tag: dict[str, list[float]] = {}
    content, at = file.read_bytes(), 0
    while at < len(content):  # a length, its checksum, the event, its checksum
        (length,) = struct.unpack_from("<Q", content, at)
        event = event_pb2.Event.FromString(content[at + 12 : at + 12 + length])
        for value in event.summary.value:
            values_by_tag.setdefault(value.tag, []).append(value.simple_value)
        at += 16 + length
    return values_by_tag


def test_trials_are_logged_to_tensorboard_and_mlflow(undisturbed: Path, home: Path) -> None:
    """Each cell has its key and its probes; the trial of a killed worker continues."""
    observed = observations(undisturbed)
    for key in {o.cell.key for o in observed}:
        drawn: dict[str, list[float]] = {}
        for file in (undisturbed / "tensorboard" / key).glob("events.*"):
            for tag, values in scalars(file).items():
                drawn.setdefault(tag, []).extend(values)
        of_cell = [o for o in observed if o.cell.key == key]
        assert sorted(drawn["ray/tune/batch_size"]) == sorted(o.batch_size for o in of_cell)
        timed = sum(bool(o.measurement and o.measurement.step_seconds) for o in of_cell)
        assert len(drawn["ray/tune/examples_per_second"]) == timed
    names = [path.read_text() for path in (home / "mlflow").glob("*/*/tags/mlflow.runName")]
    assert set(names) == {o.cell.key for o in observed}


def test_a_driver_killed_repeatedly_loses_and_repeats_nothing(
    undisturbed: Path, home: Path
) -> None:
    """Killed at random moments and resumed, it has the keys of an undisturbed run."""
    out, chance = home / "killed", random.Random(11)
    log = out.with_suffix(".log")
    for kill in range(KILLS):
        before = len(observations(out)) if out.exists() else 0
        sweep = start_sweep(home / "small.yaml", out, home)
        if kill % 3 < 2:  # at any moment, mostly while things start
            time.sleep(chance.uniform(0, 10))
        else:  # while probes are made, however slow the machine
            target = before + chance.randint(1, 3)
            wait_until(lambda: len(observations(out)) >= target, seconds=90)  # noqa: B023 - used at once
            time.sleep(chance.uniform(0, 0.5))
        assert sweep.poll() is None, f"over before kill {kill}: {log.read_text()}"
        children = trial_processes(sweep.pid)
        os.kill(sweep.pid, signal.SIGKILL)
        sweep.wait()
        assert wait_until(lambda: not any(map(alive, children)), seconds=30)  # noqa: B023 - used at once
    last = start_sweep(home / "small.yaml", out, home)
    assert last.wait(timeout=180) == 0, log.read_text()
    keys = [o.key for o in observations(out)]
    assert len(keys) == len(set(keys))
    # The undisturbed run had one child killed: its second attempt stands for the first.
    expected = {
        o.key.rpartition("/t")[0] for o in observations(undisturbed) if o.outcome.is_verdict
    }
    assert {key.rpartition("/t")[0] for key in keys} == expected
    assert all(o.outcome.is_verdict for o in observations(out))
