"""Process-wide torch settings that tests share."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def small_steps() -> Iterator[None]:
    """Make tiny steps fast, and restore the process afterwards.

    They are faster on one thread, which a Worker sets for the whole process anyway. Counting memory
    collects garbage first, which takes 0.3 s for all objects of pytest and torch unless frozen.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        torch.set_num_threads(threads)
