"""A pool of processes ends with its program, which never waits for work that nobody wants."""

import multiprocessing
import time
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor

import pytest

from trials.child_process.process_pool import process_pool

LONG_SECONDS = 60.0


def test_an_interrupted_program_does_not_wait_for_its_processes() -> None:
    """Neither for the work that runs nor for the work that is queued, and no process is left."""
    begun = time.monotonic()

    def interrupted() -> None:
        with process_pool(2) as pool:
            for _ in range(8):
                pool.submit(time.sleep, LONG_SECONDS)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.monotonic() - begun < LONG_SECONDS / 2
    assert multiprocessing.active_children() == []


def test_a_killed_process_ends_the_others_at_once() -> None:
    """The kernel kills one where memory is short."""
    begun = time.monotonic()

    def killed() -> None:
        with process_pool(2) as pool:
            futures = [pool.submit(time.sleep, LONG_SECONDS) for _ in range(8)]
            multiprocessing.active_children()[0].kill()
            futures[0].result()

    with pytest.raises(BrokenProcessPool):
        killed()
    assert time.monotonic() - begun < LONG_SECONDS / 2
    assert multiprocessing.active_children() == []


def test_cancelled_work_prints_no_traceback_of_the_pools_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It cannot fail futures that are cancelled; of an exception in a thread pytest makes an error.

    The interrupt of a map cancels what it waits for. The thread mostly sees the shutdown first.
    """
    shutdown = ProcessPoolExecutor.shutdown

    def late(pool: ProcessPoolExecutor, **options: bool) -> None:
        time.sleep(0.5)
        shutdown(pool, **options)

    monkeypatch.setattr(ProcessPoolExecutor, "shutdown", late)

    def interrupted() -> None:
        with process_pool(1) as pool:
            waiting = [pool.submit(time.sleep, LONG_SECONDS) for _ in range(10)]
            assert waiting[-1].cancel()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
