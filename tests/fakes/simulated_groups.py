"""Groups of simulated trials, in a module that other processes can import."""

import os
import signal
import time
from pathlib import Path
from typing import Any

WAIT_SECONDS = 30.0


def group_trials(group: Any, *_: Any) -> Any:
    """Trials of a group. A path is a group whose process is killed once that path exists."""
    if isinstance(group, Path):
        end = time.monotonic() + WAIT_SECONDS
        while not group.exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return [(group, [])]
