"""Start of the tracing process, with its imports spread over two cores."""

import contextlib
import ctypes
import importlib
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

from trials.child_process.bootstrap import hide

LIBRARIES = ("libtorch_cpu.so", "libtorch_python.so")
# Optional to transformers and accelerate; importing them takes half a second.
NEEDLESS = ("boto3", "scipy")


def main() -> None:
    """Import the libraries, then answer requests."""
    import_libraries()
    from trials.simulation.tracing.tracing_worker import main as trace  # noqa: PLC0415 - as above

    trace()


def import_libraries() -> None:
    """Import all that a trace needs."""
    loading = Thread(target=_load_libraries)
    loading.start()
    hide(*NEEDLESS)
    # Neither imports PyTorch until its parts are used.
    for name in ("transformers", "sympy"):
        importlib.import_module(name)
    loading.join()  # a later fork would lose the thread
    from trials.simulation.tracing import tracing_worker  # noqa: PLC0415 - as above

    tracing_worker.import_without_compiler()
    importlib.import_module("peft")  # most recipes have adapters; else each process imports it


def _load_libraries() -> None:
    """Load PyTorch's large libraries ahead of its import, which reports any error itself."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return
    folder = Path(spec.origin).parent / "lib"
    for name in LIBRARIES:
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(folder / name))


if __name__ == "__main__":
    main()
