"""End of a process together with the process that started it."""

import ctypes
import os
import signal
import sys


def die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when its parent dies, however that dies (PR_SET_PDEATHSIG).

    Args:
        parent: process id of the parent.
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before the request
