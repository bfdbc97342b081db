"""Fork server: one process imports torch once, and forks a child for each probe."""

import contextlib
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Self

from pydantic import ValidationError

from gpu_catalog.record import Record
from trials.child_process.environment import child_environment
from trials.records.failure_classification import ending, host_oom_kills
from trials.records.messages import START, ChildStarted, Ended, RankProgress, Refused, Setup
from trials.records.observation import Environment, Measurement, Outcome
from trials.records.profile import Profile

FORK_SERVER_TIMEOUT_SECONDS = 10.0  # it only waits for its child, so it answers at once
LONGEST_MESSAGE_BYTES = 16 * 2**20  # far above the reply of a probe with any number of steps
PRINTED_BYTES = 64 * 2**10  # most bytes read of the printed text; the cause of an end comes last
# BLAS and OpenMP size their thread pools when they are loaded, before torch.set_num_threads.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class ProbeEnd:
    """End of a probe, as its trial sees it.

    Attributes:
        detail: one line on the cause, for every outcome but FITS.
        measurement: present when the steps ran.
        environment: present when the child lived long enough to report it.
        memory_limit_bytes: device memory that the probe was allowed; present as above.
        final: whether another attempt is pointless.
        profile: present when it was requested and the steps ran.
        waiting: ranks of this node that had not answered at its end; for several nodes alone.
    """

    outcome: Outcome
    detail: str | None = None
    measurement: Measurement | None = None
    environment: Environment | None = None
    memory_limit_bytes: int | None = None
    final: bool = False
    profile: Profile | None = None
    waiting: tuple[RankProgress, ...] = ()


class ChildGoneError(RuntimeError):
    """The child ended, refused or was silent too long; ``end`` holds the outcome."""

    def __init__(self, end: ProbeEnd) -> None:
        super().__init__(end)
        self.end = end


def failed(detail: str) -> ProbeEnd:
    """End of a probe that failed for a reason other than memory."""
    return ProbeEnd(Outcome.FAILED, detail)


class _PrintedText:
    """Text that a fork server and its children print."""

    def __init__(self) -> None:
        self.file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with its processes
        self._start = 0

    def mark(self) -> None:
        """Drop what is printed until now."""
        self._start = os.fstat(self.file.fileno()).st_size

    def lines(self) -> list[str]:
        """Lines since the mark, each truncated."""
        end = os.fstat(self.file.fileno()).st_size
        start = max(self._start, end - PRINTED_BYTES)
        # pread: fork server and child share this file's position, and write there.
        text = os.pread(self.file.fileno(), end - start, start).decode(errors="replace")
        return [line[:300] for line in text.strip().splitlines()]


