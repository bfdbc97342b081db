"""A worker that fails as a file says: real fork server, fork and pipes, no model.

``ChildProber`` starts it in place of ``trials.training.worker``, with the file's path as argument.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from builders.observations import environment, measurement

from trials.child_process.parent_death import die_with_parent
from trials.records.messages import ProbeReply, ProbeRequest, Setup
from trials.records.observation import Environment, Outcome
from trials.training.serving.fork_loop import Report, run_fork_server, serve
from trials.training.serving.message_pipe import MessagePipe


def say(text: bytes) -> None:
    """Write past the protocol."""
    os.write(REPLIES, text)


def raise_error(error: BaseException) -> None:
    """Raise an error; a lambda cannot contain the statement."""
    raise error


def end_with(text: str, end: Callable[[], object]) -> None:
    """Print a last line and end."""
    os.write(2, f"{text}\n".encode())
    end()


def be_killed_for_memory() -> None:
    """Die as by the kernel's OOM killer, with its counter in a file beside the faults."""
    Path(sys.argv[1]).with_name("counters").write_text("oom_kill 1\n", encoding="utf-8")
    os.kill(os.getpid(), signal.SIGKILL)


def say_without_end(text: bytes) -> None:
    """Write as fast as the pipe accepts."""
    while True:
        say(text)


def half_a_reply() -> None:
    """Write half a reply and fall silent."""
    say(b'{"outcome": "FI')
    time.sleep(3600)


FAULTS: dict[str, Callable[[], object]] = {
    "none": lambda: None,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crashed": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "hung": lambda: time.sleep(3600),
    "half": half_a_reply,
    "poisoned": lambda: raise_error(
        RuntimeError("CUDA error: an illegal memory access was encountered")
    ),
    "device": lambda: raise_error(RuntimeError("CUDA error: out of memory")),
    "host": lambda: raise_error(MemoryError()),
    "garbage": lambda: say(b"\x00\xff not a reply\n"),
    "other": lambda: say(b'{"pid": 1}\n'),
    "exited": lambda: os._exit(3),
    "told and exited": lambda: end_with("what went wrong", lambda: os._exit(3)),
    # As bitsandbytes' C library does, which knows no exceptions.
    "bitsandbytes": lambda: end_with(
        "Error out of memory at line 88 in file /src/csrc/ops.cu", lambda: os._exit(1)
    ),
    "aborted": lambda: end_with(
        "terminate called after throwing an instance of 'std::bad_alloc'", os.abort
    ),
    "unnamed signal": lambda: os.kill(os.getpid(), 40),
    "killed for memory": be_killed_for_memory,
    "endless": lambda: say_without_end(b"x" * 2**16),
    "empty lines": lambda: say_without_end(b"\n" * 2**16),
    "unmeasured": lambda: say(b'{"batch_size": 5, "outcome": "FITS"}\n'),
}


class FaultyWorker:
    """A worker that fails while it is built or in a probe, as the file says at that moment."""

    def __init__(self, _setup: Setup) -> None:
        go_wrong("build")
        self.device = type("Device", (), {"memory_limit_bytes": 123})()

    def environment(self) -> Environment:
        return environment()

    def probe(self, request: ProbeRequest, _report: Report) -> ProbeReply:
        go_wrong("probe")
        wrong = 99 if fault() == "probe wrong" else request.batch_size
        return ProbeReply(batch_size=wrong, outcome=Outcome.FITS, measurement=measurement())


def fault() -> str:
    """The fault to produce now: its place and its kind."""
    return Path(sys.argv[1]).read_text(encoding="utf-8")


def go_wrong(where: str) -> None:
    """Produce the fault if it belongs here."""
    there, _, how = fault().partition(" ")
    if there != where:
        return
    if how.startswith("says: "):
        raise RuntimeError(how.removeprefix("says: "))
    if how in FAULTS:
        FAULTS[how]()


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    REPLIES = os.dup(1)
    os.dup2(2, 1)
    pipe = MessagePipe(os.dup(0), REPLIES)
    run_fork_server(pipe, Setup, partial(serve, make_worker=FaultyWorker), lambda *_: None)
