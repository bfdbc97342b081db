"""Start by ``python -m orchestrator``, which puts the working directory on ``sys.path``.

Whoever may write there, as into a run folder, could otherwise replace any module of this program,
of its libraries or of Python. ``orchestrator/__init__.py`` imports this module before all others,
so it imports nothing itself that Python has not loaded at its start.
"""

import os
import sys

PACKAGE = "orchestrator"


def is_module_start() -> bool:
    """Whether this process runs ``python -m orchestrator``, and not a program that imports it."""
    # While Python looks for the module of -m, and imports its package, argv begins with "-m".
    # orig_argv ends in the same arguments; the word before them names the module.
    if sys.argv[:1] != ["-m"]:
        return False
    word = sys.orig_argv[-len(sys.argv)]
    return word.removeprefix("-m").partition(".")[0] == PACKAGE


def leave_working_directory() -> None:
    """Take the working directory off ``sys.path``, unless this package was imported from it.

    A checkout and a Ray job have the package in the working directory: there the user's own files
    are the program.
    """
    if sys.flags.safe_path or not sys.path:
        return
    # pathlib would be imported from the working directory.
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    if os.path.realpath(sys.path[0]) != os.path.realpath(root):
        del sys.path[0]


if is_module_start():
    leave_working_directory()
