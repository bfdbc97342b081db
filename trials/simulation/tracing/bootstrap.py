"""How the process that traces begins: what it imports is loaded on two cores, where there are."""

import contextlib
import ctypes
import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

LIBRARIES = ("libtorch_cpu.so", "libtorch_python.so")
# transformers and accelerate do without; where they are, half a second goes into importing them.
NEEDLESS = ("boto3", "scipy")


def main() -> None:
    """Imports all, then traces what it is asked."""
    loading = Thread(target=_load_libraries)
    loading.start()
    modules: Any = sys.modules
    modules.update(dict.fromkeys(NEEDLESS))  # as if they were not installed
    # Neither needs PyTorch. What they leave to be imported later does.
    for name in ("transformers", "sympy"):
        importlib.import_module(name)
    loading.join()  # a fork would lose the thread
    from trials.simulation.tracing.tracing_worker import main as trace  # noqa: PLC0415 - as above

    trace()


def _load_libraries() -> None:
    """PyTorch's, which are large: the import finds them loaded; what cannot be, it tells."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return
    folder = Path(found.origin).parent / "lib"
    for name in LIBRARIES:
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(folder / name))


if __name__ == "__main__":
    main()
