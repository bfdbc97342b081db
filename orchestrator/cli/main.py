"""The command line: parses the arguments, runs the command, prints errors in one line.

The module of a command is imported when it runs, so that ``--help`` answers at once.
"""

import atexit
import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from gpu_catalog.errors import UserError
from orchestrator.cli.interruptions import (
    end_at_next_interruption,
    end_interrupted,
    exit_code,
    heed_interruptions,
    is_interrupted,
)
from orchestrator.cli.parsers.program import build_parser
from orchestrator.console import ALL_COLUMNS, OutputError, log_to_stderr, output, remark
from trials.child_process.environment import SAFE_PATH

MOST_MISTAKES = 20
"""Most lines of mistakes that are printed."""
COLLECTED = (100_000, 20, 20)
"""Thresholds of Python's garbage collector. Records have no cycles: by its own thresholds, a fifth
of the time of `rank` and `report` on a long log goes to looking for them."""
READING = frozenset({"status", "plan", "rank", "what-if", "report", "fit"})
"""Commands that read a run once and end, so that nothing is to be collected before."""
RESUMED = frozenset({"sweep", "learn", "gpu-check", "launch"})
"""Commands that continue an interrupted run, or reconnect to it, when they are run again."""


def program() -> NoReturn:
    """The command ``finetune-cost``."""
    heed_interruptions()
    gc.set_threshold(*COLLECTED)
    os.environ |= SAFE_PATH  # for every process that it starts: Ray's, and those of a pool
    code = main(sys.argv[1:], is_alone=True)
    if is_interrupted():
        end_interrupted(code)
    sys.exit(code)


def main(arguments: Sequence[str], *, is_alone: bool = False) -> int:
    """Run one command.

    Args:
        arguments: arguments of the command line.
        is_alone: whether the process runs nothing else, so that the command may use idle cores.

    Returns:
        0 done, 1 an error that the user can mend (one line on stderr), 2 usage, 130 interrupted,
        143 terminated.
    """
    try:
        try:
            return _run(arguments, is_alone=is_alone)
        finally:
            with output() as stream:  # a full disk is noticed here, not when Python ends
                stream.flush()
    except (BrokenPipeError, OutputError) as error:
        # Python must not complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader of our output has left (`| head`)
            return 0
        remark(str(error))
        return 1


def _run(arguments: Sequence[str], *, is_alone: bool) -> int:
    try:
        return _answer(arguments, is_alone=is_alone)
    except BaseException as error:  # noqa: BLE001 - an unknown one is raised again
        if not is_interrupted() and not isinstance(error, KeyboardInterrupt):
            return _explained(error)
    end_at_next_interruption()
    resumes = not RESUMED.isdisjoint(arguments[:1])
    remark("stopped: run the same command again to resume" if resumes else "stopped")
    return exit_code()


def _answer(arguments: Sequence[str], *, is_alone: bool) -> int:
    """Run a command, and return its exit code."""
    options = build_parser().parse_args(arguments)
    options.is_alone = is_alone
    ALL_COLUMNS.set(getattr(options, "wide", False))
    log_to_stderr()
    if is_alone and options.command in READING:
        gc.disable()
        atexit.register(gc.freeze)  # nor when Python ends, a twentieth of the time of `status`
    module, _, function = options.run_command.partition(".")
    command = getattr(import_module(f"orchestrator.cli.commands.{module}"), function)
    return int(command(options))


def _explained(error: BaseException) -> int:
    """Print an error that the user can mend, and return the exit code.

    Raises:
        BaseException: the error, if it is another one.
    """
    if isinstance(error, UserError):
        first, rest = (lines := str(error).splitlines())[:MOST_MISTAKES], lines[MOST_MISTAKES:]
        remark("\n".join([*first, *[f"and {len(rest):,} more mistakes"] * bool(rest)]))
    elif isinstance(error, OSError) and error.filename is not None:
        remark(f"{error.filename}: {error.strerror}")
    else:
        raise error
    return 1
