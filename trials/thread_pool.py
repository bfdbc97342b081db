"""Pools of threads that an interrupted command does not wait for."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def thread_pool(count: int | None = None) -> Iterator[ThreadPoolExecutor]:
    """A pool of threads for this context alone.

    An interruption (Ctrl-C, SIGTERM) leaves the context at once: a replay may take minutes, and
    nothing can stop it. Its thread then goes on until the process ends.
    """
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    except Exception:
        pool.shutdown(cancel_futures=True)
        raise
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
