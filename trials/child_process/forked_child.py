"""Child of a fork server: its start, its messages and its end."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from pydantic import ValidationError

from gpu_catalog.record import Record
from trials.child_process.environment import child_environment
from trials.child_process.fork_server import ForkServers, MessageError, ServerProcess
from trials.records.collectives import CollectiveTime
from trials.records.failure_classification import ending, host_oom_kills
from trials.records.messages import ChildStarted, Ended, RankProgress, Refused, Setup
from trials.records.observation import Environment, Measurement, Outcome
from trials.records.profile import Profile

FORK_SERVER_TIMEOUT_SECONDS = 10.0  # it only waits for its child, so it answers at once
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
        collectives: times of the collectives where they were requested.
        waiting: ranks of this node that had not answered at its end; for several nodes alone.
    """

    outcome: Outcome
    detail: str | None = None
    measurement: Measurement | None = None
    environment: Environment | None = None
    memory_limit_bytes: int | None = None
    final: bool = False
    profile: Profile | None = None
    collectives: tuple[CollectiveTime, ...] | None = None
    waiting: tuple[RankProgress, ...] = ()


class ChildGoneError(RuntimeError):
    """The child ended, refused or was silent too long; ``end`` holds the outcome."""

    def __init__(self, end: ProbeEnd) -> None:
        super().__init__(end)
        self.end = end


def failed(detail: str) -> ProbeEnd:
    """End of a probe that failed for a reason other than memory."""
    return ProbeEnd(Outcome.FAILED, detail)


class ForkedChild:
    """A child and the fork server that it comes from. A context manager that kills both on exit.

    The fork server starts with the first child, and forks children one after another, which share
    its pipes.

    Args:
        setup: model and device of the children; the request for each to the fork server.
        worker: command that starts the fork server; it gets this process's id as last argument.
        servers: give the fork server, and keep it afterwards; absent for one of its own, as ranks
            of several nodes need, which meet at a socket that it inherits.

    Attributes:
        child_pid: process id of the living child; None without one.
    """

    def __init__(
        self, setup: Setup, worker: Sequence[str], servers: ForkServers | None = None
    ) -> None:
        self._setup = setup
        self._worker = worker
        self._servers = servers
        self._server: ServerProcess | None = None
        self._owes_child = False
        self._oom_kills_before = 0
        self.child_pid: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start_fork_server(self, variables: dict[str, str]) -> ServerProcess:
        """Start a fork server, with the socket at which ranks of several nodes meet."""
        place, threads = self._setup.place, str(self._setup.threads)
        command = (*self._worker, str(os.getpid()))
        environment = child_environment() | dict.fromkeys(THREAD_VARIABLES, threads) | variables
        if self._servers is not None:
            assert place is None
            return self._servers.take(command, environment)
        listening = None if place is None else place.listening
        return ServerProcess(command, environment, () if listening is None else (listening,))

    def start_child(
        self,
        timeout_seconds: float,
        variables: dict[str, str] | None = None,
        setup: Setup | None = None,
    ) -> str:
        """Start a child, and its fork server where there is none, and return the first message.

        Args:
            timeout_seconds: longest time until the child is ready.
            variables: further environment variables of a new fork server.
            setup: request for another child than the others; None for one like them.

        Raises:
            ChildGoneError: the child ended, was silent too long or refused.
            OSError: the fork server could not be started.
        """
        if self._server is None:
            self._server = self._start_fork_server(variables or {})
        self._oom_kills_before = host_oom_kills()
        self._owes_child = True
        self.send(setup or self._setup)
        started = time.monotonic()
        line = self.receive(timeout_seconds, "importing the libraries")
        self.child_pid = ChildStarted.model_validate_json(line).pid
        self._owes_child = False
        left = timeout_seconds - (time.monotonic() - started)
        return self.receive(left, "building the model", allowed_seconds=timeout_seconds)

    def send(self, message: Record) -> None:
        """Send a record to the child, or to the fork server while it has no child.

        Raises:
            ChildGoneError: the process at the other end has ended.
        """
        assert self._server is not None
        # A child that waits for this line prints nothing now, so the mark separates the text of
        # this request from earlier text. A fork server that still imports may be printing.
        if self.child_pid is not None:
            self._server.printed.mark()
        try:
            self._server.write(message.model_dump_json() + "\n")
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
        assert self._server is not None
        with contextlib.suppress(ValidationError):
            ended = Ended.model_validate_json(line)
            self.child_pid = None
            end = self._ending(ended.exit_code)
            self._server.printed.mark()
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
        server, pid = self._server, self.child_pid
        if pid is not None:
            _kill(pid)
        elif server is not None and self._owes_child:  # an idle one is left for the next child
            server.kill()

    def end_child(self) -> None:
        """Kill the child, and the fork server too if it cannot continue without it."""
        if self._server is not None and not self._is_free(self._server):
            self._kill_both(self._server)

    def close(self) -> None:
        """Kill the child and its fork server, which ``servers`` keep if it can go on."""
        server = self._server
        if server is None:
            return
        if self._servers is not None and self._is_free(server):
            self._servers.keep(server)
            self._server = None
        else:
            self._kill_both(server)

    def _is_free(self, server: ServerProcess) -> bool:
        """Kill the child; whether the fork server can start another one."""
        if self.child_pid is None:
            # A fork server that still imports will fork the child that it was asked for; that
            # child would take the next request for one of its own.
            return not self._owes_child and server.is_alive
        _kill(self.child_pid)
        self.child_pid = None
        # Drop the child's unread messages; the fork server's report of its end comes last.
        with contextlib.suppress(ChildGoneError):
            while line := self._next_line(FORK_SERVER_TIMEOUT_SECONDS):
                with contextlib.suppress(ValidationError):
                    Ended.model_validate_json(line)
                    server.printed.mark()
                    return True
        return False

    def _kill_both(self, server: ServerProcess) -> None:
        if self.child_pid is not None:
            _kill(self.child_pid)
        server.close()
        self._server = self.child_pid = None

    def _next_line(self, timeout_seconds: float) -> str | None:
        """Next line of the child or its fork server; None where there is none in time.

        Raises:
            ChildGoneError: the fork server has ended, or a line has no end.
        """
        assert self._server is not None
        try:
            return self._server.next_line(timeout_seconds)
        except EOFError:
            raise ChildGoneError(self._ending(self._exit_code())) from None
        except MessageError as error:
            raise ChildGoneError(failed(f"the child sent {error}")) from None

    def _exit_code(self) -> int:
        """Exit code of the fork server, which has closed its end of the pipes."""
        assert self._server is not None
        try:
            return self._server.wait(FORK_SERVER_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self._server.kill()
            return self._server.wait()

    def _ending(self, code: int) -> ProbeEnd:
        assert self._server is not None
        killed = host_oom_kills() > self._oom_kills_before
        return ProbeEnd(*ending(code, self._server.printed.lines(), killed_for_memory=killed))


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
