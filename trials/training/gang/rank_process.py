"""A process of one rank, as its parent sees it, and what runs in it."""

import contextlib
import os
import signal
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from mmap import mmap

from pydantic import BaseModel

from trials.child_process.parent_death import die_with_parent
from trials.ranks.rank import Rank
from trials.records.failure_classification import ending
from trials.records.messages import RankPlace, Setup
from trials.records.observation import Outcome
from trials.training.gang.link_worker import LinkWorker
from trials.training.serving.fork_loop import serve
from trials.training.serving.message_pipe import MessagePipe
from trials.training.worker import Worker

COUNT = struct.Struct("qd")  # collectives that a rank has begun, monotonic time of this report
COUNT_SECONDS = 0.1  # between two reports
EXIT_SECONDS = 1.0  # a process that has closed its pipe ends at once
PRINTED_BYTES = 64 * 2**10


class RankProcess:
    """One rank. Made by a process without threads or devices, which forks it.

    Args:
        setup: model and device of all ranks.
        local: number of the rank among those of this node, from 0.
        place: place of these among the ranks of all nodes.
        counts: shared memory for the COUNT of each rank of this node.

    Attributes:
        number: number of the rank among those of all nodes.
        local: as given.
    """

    def __init__(self, setup: Setup, local: int, place: RankPlace, counts: mmap) -> None:
        assert setup.cell.parallel is not None
        self.local = local
        self.number = place.node * setup.cell.parallel.gpus_per_node + local
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end
        self._received = b""
        requests, replies = os.pipe(), os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            die_with_parent(parent)
            os.close(requests[1])
            os.close(replies[0])
            os.dup2(self._printed.fileno(), 2)
            pipe = MessagePipe(requests[0], replies[1])
            note = partial(COUNT.pack_into, counts, COUNT.size * local)
            make = partial(_worker, rank=self, place=place, note=note)
            serve(setup, pipe, make)
            os._exit(0)  # no exit handlers, as in any child of a fork server
        os.close(requests[0])
        os.close(replies[1])
        self._requests, self.replies = requests[1], replies[0]

    def send(self, message: BaseModel) -> None:
        """Send a message; a rank that has ended is found out by the wait for its answer."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._requests, message.model_dump_json().encode() + b"\n")

    def read(self) -> str | None:
        """Take in what the rank has sent, and return its message once that is whole.

        Raises:
            EOFError: the rank has closed its pipe.
        """
        chunk = os.read(self.replies, 65536)
        if not chunk:
            raise EOFError
        self._received += chunk
        if not self._received.endswith(b"\n"):
            return None
        line, self._received = self._received, b""
        return line.decode(errors="replace")

    def ending(self, *, killed_for_memory: bool) -> tuple[Outcome, str]:
        """Outcome of a probe whose rank has closed its pipe, and one line on it."""
        code = self._exit_code()
        start = max(0, os.fstat(self._printed.fileno()).st_size - PRINTED_BYTES)
        text = os.pread(self._printed.fileno(), PRINTED_BYTES, start).decode(errors="replace")
        lines = [line[:300] for line in text.strip().splitlines()]
        return ending(code, lines, killed_for_memory=killed_for_memory)

    def _exit_code(self) -> int:
        deadline = time.monotonic() + EXIT_SECONDS
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.01)

    def kill(self) -> None:
        """Kill the process if it lives."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """Wait for the end of a killed process."""
        if self.pid:
            os.waitpid(self.pid, 0)
            self.pid = 0
        os.close(self._requests)
        os.close(self.replies)
        self._printed.close()


def _worker(
    setup: Setup, *, rank: RankProcess, place: RankPlace, note: Callable[[int, float], None]
) -> Worker | LinkWorker:
    """Model of one rank, if any, on the device of its number among those of this node."""
    cell = setup.cell
    assert cell.parallel is not None
    if setup.gpu.kind == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpu(
            rank.local, os.environ.get("CUDA_VISIBLE_DEVICES")
        )
    one = Rank(
        rank.number,
        cell.parallel,
        device=setup.gpu.kind,
        port=place.port,
        listening=place.listening,
        host=place.host,
        interface=place.interface,
    )
    _count(one.collectives, note)
    of_rank = cell.model_copy(update={"parallel": None, "recipe": cell.rank_recipe})
    of_rank_setup = setup.model_copy(update={"cell": of_rank})
    return (LinkWorker if setup.times_link else Worker)(of_rank_setup, one)


def visible_gpu(number: int, visible: str | None) -> str:
    """GPU of a rank, as CUDA_VISIBLE_DEVICES names it: the rank sees no other.

    Args:
        number: number of the rank on its node.
        visible: GPUs that the trial may use, by the same variable; None for all of the machine.
    """
    return str(number) if not visible else visible.split(",")[number].strip()


def _count(number: Callable[[], int], note: Callable[[int, float], None]) -> None:
    """Note a number again and again, from a thread of its own: the first may hang at any time."""

    def noting() -> None:
        while True:
            note(number(), time.monotonic())
            time.sleep(COUNT_SECONDS)

    threading.Thread(target=noting, daemon=True).start()
