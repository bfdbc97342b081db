"""Progress reports of a trace, and its limits of time and memory."""

import contextlib
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, TracebackType
from typing import Any, NoReturn

from torch import nn

from trials.simulation.trace_cache import BUSY, GIVEN_UP
from trials.simulation.tracing.tracer import UntraceableError

FIRST_REPORT_SECONDS = 10.0  # then after twice as long, each time
TICK_SECONDS = 1.0
MOST_GIB = 6.0
"""Most memory of a tracing process; one that runs away would take the machine's."""


@contextlib.contextmanager
def watchdog(subject: str, limit_seconds: float, report: Callable[[str], None]) -> Iterator[None]:
    """Report progress of a trace now and then, and abort it at the limit of time or memory.

    It uses SIGALRM, so it works in the main thread of a process alone.

    Args:
        subject: model, recipe and length being traced.
        limit_seconds: most CPU seconds of the trace, and ``BUSY`` times these on the clock.
        report: called with each line.

    Raises:
        UntraceableError: the trace took longer, or more than ``MOST_GIB``.
    """
    began, began_cpu = time.monotonic(), time.process_time()
    next_report = FIRST_REPORT_SECONDS

    def abort(reason: str) -> NoReturn:
        # C++ ends the process at an exception in some of its callbacks; this line is left then.
        sys.stderr.write(f"{reason}\n")
        raise UntraceableError(reason)

    def tick(_signal: int, frame: FrameType | None) -> None:
        nonlocal next_report
        taken, taken_cpu = time.monotonic() - began, time.process_time() - began_cpu
        # Every later tick raises again: Python drops an exception in a weak reference's callback.
        if taken_cpu >= limit_seconds:
            abort(f"{GIVEN_UP} {limit_seconds:g} CPU seconds")
        if taken >= BUSY * limit_seconds:
            abort(f"{GIVEN_UP} {BUSY * limit_seconds:g} s")
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > MOST_GIB * 2**20:  # in KiB
            abort(f"{GIVEN_UP} {MOST_GIB:g} GiB of memory")
        if taken >= next_report:
            next_report *= 2
            where = module_of(caller for caller, _ in traceback.walk_stack(frame))
            at = "" if where is None else f", now in {where}"
            limits = f"limit: {limit_seconds:g} CPU seconds or {MOST_GIB:g} GiB"
            report(f"{subject}: traced for {taken:.0f} s{at}; {limits}")

    before = signal.signal(signal.SIGALRM, tick)
    interval = min(TICK_SECONDS, limit_seconds)
    signal.setitimer(signal.ITIMER_REAL, interval, interval)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def module_of(frames: Iterable[FrameType]) -> str | None:
    """Class of the model's module whose method the first such frame runs; None for none.

    The name of the method says it. A look at ``f_locals`` would make the running frame keep
    its variables: tensors would outlive their ``del``, and the trace would be another.
    """
    for frame in frames:
        owner = frame.f_globals.get(frame.f_code.co_qualname.partition(".")[0])
        if isinstance(owner, type) and issubclass(owner, nn.Module) and owner is not nn.Module:
            return owner.__name__
    return None


def innermost_module(error: BaseException) -> str | None:
    """Class of the innermost module that raised an error; None outside all modules."""
    raised: TracebackType | None = error.__traceback__
    frames = [frame for frame, _ in traceback.walk_tb(raised)]
    for frame in reversed(frames):
        owner: Any = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return type(owner).__name__
    return None
