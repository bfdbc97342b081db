"""A process that does not outlive the one that started it."""

import ctypes
import os
import signal
import sys


def die_with_parent(parent: int) -> None:
    """Asks Linux to kill this process when the one that started it dies, however it dies."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before we asked
