"""Parent's side of a probing child: every end of a probe becomes an outcome."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from pydantic import ValidationError

from trials.child_process.fork_server import ForkServers
from trials.child_process.forked_child import ChildGoneError, ForkedChild, ProbeEnd, failed
from trials.records.failure_classification import classify
from trials.records.messages import ProbeReply, ProbeRequest, Ready, Setup, StepsRun
from trials.records.observation import Outcome

WORKER = (sys.executable, "-m", "trials.child_process.bootstrap", "trials.training.worker")
GANG_WORKER = (*WORKER[:-1], "trials.training.gang.gang_worker")
# The parent of several ranks itself ends a probe that takes too long: it knows whose fault it is.
GANG_SECONDS = 3.0


class Prober(Protocol):
    """Answers probes; a hand-written fake does so in tests."""

    def probe(self, request: ProbeRequest, *, fresh: bool = False) -> ProbeEnd:
        """Try one batch size. Failures of the probe are outcomes, never exceptions.

        Args:
            request: batch size to try, or collectives to time.
            fresh: use a process that has tried nothing before.
        """


class ChildProber(ForkedChild):
    """Answers probes through a child process, a fresh one after every outcome but FITS.

    The child of a cell on several GPUs is the parent of a process for each.

    Args:
        setup: model and device of the child.
        build_timeout_seconds: longest time until a child is ready.
        probe_timeout_seconds: longest time of one probe.
        worker: command that starts the fork server, which gets this process's id as last argument;
            absent for the one that the cell needs.
        servers: as of ``ForkedChild``.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        build_timeout_seconds: float,
        probe_timeout_seconds: float,
        worker: Sequence[str] | None = None,
        servers: ForkServers | None = None,
    ) -> None:
        is_gang = setup.cell.parallel is not None
        assert setup.cell.nodes == 1 or setup.place is not None
        if is_gang:
            timeouts = {
                "build_timeout_seconds": build_timeout_seconds,
                "probe_timeout_seconds": probe_timeout_seconds,
            }
            setup = setup.model_copy(update=timeouts)
        super().__init__(setup, worker or (GANG_WORKER if is_gang else WORKER), servers)
        more_seconds = GANG_SECONDS if is_gang else 0.0
        self._build_timeout_seconds = build_timeout_seconds + more_seconds
        self._probe_timeout_seconds = probe_timeout_seconds + more_seconds
        self._ready: Ready | None = None

    def probe(self, request: ProbeRequest, *, fresh: bool = False) -> ProbeEnd:
        """Try one batch size, in the living child or a fresh one.

        Collectives are timed by a child of their own, which has no model.
        """
        if fresh or request.times_link:
            self._discard_child()
        try:
            if self.child_pid is None:
                setup = self._setup.model_copy(update={"times_link": request.times_link})
                line = self.start_child(self._build_timeout_seconds, setup=setup)
                self._ready = Ready.model_validate_json(line)
            self.send(request)
            end = self._end(request)
        except ChildGoneError as gone:
            end = gone.end
        except ValidationError as error:
            end = failed(f"the child sent an invalid message: {error.errors()[0]['msg']}")
        except OSError as error:  # no process could be started
            end = ProbeEnd(*classify(error))
        if self._ready is not None:
            end = replace(
                end,
                environment=self._ready.environment,
                memory_limit_bytes=self._ready.memory_limit_bytes,
            )
        if end.outcome is not Outcome.FITS or request.times_link:
            self._discard_child()
        return end

    def _end(self, request: ProbeRequest) -> ProbeEnd:
        """Wait for the end of a probe, which keeps the steps that a child ran before it was gone.

        Raises:
            ChildGoneError, ValidationError: as ``receive``; an invalid message.
        """
        measured = None
        while True:
            try:
                line = self.receive(self._probe_timeout_seconds, request.text)
            except ChildGoneError as gone:
                raise ChildGoneError(replace(gone.end, measurement=measured)) from None
            try:
                measured = StepsRun.model_validate_json(line).measured
            except ValidationError:
                end = _checked(request, ProbeReply.model_validate_json(line))
                return end if end.measurement else replace(end, measurement=measured)

    def _discard_child(self) -> None:
        self._ready = None
        self.end_child()


def _checked(request: ProbeRequest, reply: ProbeReply) -> ProbeEnd:
    """End of a probe by the child's reply; FAILED when the reply does not answer the request."""
    if reply.batch_size != request.batch_size:
        return failed(f"the child answered batch {reply.batch_size}, not {request.batch_size}")
    answer = reply.collectives if request.times_link else reply.measurement
    if reply.outcome in (Outcome.FITS, Outcome.THRASHING) and answer is None:
        return failed(f"the child reported {reply.outcome} without a measurement")
    return ProbeEnd(
        reply.outcome,
        reply.detail,
        reply.measurement,
        profile=reply.profile,
        collectives=reply.collectives,
        waiting=reply.waiting,
    )
