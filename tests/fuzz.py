"""Damaged and hostile input of every kind, a process each: `make fuzz`, `EXAMPLES=` inputs.

Every command must end with an answer or an error in lines: with no traceback, no more than
`CPU_SECONDS` and no more than `MOST_BYTES`; one that traces a model may take `TRACING` times that.
The inputs are drawn by hypothesis from valid ones, of which values are replaced, taken away or
doubled, and bytes cut, doubled or put in. A file for a cluster or a job that they lead to must have
no key and run no command of theirs. The seed is printed; `SEED=` repeats a run. Ctrl-C ends it with
what was found so far. Inputs that failed are kept in the folder that is named at the end.
"""

import contextlib
import importlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from hypothesis import HealthCheck, Phase, given, seed, settings

sys.path.insert(0, str(Path(__file__).parent))

from builders.fuzz_cases import cases
from builders.fuzz_inputs import Case
from builders.fuzz_written import wrong_file

from orchestrator.cli.main import main as run_command

CPU_SECONDS = 10.0
MOST_BYTES = 2 * 2**30
HANG_SECONDS = 90.0  # of a machine that other work may use
TRACING = 20  # a trace itself stops at 180 CPU seconds, or 6 GiB
PROGRESS = 500  # inputs, between two lines of progress
TRACEBACK = "Traceback (most recent call last)"
COMMANDS = ("catalog", "cluster", "dataset", "estimate", "export", "fit", "run", "sweep")


def failure(case: Case, folder: Path, run: Callable[[list[str]], int] = run_command) -> str | None:
    """What is wrong with the end of a case, which runs in a child process; None where nothing is.

    Args:
        case: command and files.
        folder: empty folder, for the files and for what the command prints (``printed``).
        run: runs a command.
    """
    for name, content in case.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    inherited = psutil.Process().memory_info().rss
    child = os.fork()
    if child == 0:
        os._exit(_in_child(case, folder, run))
    times = TRACING if case.traces else 1
    status, used = _waited(child, HANG_SECONDS * times)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it left behind
    printed = (folder / "printed").read_text(encoding="utf-8", errors="replace")
    if used.ru_utime + used.ru_stime > CPU_SECONDS * times or status is None:
        return "slow"
    if used.ru_maxrss * 1024 > inherited + MOST_BYTES or "MemoryError" in printed:
        return "large"
    if TRACEBACK in printed or os.WIFSIGNALED(status):
        return "traceback"
    return wrong_file(case, folder)


def _in_child(case: Case, folder: Path, run: Callable[[list[str]], int]) -> int:
    os.setsid()
    os.chdir(folder)
    output = os.open("printed", os.O_WRONLY | os.O_CREAT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    # What pytest or another caller put in their place stays with the caller.
    sys.stdout = os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace")
    times = TRACING if case.traces else 1
    most_bytes = psutil.Process().memory_info().data + times * MOST_BYTES
    most_seconds = int(times * CPU_SECONDS) + 1
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (most_seconds, most_seconds))
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    try:
        return run(list(case.arguments))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - this is what is looked for
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _waited(child: int, seconds: float) -> tuple[int | None, Any]:
    """Exit status and use of a child; no status where it had to be killed."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        ended, status, used = os.wait4(child, os.WNOHANG)
        if ended:
            return status, used
        time.sleep(0.005)
    os.killpg(child, signal.SIGKILL)
    return None, os.wait4(child, 0)[2]


def fuzz(examples: int, drawn_from: int) -> tuple[Counter[str], Counter[str], Path]:
    """Run so many inputs; inputs by kind, failures by kind, and the folder of those that failed."""
    kept = Path(tempfile.mkdtemp(prefix="fuzz-"))
    tried: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    began = time.monotonic()

    @seed(drawn_from)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def one(case: Case) -> None:
        folder = kept / f"{sum(tried.values()):05}"
        folder.mkdir()
        tried[case.kind] += 1
        wrong = failure(case, folder)
        if wrong is None:
            shutil.rmtree(folder)
        else:
            failed[f"{case.kind}: {wrong}"] += 1
            (folder / "command").write_text(repr(case.arguments), encoding="utf-8")
        if (done := sum(tried.values())) % PROGRESS == 0:
            seconds = time.monotonic() - began
            sys.stderr.write(f"{done} inputs in {seconds:.0f} s, {sum(failed.values())} failed\n")

    with contextlib.suppress(KeyboardInterrupt):
        one()
    return tried, failed, kept


def main() -> None:
    """Print inputs and failures, and end with 1 where anything failed."""
    drawn_from = int(os.environ.get("SEED", "0"))
    os.environ |= {"HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
    for name in COMMANDS:
        importlib.import_module(f"orchestrator.cli.commands.{name}")
    tried, failed, kept = fuzz(int(os.environ.get("EXAMPLES", "10000")), drawn_from)
    kinds = ", ".join(f"{count} of {kind}" for kind, count in sorted(tried.items()))
    sys.stdout.write(f"seed {drawn_from}: {sum(tried.values())} inputs: {kinds}\n")
    for wrong in ("traceback", "slow", "large", "unreadable", "injected"):
        count = sum(n for kind, n in failed.items() if kind.endswith(wrong))
        sys.stdout.write(f"{wrong}: {count}\n")
    if failed:
        sys.exit(f"{dict(failed)}: kept in {kept}")
    shutil.rmtree(kept)


if __name__ == "__main__":
    main()
