"""Fork servers: such a process imports torch once, and forks a child for each request."""

import contextlib
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Self

LONGEST_MESSAGE_BYTES = 16 * 2**20  # far above the reply of a probe with any number of steps
PRINTED_BYTES = 64 * 2**10  # most bytes read of the printed text; the cause of an end comes last


class MessageError(ValueError):
    """A process writes a message without an end."""


class PrintedText:
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


class ServerProcess:
    """A fork server's process with its pipes. It ends with the thread that starts it.

    Args:
        command: command of the process.
        environment: its environment variables.
        descriptors: open files that it inherits.

    Attributes:
        command, environment: as above.
        printed: text that it and its children print.

    Raises:
        OSError: the process could not be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        descriptors: Sequence[int] = (),
    ) -> None:
        self.command = tuple(command)
        self.environment = dict(environment)
        self.printed = PrintedText()
        self._received = b""
        try:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.printed.file,
                env=self.environment,
                pass_fds=descriptors,
            )
        except OSError:
            self.printed.file.close()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill it."""
        self._process.kill()

    def wait(self, timeout_seconds: float | None = None) -> int:
        """Wait for its end, and return its exit code.

        Raises:
            subprocess.TimeoutExpired: it has not ended in time.
        """
        return self._process.wait(timeout_seconds)

    def close(self) -> None:
        """Kill it, and close its pipes."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # Unsent bytes have no reader any more.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self.printed.file.close()

    def write(self, line: str) -> None:
        """Send a line to it, or to its child.

        Raises:
            BrokenPipeError: it has ended.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode())
        self._process.stdin.flush()

    def next_line(self, timeout_seconds: float) -> str | None:
        """Next line of it or its child; None where there is none in time.

        Raises:
            EOFError: it has closed its pipe.
            MessageError: the line is too long.
        """
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
                    raise EOFError
                self._received = (self._received + chunk).lstrip(b"\n")
                if len(self._received) > LONGEST_MESSAGE_BYTES:
                    self._received = b""
                    text = f"an invalid message of over {LONGEST_MESSAGE_BYTES} bytes"
                    raise MessageError(text)
        line, _, rest = self._received.partition(b"\n")
        self._received = rest.lstrip(b"\n")
        return line.decode(errors="replace")


class ForkServers:
    """A fork server that one trial leaves to the next. A context manager that ends it on exit.

    Importing torch and transformers takes seconds, and the next trial on a node mostly needs the
    same process. There is one at most: each holds hundreds of MB.
    """

    def __init__(self) -> None:
        # The trial's own thread may end with the trial, and what it started with it.
        self._thread = ThreadPoolExecutor(1)
        self._idle: ServerProcess | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._drop()
        self._thread.shutdown()

    def take(self, command: Sequence[str], environment: Mapping[str, str]) -> ServerProcess:
        """The idle process where it has these, else a new one; arguments as of ServerProcess.

        Raises:
            OSError: the process could not be started.
        """
        idle = self._idle
        if (
            idle is not None
            and idle.is_alive
            and (idle.command, idle.environment) == (tuple(command), dict(environment))
        ):
            self._idle = None
            return idle
        self._drop()
        return self._thread.submit(ServerProcess, command, environment).result()

    def keep(self, server: ServerProcess) -> None:
        """Keep a process that waits for a request, in place of another one."""
        self._drop()
        self._idle = server

    def _drop(self) -> None:
        if self._idle is not None:
            self._idle.close()
            self._idle = None
