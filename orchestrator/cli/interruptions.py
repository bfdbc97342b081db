"""Ctrl-C and SIGTERM, which interrupt a command wherever in it they arrive."""

import atexit
import os
import signal
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

SIGNALLED = 128
"""An exit code above it is that of a signal, as in a shell."""
AGAIN_SECONDS = 0.05
_received: list[int] = []
"""Signals that interrupted this process."""


def heed_interruptions() -> None:
    """Let SIGTERM interrupt the process as Ctrl-C does, and let no interruption get lost.

    Python ignores what is raised in callbacks of a fork and in finalizers. An interruption that
    arrives there is signalled again.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell may ignore it
        signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = _signal_again


def is_interrupted() -> bool:
    """Whether a signal has interrupted the process; libraries may raise other errors from that."""
    return bool(_received)


def ignore_interruptions() -> None:
    """Ignore further ones, since the process is about to end."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def exit_code() -> int:
    """Exit code of an interrupted process, as a shell gives it: 130 or 143."""
    return SIGNALLED + (_received or [signal.SIGINT])[0]


def end_interrupted(code: int) -> NoReturn:
    """End the process with an exit code.

    Python itself would wait for threads that nothing can stop, such as a replay of minutes. If it
    had been interrupted in a text that it was executing, as an import does, it would die of SIGINT.
    """
    atexit._run_exitfuncs()  # noqa: SLF001 - for which there is no public name
    os._exit(code)


def _interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    _received.append(number)
    raise KeyboardInterrupt


def _signal_again(ignored: "UnraisableHookArgs") -> None:
    if not isinstance(ignored.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(ignored)
        return
    number = (_received or [signal.SIGINT])[0]
    # By then the callback has ended.
    again = threading.Timer(AGAIN_SECONDS, os.kill, (os.getpid(), number))
    again.daemon = True
    again.start()
