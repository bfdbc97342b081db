"""Parent's side of the tracing process. It imports next to nothing.

Importing PyTorch and transformers takes the child longer than its traces, so that it can be started
before its requests are known.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from threading import Thread

from trials.child_process.environment import child_environment

CHILD = (
    sys.executable,
    "-m",
    "trials.child_process.bootstrap",
    "trials.simulation.tracing.bootstrap",
)


def cache_folder() -> Path:
    """Folder of traces in the user's cache (XDG_CACHE_HOME)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "finetune-cost" / "traces"


def key_start(model_name: str, seq_len: int) -> str:
    """Common prefix of the keys of a model's traces at a sequence length."""
    plain = re.sub(r"[^\w.-]", "_", model_name)
    return f"{plain}-{seq_len}-"


class TracingChild:
    """A tracing process, started at once.

    Args:
        command: command that starts it.
    """

    def __init__(self, command: Sequence[str] = CHILD) -> None:
        pipe = subprocess.PIPE
        self._progress, progress_end = os.pipe()
        self._process = subprocess.Popen(
            command,
            env=child_environment(),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
            pass_fds=(progress_end,),
        )
        self._progress_end = progress_end
        os.close(progress_end)

    def answer(
        self,
        requests: Iterable[str],
        settings: tuple[str, bool, float],
        timeout_seconds: float,
        report: Callable[[str], None],
    ) -> tuple[str, str]:
        """Send all requests, and return the replies and the printed text; the process ends then.

        Args:
            requests: a line for each trace.
            settings: folder for the traces, whether to make all at once, seconds for each.
            timeout_seconds: longest time for all.
            report: called with a line on each trace that takes long, while it does.

        Raises:
            TimeoutExpired: the process took longer, and was killed.
        """
        first = json.dumps([*settings, self._progress_end]) + "\n"
        listener = Thread(target=self._listen, args=(report,), daemon=True)
        listener.start()
        try:
            return self._process.communicate(first + "".join(requests), timeout=timeout_seconds)
        finally:
            self.end()
            listener.join(1.0)  # for lines written before the end

    def _listen(self, report: Callable[[str], None]) -> None:
        with open(self._progress, encoding="utf-8") as lines:  # noqa: PTH123 - a pipe has no path
            for line in lines:
                report(line.rstrip("\n"))

    def end(self) -> None:
        """Kill the process, unless it has ended."""
        self._process.kill()
        with contextlib.suppress(ValueError):  # the pipes are closed already
            self._process.communicate()


@contextlib.contextmanager
def started_ahead(model_name: str, seq_len: int) -> Iterator[list[TracingChild]]:
    """Start a tracing process that will probably be needed.

    None is started where the cell has traces, or where it would take the only core.
    """
    is_traced = any(cache_folder().glob(f"{key_start(model_name, seq_len)}*"))
    ahead = [] if is_traced or len(os.sched_getaffinity(0)) == 1 else [TracingChild()]
    started = list(ahead)
    try:
        yield ahead
    finally:
        for child in started:
            child.end()
