"""Begins a child process: ``python -m trials.child_process.bootstrap MODULE …`` is ``python -m MODULE …``, sooner.

Importing PyTorch and its like makes millions of objects that all stay: looking for garbage among
them takes a fifth of it. Whoever is done with importing calls ``settled``.
"""

import gc
import runpy
import sys


def freeze_garbage_collector() -> None:
    """What is there by now stays, and is not looked through; what comes is, from here on."""
    gc.freeze()
    gc.enable()


if __name__ == "__main__":
    gc.disable()
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
