"""Signals that end a command."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from builders.runs import ONE_CELL

from orchestrator.storage.local_storage import OBSERVATIONS


@pytest.mark.parametrize(
    ("arguments", "is_at_work", "resumes"),
    [
        (
            (*("estimate", "--model", "llama-tiny", "--gpu", "A40"), "--seq-len", "24"),
            lambda children, _: children,
            False,
        ),
        pytest.param(
            ("sweep", "one.yaml", "--out", "run"),
            lambda _, folder: [f for f in folder.glob(f"run/{OBSERVATIONS}") if f.stat().st_size],
            True,
            marks=pytest.mark.long,
        ),
    ],
    ids=["estimate", "sweep"],
)
def test_sigterm_ends_a_command_and_its_processes_in_a_line(
    tmp_path: Path,
    arguments: tuple[str, ...],
    is_at_work: Callable[[list[psutil.Process], Path], object],
    *,
    resumes: bool,
) -> None:
    """As Ctrl-C does, with the exit code of a shell for SIGTERM."""
    (tmp_path / "one.yaml").write_text(ONE_CELL, encoding="utf-8")
    command = psutil.Popen(
        [sys.executable, "-m", "orchestrator", *arguments],
        cwd=tmp_path,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while command.poll() is None and not is_at_work(command.children(), tmp_path):
        time.sleep(0.01)
    begun = command.children(recursive=True)
    command.terminate()
    _, complaint = command.communicate(timeout=60)
    assert command.returncode == 143, complaint
    last = complaint.splitlines()[-1]
    assert last.startswith("stopped")
    assert ("resume" in last) == resumes
    assert "Traceback" not in complaint
    assert psutil.wait_procs(begun, timeout=30)[1] == []


ESTIMATE = """
import signal, sys
from orchestrator.cli.main import program
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a caller may have ignored
sys.argv = ["finetune-cost", "estimate", "--model", "llama-tiny", "--gpu", "A40", "--seq-len", "24"]
program()
"""
PRICES_WITHOUT_END = """
import os, time
from orchestrator.estimating import estimate

def waits(*_):
    os.write(2, b"pricing\\n")
    time.sleep(600)

estimate.batch_candidates = waits
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_an_estimate_that_prices(number: int, code: int) -> None:
    """A replay in a thread cannot be stopped: the command does not wait for it."""
    command = psutil.Popen(
        [sys.executable, "-c", PRICES_WITHOUT_END + ESTIMATE],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "pricing\n" in iter(command.stderr.readline, "")
    begun = command.children(recursive=True)
    command.send_signal(number)
    _, complaint = command.communicate(timeout=20)
    assert command.returncode == code
    assert complaint.replace("pricing\n", "") == "stopped\n"
    assert psutil.wait_procs(begun, timeout=20)[1] == []


INTERRUPTED_IN_A_CALLBACK = """
import os, time
from gpu_catalog.errors import UserError
from orchestrator.estimating import estimate_job

def forks(*_):
    os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), {number}))
    if os.fork() == 0:
        os._exit(0)
    try:
        time.sleep(600)
    except KeyboardInterrupt as error:
        raise UserError("as where Ray cannot be started") from error

estimate_job.estimate_job = forks
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_command_that_forks(number: int, code: int) -> None:
    """Python ignores errors in callbacks of a fork, and another error may hide an interruption."""
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IN_A_CALLBACK.format(number=int(number)) + ESTIMATE],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (code, "stopped\n")
