"""The state of this process that torch tests share."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def small_steps() -> Iterator[None]:
    """Makes tiny steps fast, and leaves the process as it was.

    They are faster on one thread, which a Worker sets for the whole process anyway. And counting
    memory collects garbage first: going through all that pytest and torch hold takes 0.3 s.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        torch.set_num_threads(threads)
