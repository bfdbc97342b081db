"""Faster start of a child process: ``python -m trials.child_process.bootstrap MODULE …``.

It runs ``python -m MODULE …`` without garbage collection until ``freeze_garbage_collector``:
importing PyTorch makes millions of objects that all live on, and scanning them takes a fifth of
the import's time.
"""

import gc
import runpy
import sys
from typing import Any

# transformers imports them where they are installed. torchao initialises CUDA as it loads, which
# no process may do before a fork, and takes a second.
HIDDEN = ("torchao",)


def hide(*packages: str) -> None:
    """Make packages seem absent to whatever is imported, until ``reveal``."""
    modules: Any = sys.modules
    modules.update(dict.fromkeys(packages))  # importing them raises ImportError


def reveal(package: str) -> None:
    """Let a hidden package be imported; any other stays as it is."""
    if package in sys.modules and sys.modules[package] is None:
        del sys.modules[package]


def freeze_garbage_collector() -> None:
    """Exempt all present objects from garbage collection, and collect new ones from now on."""
    gc.freeze()
    gc.enable()


if __name__ == "__main__":
    gc.disable()
    hide(*HIDDEN)
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
