"""The process that traces, from outside. Next to nothing is imported here.

Importing PyTorch and its like takes it longer than all that it is asked for: it can be started
before that is known.
"""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from trials.quiet import QUIET

CHILD = (sys.executable, "-m", "trials.begin", "trials.simulation.begin")


def cache_folder() -> Path:
    """Where traces are kept: in the user's cache, as other programs do."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "finetune-cost" / "traces"


def key_start(model_name: str, seq_len: int) -> str:
    """How the keys of a model's traces at a length begin."""
    plain = re.sub(r"[^\w.-]", "_", model_name)
    return f"{plain}-{seq_len}-"


class TracingChild:
    """Starts the process."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            CHILD,
            env=os.environ | QUIET,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )

    def answer(self, asked: str, timeout_seconds: float) -> tuple[str, str]:
        """What it says to what it is asked, and what it printed besides; it ends with that.

        Raises:
            TimeoutExpired: it took longer, and was killed.
        """
        try:
            return self._process.communicate(asked, timeout=timeout_seconds)
        finally:
            self.end()

    def end(self) -> None:
        """Kills it, unless it has ended."""
        self._process.kill()
        with contextlib.suppress(ValueError):  # its pipes are closed already
            self._process.communicate()


@contextlib.contextmanager
def started_ahead(model_name: str, seq_len: int) -> Iterator[list[TracingChild]]:
    """One to be asked, as it seems; none where there are traces, or it would take the only core."""
    is_traced = any(cache_folder().glob(f"{key_start(model_name, seq_len)}*"))
    ahead = [] if is_traced or len(os.sched_getaffinity(0)) == 1 else [TracingChild()]
    ours = list(ahead)
    try:
        yield ahead
    finally:
        for child in ours:
            child.end()
