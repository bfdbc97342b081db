"""Parent's side of the tracing processes. It imports next to nothing.

Importing PyTorch and transformers takes a process longer than most traces. So it can be started
before its requests are known, and forks a child for each group of requests.
"""

import atexit
import contextlib
import json
import os
import re
import select
import socket
import subprocess
import sys
import tempfile
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
    return f"{plain}-{seq_len}"


class TracingChild:
    """A tracing process, started at once. It ends when idle for a minute, or with its parent.

    Args:
        command: command that starts it; the number of its socket is the last argument.
    """

    def __init__(self, command: Sequence[str] = CHILD) -> None:
        self._parent = os.getpid()
        self._socket, theirs = socket.socketpair()
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                env=child_environment(),
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=self._printed,
                pass_fds=(theirs.fileno(),),
            )
        # It may end while nobody asks for it: a zombie would stay.
        Thread(target=self._process.wait, daemon=True).start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether this process started it, and it has not ended.

        The thread that waits for it may learn of its end late. Its socket closes at once, and is
        silent while it is idle.
        """
        if self._parent != os.getpid() or self._process.poll() is not None:
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def answer(
        self,
        requests: Iterable[str],
        settings: tuple[str, str, int | None, float],
        timeout_seconds: float,
        report: Callable[[str], None],
    ) -> tuple[str, str]:
        """Send requests, and return the replies and the printed text.

        Args:
            requests: a line for each trace.
            settings: folder for the traces, the one of earlier ones, number of processes (None: one
                for each), seconds for each.
            timeout_seconds: longest time for all.
            report: called with a line on each trace that takes long, while it does.

        Raises:
            TimeoutError: the process took longer.
        """
        start = os.fstat(self._printed.fileno()).st_size
        progress, progress_end = os.pipe()
        listener = Thread(target=_listen, args=(progress, report), daemon=True)
        listener.start()
        with tempfile.TemporaryFile() as asking, tempfile.TemporaryFile() as replies:
            asking.write("".join([json.dumps(settings) + "\n", *requests]).encode())
            asking.seek(0)
            files = (asking.fileno(), replies.fileno(), progress_end)
            try:
                with contextlib.suppress(ConnectionError):  # it has ended, which the reply shows
                    socket.send_fds(self._socket, [b"?"], files)
                os.close(progress_end)
                self._socket.settimeout(timeout_seconds)
                with contextlib.suppress(ConnectionError):
                    self._socket.recv(1)
            finally:
                listener.join(1.0)  # for lines written before the end
            # pread: the process shares these files' positions.
            return _text(replies.fileno(), 0), _text(self._printed.fileno(), start)

    def end(self) -> None:
        """Kill the process, unless it has ended."""
        if self._parent == os.getpid():
            self._process.kill()
            self._process.wait()
        self._socket.close()
        self._printed.close()


class TracingChildren:
    """Tracing processes that wait for requests, to be used again.

    Args:
        command: command that starts one.
    """

    def __init__(self, command: Sequence[str] = CHILD) -> None:
        self._command = command
        self._idle: list[TracingChild] = []

    def __reduce__(self) -> tuple[type["TracingChildren"], tuple[Sequence[str]]]:
        """Another process gets processes of its own."""
        return TracingChildren, (self._command,)

    @contextlib.contextmanager
    def one(self) -> Iterator[TracingChild]:
        """A tracing process for this context alone; it is killed if the context raises."""
        child = self._taken() or TracingChild(self._command)
        try:
            yield child
        except BaseException:
            child.end()
            raise
        self._idle.append(child)

    def start_ahead(self) -> None:
        """Start a tracing process that will probably be needed, unless one is idle."""
        self._idle.append(self._taken() or TracingChild(self._command))

    def end(self) -> None:
        """Kill the idle processes."""
        while (child := self._taken()) is not None:
            child.end()

    def _taken(self) -> TracingChild | None:
        """An idle process that is alive; None without one."""
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread took the last
                child = self._idle.pop()
                if child.is_alive:
                    return child
                child.end()
        return None


CHILDREN = TracingChildren()
"""Tracing processes of this process."""
atexit.register(CHILDREN.end)


def start_ahead(model_name: str, seq_len: int) -> None:
    """Start a tracing process for a cell that has no traces.

    None is started where it would take the only core.
    """
    is_traced = any(cache_folder().glob(f"{key_start(model_name, seq_len)}-*"))
    if not is_traced and len(os.sched_getaffinity(0)) > 1:
        CHILDREN.start_ahead()


def _listen(progress: int, report: Callable[[str], None]) -> None:
    with open(progress, encoding="utf-8") as lines:
        for line in lines:
            report(line.rstrip("\n"))


def _text(file: int, start: int) -> str:
    return os.pread(file, os.fstat(file).st_size - start, start).decode(errors="replace")
