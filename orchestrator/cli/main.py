"""The command line: parses the arguments, runs the command, prints errors in one line.

The module of a command is imported when it runs, so that ``--help`` answers at once.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from gpu_catalog.errors import UserError
from orchestrator.cli.parsers.program import build_parser
from orchestrator.console import log_to_stderr, remark
from trials.child_process.environment import SAFE_PATH


def program() -> NoReturn:
    """The command ``finetune-cost``."""
    os.environ |= SAFE_PATH  # for every process that it starts: Ray's, and those of a pool
    sys.exit(main(sys.argv[1:], is_alone=True))


def main(arguments: Sequence[str], *, is_alone: bool = False) -> int:
    """Run one command.

    Args:
        arguments: arguments of the command line.
        is_alone: whether the process runs nothing else, so that the command may use idle cores.

    Returns:
        0 done, 1 an error that the user can mend (one line on stderr), 2 usage, 130 interrupted.
    """
    try:
        try:
            return _run(arguments, is_alone=is_alone)
        finally:
            sys.stdout.flush()  # a reader that has left is noticed here, not when Python ends
    except BrokenPipeError:
        # The reader of our output has left (`| head`); Python must not complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: Sequence[str], *, is_alone: bool) -> int:
    options = build_parser().parse_args(arguments)
    options.is_alone = is_alone
    log_to_stderr()
    try:
        module, _, function = options.run_command.partition(".")
        command = getattr(import_module(f"orchestrator.cli.commands.{module}"), function)
        return int(command(options))
    except UserError as error:
        remark(str(error))
        return 1
    except KeyboardInterrupt:
        remark("stopped: run the same command again to resume")
        return 130
