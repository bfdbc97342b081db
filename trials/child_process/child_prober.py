"""The trial's side of its child process: start it, ask it, kill it. Every ending is an outcome."""

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, Self

from pydantic import ValidationError

from trials.child_process.fork_server import ChildGoneError, ForkServer, ProbeEnd, failed
from trials.records.failure_classification import classify
from trials.records.messages import ProbeReply, ProbeRequest, Ready, Refused, Setup
from trials.records.observation import Outcome

WORKER = (sys.executable, "-m", "trials.child_process.bootstrap", "trials.training.worker")


class Prober(Protocol):
    """Answers probes; a hand-written fake does so in tests."""

    def probe(self, request: ProbeRequest, *, fresh: bool = False) -> ProbeEnd:
        """Tries one batch size. Never raises for what a probe can do: that is its outcome.

        Args:
            request: what to try.
            fresh: in a process that has tried nothing before.
        """


class ChildProber:
    """Answers probes through a child process, a fresh one after anything but FITS.

    Args:
        setup: what the child builds.
        build_timeout_seconds: how long it may take until it is ready.
        probe_timeout_seconds: how long one probe may take.
        worker: the command that starts a nursery; it is given this process's id.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        build_timeout_seconds: float,
        probe_timeout_seconds: float,
        worker: Sequence[str] = WORKER,
    ) -> None:
        self._setup = setup
        self._worker = worker
        self._build_timeout_seconds = build_timeout_seconds
        self._probe_timeout_seconds = probe_timeout_seconds
        self._nursery: ForkServer | None = None
        self._ready: Ready | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def child_pid(self) -> int | None:
        """Process id of the living child."""
        return None if self._nursery is None else self._nursery.child_pid

    def close(self) -> None:
        """Kills the child and its nursery, if there are any."""
        if self._nursery is not None:
            self._nursery.close()
            self._nursery = None
        self._ready = None

    def probe(self, request: ProbeRequest, *, fresh: bool = False) -> ProbeEnd:
        """Tries one batch size, in the living child or a fresh one."""
        if fresh:
            self._end_child()
        try:
            nursery = self._nursery_with_child()
            nursery.tell(request.model_dump_json() + "\n")
            line = nursery.answer(self._probe_timeout_seconds, f"batch {request.batch_size}")
            reply = ProbeReply.model_validate_json(line)
            end = _checked(request, reply)
        except ChildGoneError as gone:
            end = gone.end
        except ValidationError as error:
            end = failed(f"the child's answer is not one: {error.errors()[0]['msg']}")
        except OSError as error:  # no process could be started
            end = ProbeEnd(*classify(error))
        if self._ready is not None:
            end = replace(
                end,
                environment=self._ready.environment,
                memory_limit_bytes=self._ready.memory_limit_bytes,
            )
        if end.outcome is not Outcome.FITS:
            self._end_child()
        return end

    def _end_child(self) -> None:
        self._ready = None
        if self._nursery is not None and not self._nursery.end_child():
            self.close()

    def _nursery_with_child(self) -> "ForkServer":
        if self._nursery is None:
            self._nursery = ForkServer(self._worker, self._setup.threads)
            self._nursery.tell(self._setup.model_dump_json() + "\n")
        if self._nursery.child_pid is None:
            line = self._nursery.start_child(self._build_timeout_seconds)
            with contextlib.suppress(ValidationError):
                refused = Refused.model_validate_json(line)
                raise ChildGoneError(ProbeEnd(refused.outcome, refused.detail, final=refused.final))
            self._ready = Ready.model_validate_json(line)
        return self._nursery


def _checked(request: ProbeRequest, reply: ProbeReply) -> ProbeEnd:
    """What a reply says, if it is one to this request."""
    if reply.batch_size != request.batch_size:
        return failed(f"asked for batch {request.batch_size}, told of {reply.batch_size}")
    if reply.outcome in (Outcome.FITS, Outcome.THRASHING) and reply.measurement is None:
        return failed(f"the child says {reply.outcome} and not what it measured")
    return ProbeEnd(reply.outcome, reply.detail, reply.measurement, profile=reply.profile)
