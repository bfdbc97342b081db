"""Process-wide torch settings that tests share."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def small_steps() -> Iterator[None]:
    """Make tiny steps fast, and restore the process afterwards.

    They are faster on one thread, which a Worker sets for the whole process anyway.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
