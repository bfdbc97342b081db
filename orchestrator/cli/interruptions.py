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


def end_at_next_interruption() -> None:
    """Let a further one end the process at once, whatever its exit handlers wait for."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is _interrupt:
            signal.signal(number, signal.SIG_DFL)


def exit_code() -> int:
    """Exit code of an interrupted process, as a shell gives it: 130 or 143."""
    return 128 + (_received or [signal.SIGINT])[0]


def end_interrupted(code: int) -> NoReturn:
    """End an interrupted process with an exit code.

    Python itself would wait for threads that nothing can stop, such as a replay of minutes. If the
    signal arrived during ``exec()``, as in an import, it would end by SIGINT instead.
    """
    atexit._run_exitfuncs()  # noqa: SLF001 - for which there is no public name
    os._exit(code)


def _interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    _received.append(number)
    raise KeyboardInterrupt


def _signal_again(ignored: "UnraisableHookArgs") -> None:
    # SystemExit is what Ray's handler of SIGTERM raises, which there is while Ray starts.
    if not isinstance(ignored.exc_value, KeyboardInterrupt | SystemExit):
        sys.__unraisablehook__(ignored)
        return
    number = signal.SIGTERM
    if isinstance(ignored.exc_value, KeyboardInterrupt):
        number = signal.Signals((_received or [signal.SIGINT])[0])
    elif threading.current_thread() is threading.main_thread():
        signal.signal(number, _interrupt)  # Ray's heeds one signal
    # By then the callback has ended.
    again = threading.Timer(AGAIN_SECONDS, os.kill, (os.getpid(), number))
    again.daemon = True
    again.start()
