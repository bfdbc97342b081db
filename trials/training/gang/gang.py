"""Parent of the ranks of a gang, which answers a trial as one child does.

It forks a process for each rank and passes each request on to all of them. The verdict is that all
fit: the first rank that runs out of memory, crashes or hangs ends all others. The parent touches no
device. The ranks die with it, whatever ends it.
"""

import mmap
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

from trials.records.failure_classification import host_oom_kills
from trials.records.messages import ProbeReply, ProbeRequest, Ready, Refused, Setup
from trials.records.observation import (
    DeviceReading,
    Measurement,
    MemoryReading,
    Outcome,
    RankReading,
)
from trials.training.gang.rank_process import COUNT, RankProcess
from trials.training.worker import MessagePipe

# A rank whose neighbour died reports a lost connection, perhaps before that death is seen.
GRACE_SECONDS = 0.5
# A rank whose report of its collectives is this much older than another's does not run at all.
SILENT_SECONDS = 1.0
# In lower case; each is part of an error that another rank's end causes.
ECHOES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection was likely closed",
    "broken pipe",
    "timed out waiting",
    "remote process exited",
    "communicator was aborted",
    "gloo/transport",
    "ncclremoteerror",
)
R = TypeVar("R", Ready, ProbeReply)


@dataclass(frozen=True, slots=True)
class RankEnd:
    """End of a probe for which one rank is to blame, or none that is known.

    Attributes:
        is_final: whether another attempt is pointless.
    """

    rank: int | None
    outcome: Outcome
    detail: str
    is_final: bool = False

    @property
    def is_echo(self) -> bool:
        """Whether another rank's end explains this one."""
        words = self.detail.lower()
        return self.outcome is Outcome.FAILED and any(echo in words for echo in ECHOES)

    @property
    def line(self) -> str:
        """One line on it."""
        return self.detail if self.rank is None else f"rank {self.rank}: {self.detail}"


class GangEndError(RuntimeError):
    """A probe of several ranks has ended without a verdict that all fit."""

    def __init__(self, end: RankEnd) -> None:
        super().__init__(end)
        self.end = end


class Gang:
    """The processes of all ranks. A context manager that kills them on exit."""

    def __init__(self, setup: Setup) -> None:
        assert setup.cell.parallel is not None
        assert setup.build_timeout_seconds is not None
        assert setup.probe_timeout_seconds is not None
        self._build_timeout_seconds = setup.build_timeout_seconds
        self._probe_timeout_seconds = setup.probe_timeout_seconds
        self._oom_kills_before = host_oom_kills()
        self._ended: RankEnd | None = None  # since the last probe
        gpus = setup.cell.parallel.gpus
        self._counts = mmap.mmap(-1, COUNT.size * gpus)
        self._ranks: list[RankProcess] = []
        with socket.create_server(("127.0.0.1", 0)) as meeting:
            port, listening = meeting.getsockname()[1], meeting.fileno()
            for number in range(gpus):
                rank = RankProcess(
                    setup, number, port=port, listening=listening, counts=self._counts
                )
                self._ranks.append(rank)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all ranks, and wait until they are gone."""
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.end()
        self._ranks.clear()

    def ready(self) -> Ready:
        """Wait until all ranks have built the model.

        Raises:
            GangEndError: one of them cannot.
        """
        readies = self._answers(Ready, self._build_timeout_seconds, "building the model")
        return Ready(
            environment=readies[0].environment,
            memory_limit_bytes=min(ready.memory_limit_bytes for ready in readies),
        )

    def receive(self, pipe: MessagePipe) -> str:
        """Wait for the next request; empty when the trial is gone.

        If a rank ends before, all others are killed at once, for they hold memory.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(pipe.requests, selectors.EVENT_READ)
            for rank in self._ranks:
                selector.register(rank.replies, selectors.EVENT_READ, rank)
            ready = [key.data for key, _ in selector.select()]
        ends = (self._answer(rank, ProbeReply) for rank in ready if rank is not None)
        self._ended = next((end for end in ends if isinstance(end, RankEnd)), None)
        if self._ended is not None:
            self.close()
        return pipe.receive()

    def probe(self, request: ProbeRequest) -> ProbeReply:
        """Try one batch size on all ranks; a failure of one is the reply."""
        for rank in self._ranks:
            rank.send(request)
        activity = f"batch {request.batch_size}"
        try:
            replies = self._answers(ProbeReply, self._probe_timeout_seconds, activity)
        except GangEndError as gone:
            return ProbeReply(
                batch_size=request.batch_size, outcome=gone.end.outcome, detail=gone.end.line
            )
        measured = [reply.measurement for reply in replies if reply.measurement is not None]
        return replies[0].model_copy(update={"measurement": measurement_of_ranks(measured)})

    def _answers(self, kind: type[R], timeout_seconds: float, activity: str) -> list[R]:
        """One answer of each rank, in their order.

        Raises:
            GangEndError: a rank refused, ended or was silent too long.
        """
        if self._ended is not None:
            raise GangEndError(self._ended)
        answers: dict[int, R] = {}
        ends: list[RankEnd] = []
        deadline = time.monotonic() + timeout_seconds
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.replies, selectors.EVENT_READ, rank)
            while selector.get_map():
                left = deadline - time.monotonic()
                events = selector.select(max(0.0, left)) if left > 0 else []
                if not events:
                    raise GangEndError(
                        ends[0] if ends else self._hanging(answers, timeout_seconds, activity)
                    )
                for key, _ in events:
                    rank = key.data
                    answer = self._answer(rank, kind)
                    if answer is None:
                        continue
                    selector.unregister(rank.replies)
                    if not isinstance(answer, RankEnd):
                        answers[rank.number] = answer
                    elif answer.is_echo:
                        ends.append(answer)
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                    else:
                        raise GangEndError(answer)
        if ends:
            raise GangEndError(ends[0])
        return [answers[rank.number] for rank in self._ranks]

    def _answer(self, rank: RankProcess, kind: type[R]) -> R | RankEnd | None:
        """Answer of a rank, or its end; None while its message is incomplete."""
        try:
            line = rank.read()
        except EOFError:
            killed = host_oom_kills() > self._oom_kills_before
            return RankEnd(rank.number, *rank.ending(killed_for_memory=killed))
        if line is None:
            return None
        if '"final"' in line:  # of all messages, a refusal alone has it
            refused = Refused.model_validate_json(line)
            return RankEnd(rank.number, refused.outcome, refused.detail, is_final=refused.final)
        answer = kind.model_validate_json(line)
        if isinstance(answer, ProbeReply) and answer.measurement is None:
            return RankEnd(rank.number, answer.outcome, answer.detail or "no reason was given")
        return answer

    def _hanging(self, answers: dict[int, R], timeout_seconds: float, activity: str) -> RankEnd:
        """End of a probe that took too long, and the rank that the others wait for.

        A rank that hangs has begun fewer collectives than those that wait for it in one. One that
        was stopped inside a collective has begun as many, and reports no more.
        """
        counts = {
            rank.number: COUNT.unpack_from(self._counts, COUNT.size * rank.number)
            for rank in self._ranks
            if rank.number not in answers
        }
        fewest = min(begun for begun, _ in counts.values())
        oldest = max(reported for _, reported in counts.values()) - SILENT_SECONDS
        behind = [number for number, (_, reported) in counts.items() if reported < oldest]
        behind = behind or [number for number, (begun, _) in counts.items() if begun == fewest]
        text = f"no answer within {timeout_seconds:g} s, {activity}"
        if len(behind) == len(self._ranks):
            return RankEnd(None, Outcome.TIMED_OUT, f"{text}: no rank is behind the others")
        whose = ", ".join(map(str, behind))
        word = "rank" if len(behind) == 1 else "ranks"
        return RankEnd(None, Outcome.TIMED_OUT, f"{text}: {word} {whose} hung, the others waited")