class ForkedChild:
    """A child and the fork server that it comes from. A context manager that kills both on exit.

    The fork server starts with the first child, and forks children one after another, which share
    its pipes.

    Args:
        setup: first message to the fork server: model and device of its children.
        worker: command that starts the fork server; it gets this process's id as last argument.

    Attributes:
        child_pid: process id of the living child; None without one.
    """

    def __init__(self, setup: Setup, worker: Sequence[str]) -> None:
        self._setup = setup
        self._worker = worker
        self._process: subprocess.Popen[bytes] | None = None
        self._oom_kills_before = 0
        self.child_pid: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start_fork_server(self, variables: dict[str, str]) -> None:
        self._printed = _PrintedText()
        try:
            self._process = _fork_server(self._worker, self._setup, variables, self._printed)
        except OSError:
            self._printed.file.close()
            raise
        self._received = b""
        self._owes_child = False
        self.send(self._setup)

    def start_child(self, timeout_seconds: float, variables: dict[str, str] | None = None) -> str:
        """Start a child, and its fork server where there is none, and return the first message.

        Args:
            timeout_seconds: longest time until the child is ready.
            variables: further environment variables of a new fork server.

        Raises:
            ChildGoneError: the child ended, was silent too long or refused.
            OSError: the fork server could not be started.
        """
        if self._process is None:
            self._start_fork_server(variables or {})
        self._oom_kills_before = host_oom_kills()
        self._owes_child = True
        self.send(START)
        started = time.monotonic()
        line = self.receive(timeout_seconds, "importing the libraries")
        self.child_pid = ChildStarted.model_validate_json(line).pid
        self._owes_child = False
        left = timeout_seconds - (time.monotonic() - started)
        return self.receive(left, "building the model", allowed_seconds=timeout_seconds)

    def send(self, message: Record | str) -> None:
        """Send a record or a line to the child, or to the fork server while it has no child.

        Raises:
            ChildGoneError: the process at the other end has ended.
        """
        line = message if isinstance(message, str) else message.model_dump_json() + "\n"
        assert self._process is not None
        assert self._process.stdin is not None
        # A child that waits for this line prints nothing now, so the mark separates the text of
        # this request from earlier text. A fork server that still imports may be printing.
        if self.child_pid is not None:
            self._printed.mark()
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ChildGoneError(self._ending(self._exit_code())) from None

    def receive(
        self, timeout_seconds: float, activity: str, *, allowed_seconds: float | None = None
    ) -> str:
        """Wait for the child's next message.

        Args:
            timeout_seconds: longest time to wait.
            activity: work the child is doing, named in the error when it is silent.
            allowed_seconds: time the child had in all, if waiting began before.

        Raises:
            ChildGoneError: the child ended, was silent too long or refused.
        """
        line = self._next_line(timeout_seconds)
        if line is None:
            text = f"no answer within {allowed_seconds or timeout_seconds:g} s, {activity}"
            raise ChildGoneError(ProbeEnd(Outcome.TIMED_OUT, text))
        with contextlib.suppress(ValidationError):
            ended = Ended.model_validate_json(line)
            self.child_pid = None
            end = self._ending(ended.exit_code)
            self._printed.mark()
            raise ChildGoneError(end)
        with contextlib.suppress(ValidationError):
            refused = Refused.model_validate_json(line)
            waiting = refused.waiting
            raise ChildGoneError(
                ProbeEnd(refused.outcome, refused.detail, final=refused.final, waiting=waiting)
            )
        return line

    def interrupt(self) -> None:
        """Kill the child that another thread waits for, or the fork server that is to start it."""
        process, pid = self._process, self.child_pid
        if pid is not None:
            _kill(pid)
        elif process is not None and self._owes_child:  # an idle one is left for the next child
            process.kill()

    def end_child(self) -> None:
        """Kill the child, and the fork server too if it cannot continue without it."""
        if self._process is None:
            return
        if self.child_pid is not None:
            can_continue = self._killed_child(self.child_pid)
        else:
            # A fork server that still imports will fork a child for the START it was sent; that
            # child would take the next START for a probe request.
            can_continue = not self._owes_child and self._process.poll() is None
        if not can_continue:
            self.close()

    def _killed_child(self, pid: int) -> bool:
        """Kill the child; whether the fork server has reported its end."""
        _kill(pid)
        self.child_pid = None
        # Drop the child's unread messages; the fork server's report of its end comes last.
        with contextlib.suppress(ChildGoneError):
            while line := self._next_line(FORK_SERVER_TIMEOUT_SECONDS):
                with contextlib.suppress(ValidationError):
                    Ended.model_validate_json(line)
                    self._printed.mark()
                    return True
        return False

    def close(self) -> None:
        """Kill the child and the fork server, if there are any."""
        if self._process is None:
            return
        if self.child_pid is not None:
            _kill(self.child_pid)
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # Unsent bytes have no reader any more.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._printed.file.close()
        self._process = self.child_pid = None

    def _next_line(self, timeout_seconds: float) -> str | None:
        assert self._process is not None
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            late = False
            while b"\n" not in self._received:
                # select() returns at once for a child that never stops writing, so its timeout
                # alone would not end the wait.
                if late or not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                late = time.monotonic() > deadline
                chunk = os.read(self._process.stdout.fileno(), 65536)
                if not chunk:
                    raise ChildGoneError(self._ending(self._exit_code()))
                self._received = (self._received + chunk).lstrip(b"\n")
                if len(self._received) > LONGEST_MESSAGE_BYTES:
                    self._received = b""
                    text = f"an invalid message of over {LONGEST_MESSAGE_BYTES} bytes"
                    raise ChildGoneError(failed(f"the child sent {text}"))
        line, _, rest = self._received.partition(b"\n")
        self._received = rest.lstrip(b"\n")
        return line.decode(errors="replace")

    def _exit_code(self) -> int:
        """Exit code of the fork server, which has closed its end of the pipes."""
        assert self._process is not None
        try:
            return self._process.wait(FORK_SERVER_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _ending(self, code: int) -> ProbeEnd:
        killed = host_oom_kills() > self._oom_kills_before
        return ProbeEnd(*ending(code, self._printed.lines(), killed_for_memory=killed))


def _fork_server(
    worker: Sequence[str], setup: Setup, variables: dict[str, str], printed: _PrintedText
) -> subprocess.Popen[bytes]:
    """Start a fork server, with the socket at which ranks of several nodes meet."""
    threads = dict.fromkeys(THREAD_VARIABLES, str(setup.threads))
    listening = None if setup.place is None else setup.place.listening
    return subprocess.Popen(
        [*worker, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=printed.file,
        env=child_environment() | threads | variables,
        pass_fds=() if listening is None else (listening,),
    )


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
