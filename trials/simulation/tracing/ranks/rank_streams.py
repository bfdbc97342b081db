"""Stand-in for the streams of a GPU, which FSDP2 asks of the module of its device."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from trials.simulation.ranks.stream_events import Action, StreamEvent
from trials.simulation.recording import COMPUTE_STREAM, COPY_STREAM, Kind
from trials.simulation.tracing.tracer import NO_NUMBERS, Tracer


class RankStreams:
    """Streams of one rank, whose marks and waits go to a tracer while there is one."""

    def __init__(self) -> None:
        self.tracer: Tracer | None = None
        self.marks: Counter[int] = Counter()
        self.compute_stream = _RankStream(self, COMPUTE_STREAM)
        self._current = self.compute_stream
        self._made = COPY_STREAM

    def new_stream(self, priority: int = 0) -> "_RankStream":
        """Make a stream."""
        del priority
        self._made += 1
        return _RankStream(self, self._made)

    def new_event(self, *, enable_timing: bool = False, **options: object) -> "_Event":
        """Make an event."""
        del enable_timing, options
        return _Event(self)

    def current_stream(self) -> "_RankStream":
        """Stream that operators run on."""
        return self._current

    @contextlib.contextmanager
    def stream(self, stream: "_RankStream") -> Iterator[None]:
        """Run operators on a stream, and make their storages in its pool."""
        before = self._current
        self._run_on(stream)
        try:
            yield
        finally:
            self._run_on(before)

    def _run_on(self, stream: "_RankStream") -> None:
        if stream is not self._current:
            self._current = stream
            self.happens(StreamEvent(Action.RUN, stream.number))
            if self.tracer is not None:
                self.tracer.stream = stream.number

    def happens(self, event: StreamEvent) -> None:
        """Report an event to the tracer."""
        if event.action is Action.MARK:
            self.marks[event.stream] += 1
        if self.tracer is not None:
            self.tracer.event(Kind.STREAM, event.number, NO_NUMBERS)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Give FSDP2 these streams in place of those of the CPU, which do nothing."""
        link = self

        class Event(_Event):
            def __init__(self) -> None:
                super().__init__(link)

        replacements: list[tuple[Any, str, Any]] = [
            (torch.cpu, "Stream", self.new_stream),
            (torch.cpu, "current_stream", self.current_stream),
            (torch.cpu, "stream", self.stream),
            (torch.cpu, "Event", Event),
            # Asked at the end of a backward pass that did not use what was gathered ahead.
            (torch.accelerator, "current_stream", self.current_stream),
        ]
        own = [(module, name, getattr(module, name)) for module, name, _ in replacements]
        for module, name, stand_in in replacements:
            setattr(module, name, stand_in)
        try:
            yield
        finally:
            for module, name, before in own:
                setattr(module, name, before)


class _RankStream:
    """A fake stream."""

    def __init__(self, link: RankStreams, number: int) -> None:
        self._link = link
        self.number = number

    def synchronize(self) -> None:
        """Let the host wait for all work; kernels of the computation are waited for elsewhere."""

    def record_event(self, event: "_Event | None" = None) -> "_Event":
        """Mark the work until now."""
        event = event or _Event(self._link)
        event.record(self)
        return event

    def wait_event(self, event: "_Event") -> None:
        """Wait for the work until a mark."""
        if event.stream is not None and event.stream is not self:
            other = event.stream.number
            back = self._link.marks[other] - event.mark
            self._link.happens(StreamEvent(Action.WAIT, self.number, other, back))

    def wait_stream(self, other: "_RankStream") -> None:
        """Wait for all work of another stream."""
        self.wait_event(other.record_event())


class _Event:
    """A mark of a fake stream."""

    def __init__(self, link: RankStreams) -> None:
        self._link = link
        self.stream: _RankStream | None = None
        self.mark = 0

    def query(self) -> bool:
        """Whether the work is done: on time, as far as a trace can tell."""
        return True

    def synchronize(self) -> None:
        """Let the host wait for the work: it is ahead by a few buffers, which takes no time."""

    def record(self, stream: _RankStream | None = None) -> None:
        """Mark the work of a stream until now; by default of the current one."""
        self.stream = stream or self._link.current_stream()
        self._link.happens(StreamEvent(Action.MARK, self.stream.number))
        self.mark = self._link.marks[self.stream.number]
