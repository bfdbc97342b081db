"""A child process with its fork server: started on demand, one request at a time."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Self

from pydantic import ValidationError

from gpu_catalog.record import Record
from trials.child_process.fork_server import ChildGoneError, ForkServer, ProbeEnd
from trials.records.messages import Refused, Setup


class ForkedChild:
    """Owner of a fork server and its child. A context manager that kills both on exit.

    Args:
        setup: first message to the fork server: model and device of its children.
        worker: command that starts the fork server; it gets this process's id as last argument.
    """

    def __init__(self, setup: Setup, worker: Sequence[str]) -> None:
        self._setup = setup
        self._worker = worker
        self._fork_server: ForkServer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def child_pid(self) -> int | None:
        """Process id of the living child; None without one."""
        return None if self._fork_server is None else self._fork_server.child_pid

    def close(self) -> None:
        """Kill the child and its fork server, if there are any."""
        if self._fork_server is not None:
            self._fork_server.close()
            self._fork_server = None

    def start_child(
        self, timeout_seconds: float, variables: Mapping[str, str] | None = None
    ) -> str:
        """Start a child, and its fork server where there is none, and return the first message.

        Args:
            timeout_seconds: longest time until the child is ready.
            variables: further environment variables of a new fork server.

        Raises:
            ChildGoneError: the child ended, was silent too long or refused.
            OSError: the fork server could not be started.
        """
        if self._fork_server is None:
            self._fork_server = ForkServer(self._worker, self._setup.threads, variables)
            self._fork_server.send(self._setup.model_dump_json() + "\n")
        return _accepted(self._fork_server.start_child(timeout_seconds))

    def send(self, request: Record) -> None:
        """Send a request to the child.

        Raises:
            ChildGoneError: the child ended.
        """
        assert self._fork_server is not None
        self._fork_server.send(request.model_dump_json() + "\n")

    def receive(self, timeout_seconds: float, activity: str) -> str:
        """Wait for the child's next message.

        Args:
            timeout_seconds: longest time to wait.
            activity: work the child is doing, named in the error when it is silent.

        Raises:
            ChildGoneError: the child ended, was silent too long or refused.
        """
        assert self._fork_server is not None
        return _accepted(self._fork_server.receive(timeout_seconds, activity))

    def end_child(self) -> None:
        """Kill the child, and the fork server too if it cannot continue without it."""
        if self._fork_server is not None and not self._fork_server.end_child():
            self.close()


def _accepted(line: str) -> str:
    """Return a message that is no refusal; raise ``ChildGoneError`` for one that is."""
    with contextlib.suppress(ValidationError):
        refused = Refused.model_validate_json(line)
        raise ChildGoneError(ProbeEnd(refused.outcome, refused.detail, final=refused.final))
    return line
