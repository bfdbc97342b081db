"""Parent of the ranks of a gang, which answers a trial as one child does.

It forks a process for each rank of its node and passes each request on to all of them. The verdict
is that all fit: the first rank that runs out of memory, crashes or hangs ends all others. The
parent touches no device. The ranks die with it, whatever ends it. Ranks on several nodes have a
parent on each, and ``trials.child_process.nodes_prober`` passes requests on to these.
"""

import contextlib
import mmap
import selectors
import signal
import socket
import time
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Self, TypeVar

from trials.child_process.rank_verdict import (
    GRACE_SECONDS,
    hanging_line,
    is_echo,
    measurement_of_ranks,
    with_reading,
)
from trials.ranks.rank import HOST, LOOPBACK
from trials.records.failure_classification import host_oom_kills
from trials.records.messages import (
    ProbeReply,
    ProbeRequest,
    RankPlace,
    RankProgress,
    Ready,
    Refused,
    Setup,
)
from trials.records.observation import Outcome
from trials.training.gang.rank_process import COUNT, RankProcess
from trials.training.serving.message_pipe import MessagePipe

R = TypeVar("R", Ready, ProbeReply)


@dataclass(frozen=True, slots=True)
class RankEnd:
    """End of a probe for which one rank is to blame, or none that is known.

    Attributes:
        is_final: whether another attempt is pointless.
        waiting: ranks that had not answered, where another node may know more.
    """

    rank: int | None
    outcome: Outcome
    detail: str
    is_final: bool = False
    waiting: tuple[RankProgress, ...] = ()

    @property
    def is_echo(self) -> bool:
        """Whether another rank's end explains this one."""
        return is_echo(self.outcome, self.detail)

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
    """The processes of all ranks of a node. A context manager that kills them on exit."""

    def __init__(self, setup: Setup) -> None:
        assert setup.cell.parallel is not None
        assert setup.build_timeout_seconds is not None
        assert setup.probe_timeout_seconds is not None
        self._beginning = "opening the links" if setup.times_link else "building the model"
        self._build_timeout_seconds = setup.build_timeout_seconds
        self._probe_timeout_seconds = setup.probe_timeout_seconds
        self._oom_kills_before = host_oom_kills()
        self._ended: RankEnd | None = None  # since the last probe
        ranks = setup.cell.parallel.gpus_per_node
        self._counts = mmap.mmap(-1, COUNT.size * ranks)
        self._ranks: list[RankProcess] = []
        with contextlib.ExitStack() as stack:
            place = setup.place or _only_node(stack.enter_context(socket.create_server((HOST, 0))))
            for local in range(ranks):
                self._ranks.append(RankProcess(setup, local, place, self._counts))

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
        readies = self._answers(Ready, self._build_timeout_seconds, self._beginning)
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
        try:
            replies = self._answers(ProbeReply, self._probe_timeout_seconds, request.text)
        except GangEndError as gone:
            end = gone.end
            return ProbeReply(
                batch_size=request.batch_size,
                outcome=end.outcome,
                detail=end.line,
                waiting=end.waiting,
            )
        measured = [
            with_reading(rank.number, reply.measurement)
            for rank, reply in zip(self._ranks, replies, strict=True)
            if reply.measurement is not None
        ]
        if not measured:  # but collectives
            return replies[0]
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
            while len(answers) + len(ends) < len(self._ranks):
                left = deadline - time.monotonic()
                events = selector.select(max(0.0, left)) if left > 0 else []
                if not events:
                    waiting = self._progress(answers)
                    text = f"no answer within {timeout_seconds:g} s, {activity}"
                    end = RankEnd(None, Outcome.TIMED_OUT, hanging_line(text, waiting))
                    raise GangEndError(replace(ends[0] if ends else end, waiting=waiting))
                for key, _ in events:
                    rank = key.data
                    answer = self._answer(rank, kind)
                    if answer is None:
                        continue
                    if not isinstance(answer, RankEnd):
                        answers[rank.number] = answer  # if it ends now, the others may wait for it
                        continue
                    if not answer.is_echo:
                        raise GangEndError(answer)
                    selector.unregister(rank.replies)
                    answers.pop(rank.number, None)
                    ends.append(answer)
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if ends:
            raise GangEndError(replace(ends[0], waiting=self._progress(answers)))
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
        if isinstance(answer, ProbeReply) and answer.measurement is answer.collectives is None:
            return RankEnd(rank.number, answer.outcome, answer.detail or "no reason was given")
        return answer

    def _progress(self, answers: Container[int]) -> tuple[RankProgress, ...]:
        """Progress of the ranks without an answer."""
        now = time.monotonic()
        counts = (
            (rank.number, *COUNT.unpack_from(self._counts, COUNT.size * rank.local))
            for rank in self._ranks
            if rank.number not in answers
        )
        return tuple(
            RankProgress(rank=number, begun=begun, silent_seconds=now - reported)
            for number, begun, reported in counts
        )


def _only_node(meeting: socket.socket) -> RankPlace:
    """Place of ranks that are all on this node, and meet at a socket of their parent."""
    return RankPlace(
        node=0,
        interface=LOOPBACK,
        host=HOST,
        port=meeting.getsockname()[1],
        listening=meeting.fileno(),
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
            pipe.send(
                Refused(
                    outcome=end.outcome, detail=end.line, final=end.is_final, waiting=end.waiting
                )
            )
            return
        while line := gang.receive(pipe):
            reply = gang.probe(ProbeRequest.model_validate_json(line))
            if reply.outcome is not Outcome.FITS:
                gang.close()  # first, since the reply may have this process killed
            pipe.send(reply)
            if reply.outcome is not Outcome.FITS:
                return
