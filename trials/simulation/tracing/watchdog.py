"""Tells what is being traced while that takes long, where, and gives up in time."""

import contextlib
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from torch import nn

from trials.simulation.tracing.tracer import UntraceableError

TOLD_AFTER_SECONDS = 10.0  # and after twice as long, each time
TICK_SECONDS = 1.0


@contextlib.contextmanager
def patience(what: str, limit_seconds: float, tell: Callable[[str], None]) -> Iterator[None]:
    """For as long as it lasts, a line now and then; past the limit what runs is refused.

    In the main thread of a process alone, as signals are.

    Args:
        what: is traced.
        limit_seconds: how long that may take.
        tell: is given each line.
    """
    began = time.monotonic()
    next_word = TOLD_AFTER_SECONDS

    def tick(_signal: int, frame: FrameType | None) -> None:
        nonlocal next_word
        taken = time.monotonic() - began
        if taken >= limit_seconds:
            # At every tick from here on: what is raised within a weak reference's callback is lost.
            raise UntraceableError(f"tracing took more than {limit_seconds:g} s")
        if taken >= next_word:
            next_word *= 2
            where = module_of(each for each, _ in traceback.walk_stack(frame))
            at = "" if where is None else f", now in {where}"
            tell(f"{what}: tracing for {taken:.0f} s{at}; given up after {limit_seconds:g} s")

    before = signal.signal(signal.SIGALRM, tick)
    interval = min(TICK_SECONDS, limit_seconds)
    signal.setitimer(signal.ITIMER_REAL, interval, interval)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def module_of(frames: Iterator[FrameType]) -> str | None:
    """The part of a model that the first of these frames to be in one is in."""
    for frame in frames:
        owner: Any = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return type(owner).__name__
    return None


def innermost_module(error: BaseException) -> str | None:
    """The part of a model in which an error came up, as far as its frames tell."""
    raised: TracebackType | None = error.__traceback__
    frames = [frame for frame, _ in traceback.walk_tb(raised)]
    return module_of(reversed(frames))
