"""Faster start of a child process: ``python -m trials.child_process.bootstrap MODULE …``.

It runs ``python -m MODULE …`` without garbage collection until ``freeze_garbage_collector``:
importing PyTorch makes millions of objects that all live on, and scanning them takes a fifth of
the import's time.
"""

import gc
import runpy
import sys


def freeze_garbage_collector() -> None:
    """Exempt all present objects from garbage collection, and collect new ones from now on."""
    gc.freeze()
    gc.enable()


if __name__ == "__main__":
    gc.disable()
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
