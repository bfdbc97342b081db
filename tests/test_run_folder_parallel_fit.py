"""A long log is read and fitted by several processes, with the result of one."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from benchmarks.large_log import write_run
from builders.runs import ONE_CELL, spec_of

from orchestrator.run_folder import parallel_fit as long_log
from orchestrator.run_folder.parallel_fit import fits_of
from orchestrator.run_folder.run_folder import RunFolder, open_run
from orchestrator.storage.local_storage import OBSERVATIONS, lines_of
from orchestrator.storage.run_storage import StoreError
from trials.records.profile import is_observation

PROBES = 400  # of ten cells or so
PART_BYTES = 100_000  # of the 900 kB that they take
# SIGINT is heeded as in a terminal; tests that a shell runs in the background inherit ignoring it.
COMMAND = """\
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from orchestrator.run_folder import parallel_fit
from orchestrator.cli.main import main
parallel_fit.LONG_BYTES, parallel_fit.PART_BYTES = 0, 1_000
os.sched_getaffinity = lambda of: {0, 1}
raise SystemExit(main(["fit", RUN]))
"""


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Lines of a log as the benchmark makes them, including a profile."""
    folder = tmp_path_factory.mktemp("made") / "run"
    write_run(folder, PROBES)
    written = (folder / OBSERVATIONS).read_bytes().splitlines(keepends=True)
    profile = b'{"kind":"profile","cell":{}}\n'
    assert not is_observation(profile)
    return [*written[:150], profile, *written[150:]]


@pytest.fixture
def run(lines: list[bytes], tmp_path: Path) -> RunFolder:
    """A run with such a log, whose last line is incomplete."""
    open_run(tmp_path / "run", ONE_CELL, spec_of())
    (tmp_path / "run" / OBSERVATIONS).write_bytes(b"".join(lines) + lines[0][:99])
    return RunFolder(tmp_path / "run")


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat any log as long, and read it by two processes."""
    monkeypatch.setattr(long_log, "LONG_BYTES", 0)
    monkeypatch.setattr(long_log, "PART_BYTES", PART_BYTES)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


def alone(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> str:
    """The result of a run where no process may start."""
    with monkeypatch.context() as patch:
        patch.setattr(long_log, "LONG_BYTES", 100 * 2**20)
        patch.setattr(long_log, "process_pool", None)
        return fit_result(run)


def fit_result(run: RunFolder) -> str:
    """Return the fits as text, or the mistake."""
    try:
        return fits_of(run).model_dump_json()
    except StoreError as error:
        return str(error)


def workers(parent: int) -> list[psutil.Process]:
    """Worker processes of a parent that read and fit."""

    def is_worker(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            return "spawn_main" in " ".join(process.cmdline())
        return False

    with contextlib.suppress(psutil.NoSuchProcess):
        return [*filter(is_worker, psutil.Process(parent).children())]
    return []


@pytest.mark.long
@pytest.mark.usefixtures("several")
def test_several_processes_give_the_same_bytes_as_one(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither counts a torn last line, a profile or a second copy of a line as an observation."""
    fits = fit_result(run)
    assert fits.count('"law"') > 20
    assert fits == alone(run, monkeypatch)
    log = run.path / OBSERVATIONS
    whole, torn = log.read_bytes().rsplit(b"\n", 1)
    assert torn
    log.write_bytes(whole + b"\n" + whole + b"\n" + torn)
    assert fit_result(run) == alone(run, monkeypatch) == fits


@pytest.mark.usefixtures("several")
def test_the_first_damaged_line_is_reported_by_its_number(
    run: RunFolder, lines: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number is right whichever process reads the line."""
    damaged = [*lines]
    damaged[250], damaged[350] = b'{"cell":1}\n', b"\n"
    (Path(str(run.path)) / OBSERVATIONS).write_bytes(b"".join(damaged))
    mistake = fit_result(run)
    assert f"{OBSERVATIONS}:251: not an observation" in mistake
    assert mistake == alone(run, monkeypatch)


@pytest.mark.usefixtures("several")
def test_a_killed_process_is_a_one_line_error(run: RunFolder) -> None:
    """The kernel kills one where memory is short."""
    before = {worker.pid for worker in workers(os.getpid())}

    is_over = threading.Event()

    def kill() -> None:
        held = None
        while held is None and not is_over.wait(0.01):
            held = next((w for w in workers(os.getpid()) if w.pid not in before), None)
        with contextlib.suppress(psutil.NoSuchProcess):
            if held is not None:
                held.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        mistake = fit_result(run)
    finally:
        is_over.set()
        killer.join()
    assert mistake.startswith(f"{run.path}: ")
    assert "killed" in mistake
    assert "\n" not in mistake
    assert {worker.pid for worker in workers(os.getpid())} == before


@pytest.fixture
def command(run: RunFolder) -> Iterator["subprocess.Popen[str]"]:
    """``fit`` on its own terminal, with its processes suspended once they exist."""
    text = COMMAND.replace("RUN", repr(str(run.path)))
    with subprocess.Popen(
        [sys.executable, "-c", text],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        held: set[psutil.Process] = set()
        while len(held) < 2 and process.poll() is None:
            for worker in set(workers(process.pid)) - held:
                worker.suspend()
                held.add(worker)
        yield process
        process.kill()


def test_ctrl_c_ends_all_processes_with_one_line(
    command: "subprocess.Popen[str]",
) -> None:
    """A terminal sends the signal to every process."""
    begun = workers(command.pid)
    os.killpg(command.pid, signal.SIGINT)
    for worker in begun:
        with contextlib.suppress(psutil.NoSuchProcess):  # the command may have killed it by now
            worker.resume()
    printed, complaint = command.communicate(timeout=60)
    assert (command.returncode, printed) == (130, "")
    assert complaint.startswith("stopped")
    assert complaint.count("\n") == 1
    assert psutil.wait_procs(begun, timeout=30)[1] == []


def test_worker_processes_end_with_a_killed_parent(command: "subprocess.Popen[str]") -> None:
    """No worker outlives the command."""
    begun = workers(command.pid)
    assert len(begun) == 2
    for worker in begun:
        worker.resume()
    command.kill()
    assert psutil.wait_procs(begun, timeout=30)[1] == []


def test_each_line_is_in_one_part_however_a_file_is_cut(tmp_path: Path) -> None:
    """Cuts fall at the start, middle and end of a line, and in the torn last one."""
    file = tmp_path / "lines"
    file.write_bytes(b"one\n\nthree is longer\nfour\ntorn")
    expected, size = list(lines_of(file)), file.stat().st_size
    for step in range(1, size + 1):
        cuts = range(0, size, step)
        parts = [list(lines_of(file, at, min(at + step, size))) for at in cuts]
        assert [line for part in parts for line in part] == expected
