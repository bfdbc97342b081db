"""The end of an interrupted command and of all that it has started, such as ssh and rsync."""

import contextlib
import subprocess
from collections.abc import Iterator
from typing import Any

import psutil

END_SECONDS = 2.0  # that processes have to end by themselves


@contextlib.contextmanager
def ended_on_error(command: subprocess.Popen[Any]) -> Iterator[None]:
    """End a command and its descendants if an exception leaves the block, Ctrl-C among them.

    ``Popen`` would wait for the command, or after Ctrl-C leave it running. A group of its own would
    not do: ssh asks the terminal for passwords, which only the foreground group may do.
    """
    try:
        yield
    except BaseException:
        if command.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                _end(psutil.Process(command.pid))
        raise


def _end(root: psutil.Process) -> None:
    """Terminate a process and its descendants, then kill those that remain.

    Killed at once, ssh would leave the terminal as it has set it: without echo.
    """
    processes = [root]
    try:
        root.suspend()  # so that it starts nothing more meanwhile
        processes += root.children(recursive=True)
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        root.resume()
        psutil.wait_procs(processes, timeout=END_SECONDS)
    finally:  # a second Ctrl-C ends the wait
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
