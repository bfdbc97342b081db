"""Pool of processes that leaves none behind, however the program ends."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from trials.child_process.parent_death import die_with_parent


@contextmanager
def process_pool(count: int) -> Iterator[ProcessPoolExecutor]:
    """New processes, which all start at once. They end with this one, and at once on any error.

    Raises:
        BrokenProcessPool: one was killed, as the kernel does where memory is short.
    """
    # A fork would copy locks that threads hold, such as Ray's.
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        count, mp_context=spawn, initializer=die_with_parent, initargs=(os.getpid(),)
    )
    others, hook = multiprocessing.active_children(), threading.excepthook
    try:
        # A terminal sends Ctrl-C to all its processes. The children inherit a mask that blocks it:
        # this process alone reports it, in one line, and ends them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for _ in range(count):
                pool.submit(os.getpid)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield pool
    except BaseException as error:
        # The pool's thread would print that futures were cancelled before they could fail (issue
        # 107219 of CPython, mended in 3.12).
        threading.excepthook = _print_nothing
        # The pool would wait for their work, which nobody wants any more. If one was killed while
        # it started, the others would wait for ever.
        for child in {*multiprocessing.active_children()}.difference(others):
            child.kill()
        if isinstance(error, BrokenPipeError):  # of one that was killed while it started
            raise BrokenProcessPool("a process was killed while it started") from None
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        threading.excepthook = hook


def _print_nothing(_: object) -> None:
    """Hook for an exception in a thread."""
