"""The process that traces, from outside. Next to nothing is imported here.

Importing PyTorch and its like takes it longer than all that it is asked for: it can be started
before that is known.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from threading import Thread

from trials.child_process.environment import CHILD_VARIABLES

CHILD = (
    sys.executable,
    "-m",
    "trials.child_process.bootstrap",
    "trials.simulation.tracing.bootstrap",
)


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
        self._heard, self._telling = os.pipe()
        self._process = subprocess.Popen(
            CHILD,
            env=os.environ | CHILD_VARIABLES,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
            pass_fds=(self._telling,),
        )
        os.close(self._telling)

    def answer(
        self,
        asked: Iterable[str],
        how: tuple[str, bool, float],
        timeout_seconds: float,
        tell: Callable[[str], None],
    ) -> tuple[str, str]:
        """What it says to what it is asked, and what it printed besides; it ends with that.

        Args:
            asked: a line for each trace.
            how: the folder for them, whether all at the same time, how long each may take.
            timeout_seconds: how long all may take.
            tell: is given a line on what takes long, as it does.

        Raises:
            TimeoutExpired: it took longer, and was killed.
        """
        first = json.dumps([*how, self._telling]) + "\n"
        listening = Thread(target=self._listen, args=(tell,), daemon=True)
        listening.start()
        try:
            return self._process.communicate(first + "".join(asked), timeout=timeout_seconds)
        finally:
            self.end()
            listening.join(1.0)  # what it told before it ended

    def _listen(self, tell: Callable[[str], None]) -> None:
        with open(self._heard, encoding="utf-8") as lines:  # noqa: PTH123 - a pipe has no path
            for line in lines:
                tell(line.rstrip("\n"))

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
