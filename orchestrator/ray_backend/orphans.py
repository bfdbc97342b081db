"""End of Ray's processes on this machine once the driver that started them was killed.

Ray's own processes end with their driver, but workers that are still starting notice it up to a
minute later. A helper waits for the end of the driver's pipe and kills whatever carries its mark.
"""

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil

MARK = "FINETUNE_COST_DRIVER"
"""Variable that every process of a driver inherits, with a value of that driver."""
KEPT = "SPT_NOENV"
"""Variable that keeps Ray's titles of processes from overwriting the variables, and the mark."""
NONE_LEFT_SECONDS = 2.0  # without a marked process: none of them starts another any more
POLL_SECONDS = 0.1


@contextlib.contextmanager
def ending_with_this_process() -> Iterator[None]:
    """Processes started within end, should this process be killed; a normal end leaves them."""
    mark = f"{os.getpid()}-{secrets.token_hex(8)}"
    helper = subprocess.Popen(
        [sys.executable, "-P", "-m", "orchestrator.ray_backend.orphans", mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,  # Ctrl-C is for the driver
    )
    os.environ |= {MARK: mark, KEPT: "1"}
    try:
        yield
    finally:
        del os.environ[MARK], os.environ[KEPT]
        with contextlib.suppress(BrokenPipeError):
            helper.communicate(b"ended")


def marked(mark: str) -> list[psutil.Process]:
    """Processes of the driver with this mark."""
    running = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                running.append(process)
    return running


def _kill(mark: str) -> None:
    last = time.monotonic()
    while time.monotonic() < last + NONE_LEFT_SECONDS:
        for process in marked(mark):
            with contextlib.suppress(psutil.Error):
                process.kill()
            last = time.monotonic()
        time.sleep(POLL_SECONDS)


if __name__ == "__main__" and not sys.stdin.buffer.read():
    _kill(sys.argv[1])
