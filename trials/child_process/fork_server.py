"""Fork server: one process imports torch once, and forks a child for each probe."""

import contextlib
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pydantic import ValidationError

from trials.child_process.environment import CHILD_VARIABLES
from trials.records.failure_classification import ending, host_oom_kills
from trials.records.messages import START, ChildStarted, Ended
from trials.records.observation import Environment, Measurement, Outcome
from trials.records.profile import Profile

FORK_SERVER_TIMEOUT_SECONDS = 10.0  # it has nothing to do but wait for its child
LONGEST_ANSWER_BYTES = 16 * 2**20  # far more than a probe of any number of steps has to say
PRINTED_BYTES = 64 * 2**10  # of what it printed; why it ended stands at the end
# Left alone, BLAS and OpenMP take every core of the machine, whatever torch is told later.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class ProbeEnd:
    """How a probe ended, as the trial saw it.

    Attributes:
        outcome: how.
        detail: one line on why, for everything but FITS.
        measurement: present when the steps ran.
        profile: present when it was asked for and the steps ran.
        environment: present when the child lived long enough to say where it ran.
        memory_limit_bytes: the device memory it was held against; present as above.
        final: trying again cannot help.
    """

    outcome: Outcome
    detail: str | None = None
    measurement: Measurement | None = None
    environment: Environment | None = None
    memory_limit_bytes: int | None = None
    final: bool = False
    profile: Profile | None = None


class ChildGoneError(RuntimeError):
    """The child ended, or was silent too long. Carries the outcome that stands for."""

    def __init__(self, end: ProbeEnd) -> None:
        super().__init__(end)
        self.end = end


def failed(detail: str) -> ProbeEnd:
    """A probe that says nothing about memory."""
    return ProbeEnd(Outcome.FAILED, detail)


class ForkServer:
    """The process that forks children, its child, and the pipes that reach both."""

    def __init__(
        self, worker: Sequence[str], threads: int, variables: Mapping[str, str] | None = None
    ) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        try:
            self._process = subprocess.Popen(
                [*worker, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=_child_environment(threads) | dict(variables or {}),
            )
        except OSError:
            self._errors.close()
            raise
        self._received = b""
        self._printed_before = 0
        self._oom_kills_before = 0
        self._owes_child = False
        self.child_pid: int | None = None

    def start_child(self, timeout_seconds: float) -> str:
        """Forks a child.

        Returns:
            Its first word.

        Raises:
            ChildGoneError: it ended, or said nothing for so long.
        """
        self._oom_kills_before = host_oom_kills()
        self._owes_child = True
        self.tell(START)
        started = time.monotonic()
        born = ChildStarted.model_validate_json(
            self.answer(timeout_seconds, "importing the libraries")
        )
        self._owes_child = False
        self.child_pid = born.pid
        left = timeout_seconds - (time.monotonic() - started)
        return self.answer(left, "building the model", allowed_seconds=timeout_seconds)

    def tell(self, line: str) -> None:
        """Says a line to the child, or to the nursery while there is none.

        Raises:
            ChildGoneError: nobody is there to hear it.
        """
        assert self._process.stdin is not None
        # Only a child that waits for this line prints nothing meanwhile that belongs to the next.
        if self.child_pid is not None:
            self._printed_before = self._printed_bytes()
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ChildGoneError(self._ending(self._exit_code())) from None

    def answer(
        self, timeout_seconds: float, doing: str, *, allowed_seconds: float | None = None
    ) -> str:
        """The next line the child says.

        Args:
            timeout_seconds: how long to wait for it.
            doing: what the child is about, to be told if it is silent.
            allowed_seconds: how long it had, if waiting began before.

        Raises:
            ChildGoneError: it ended, or said nothing for so long.
        """
        line = self._next_line(timeout_seconds)
        if line is None:
            text = f"no answer within {allowed_seconds or timeout_seconds:g} s, {doing}"
            raise ChildGoneError(ProbeEnd(Outcome.TIMED_OUT, text))
        with contextlib.suppress(ValidationError):
            ended = Ended.model_validate_json(line)
            self.child_pid = None
            end = self._ending(ended.exit_code)
            self._printed_before = self._printed_bytes()
            raise ChildGoneError(end)
        return line

    def end_child(self) -> bool:
        """Kills the child.

        Returns:
            Whether the nursery can go on without it.
        """
        if self.child_pid is None:
            # One that is still importing would have its child take the next START for a probe.
            return not self._owes_child and self._process.poll() is None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.child_pid, signal.SIGKILL)
        self.child_pid = None
        # What it said before it died is dropped; the nursery's word that it ended comes last.
        with contextlib.suppress(ChildGoneError):
            while line := self._next_line(FORK_SERVER_TIMEOUT_SECONDS):
                with contextlib.suppress(ValidationError):
                    Ended.model_validate_json(line)
                    self._printed_before = self._printed_bytes()
                    return True
        return False

    def close(self) -> None:
        """Kills the nursery; its child goes with it."""
        if self.child_pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.child_pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # What was still in the pipe has no reader any more.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._errors.close()

    def _next_line(self, timeout_seconds: float) -> str | None:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            late = False
            while b"\n" not in self._received:
                # One that never stops talking is never waited for: the clock is asked all the same.
                if late or not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                late = time.monotonic() > deadline
                chunk = os.read(self._process.stdout.fileno(), 65536)
                if not chunk:
                    raise ChildGoneError(self._ending(self._exit_code()))
                self._received = (self._received + chunk).lstrip(b"\n")
                if len(self._received) > LONGEST_ANSWER_BYTES:
                    self._received = b""
                    text = f"the child's answer is not one: over {LONGEST_ANSWER_BYTES} bytes"
                    raise ChildGoneError(failed(text))
        line, _, rest = self._received.partition(b"\n")
        self._received = rest.lstrip(b"\n")
        return line.decode(errors="replace")

    def _exit_code(self) -> int:
        """Of the nursery, whose end of the pipes is closed."""
        try:
            return self._process.wait(FORK_SERVER_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _ending(self, code: int) -> ProbeEnd:
        killed = host_oom_kills() > self._oom_kills_before
        return ProbeEnd(*ending(code, self._printed(), killed_for_memory=killed))

    def _printed(self) -> list[str]:
        """The lines printed since the last request or end of a child, each cut short."""
        end = self._printed_bytes()
        start = max(self._printed_before, end - PRINTED_BYTES)
        # Read in place: nursery and child write where this file's position is.
        text = os.pread(self._errors.fileno(), end - start, start).decode(errors="replace")
        return [line[:300] for line in text.strip().splitlines()]

    def _printed_bytes(self) -> int:
        return os.fstat(self._errors.fileno()).st_size


def _child_environment(threads: int) -> dict[str, str]:
    # The packages may come from a Ray job's working directory, which only sys.path knows of.
    packages = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (packages, os.environ.get("PYTHONPATH"))))
    counts = dict.fromkeys(THREAD_VARIABLES, str(threads))
    return os.environ | CHILD_VARIABLES | {"PYTHONPATH": path} | counts