def measurement_of_ranks(measured: Sequence[Measurement]) -> Measurement:
    """Measurement of a probe by those of its ranks, in their order.

    A step takes as long as on the slowest rank; memory is that of the rank with the largest peak.
    Energy is the sum of all.
    """
    steps = _slowest([m.step_seconds for m in measured])
    slowest = max(measured, key=lambda m: sum(m.step_seconds))
    energies = [m.energy_joules for m in measured]
    return slowest.model_copy(
        update={
            "memory": _largest([m.memory for m in measured if m.memory is not None]),
            "model_memory_bytes": max(m.model_memory_bytes or 0 for m in measured),
            "warmup_seconds": _slowest([m.warmup_seconds for m in measured]),
            "step_seconds": steps,
            "energy_joules": None
            if None in energies
            else sum(joules for joules in energies if joules is not None),
            "ranks": tuple(
                _reading(number, m, m.before, m.after) for number, m in enumerate(measured)
            ),
        }
    )


def _slowest(of_ranks: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(max(step) for step in zip(*of_ranks, strict=True))


def _largest(readings: Sequence[MemoryReading]) -> MemoryReading:
    """Largest of each number; absent where a rank lacks it."""
    return MemoryReading.model_validate(
        {
            name: None if None in values else max(values)
            for name in MemoryReading.model_fields
            for values in [[getattr(reading, name) for reading in readings]]
        }
    )


def _reading(
    number: int,
    measured: Measurement,
    before: DeviceReading | None,
    after: DeviceReading | None,
) -> RankReading:
    assert measured.memory is not None
    return RankReading(
        rank=number,
        peak_allocated_bytes=measured.memory.peak_allocated_bytes,
        peak_reserved_bytes=measured.memory.peak_reserved_bytes,
        step_seconds=measured.step_seconds,
        before=before,
        after=after,
    )


def serve_gang(setup: Setup, pipe: MessagePipe) -> None:
    """Build the model on all ranks, and answer probes until one does not fit: life of a child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trial ends its children
    with Gang(setup) as gang:
        try:
            pipe.send(gang.ready())
        except GangEndError as gone:
            end = gone.end
            gang.close()
            pipe.send(Refused(outcome=end.outcome, detail=end.line, final=end.is_final))
            return
        while line := gang.receive(pipe):
            reply = gang.probe(ProbeRequest.model_validate_json(line))
            if reply.outcome is not Outcome.FITS:
                gang.close()  # first, since the reply may have this process killed
            pipe.send(reply)
            if reply.outcome is not Outcome.FITS:
                return
