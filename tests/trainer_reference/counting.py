"""Exact count of live bytes, with what is alive at the peak."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from trials.devices.live_tensors import LiveTensorCounter

UNLIMITED = 2**62


class PeakCounter(LiveTensorCounter):
    """Counts live bytes, and remembers the storages alive at the peak.

    Args:
        already_live: tensors made before counting starts.
        with_origins: whether to keep the creator of each storage, for ``at_peak``; slow.
    """

    def __init__(self, already_live: Iterable[torch.Tensor], *, with_origins: bool = False) -> None:
        self._with_origins = with_origins
        self._alive: dict[int, tuple[int, str]] = {}
        self._at_peak: list[tuple[int, str]] = []
        super().__init__(already_live, UNLIMITED)

    def made(self, identity: int, size: int) -> None:
        """Add the bytes of a new storage."""
        before = self.peak_bytes
        super().made(identity, size)
        if self._with_origins:
            self._alive[identity] = (size, _origin())
            if self.peak_bytes > before:
                self._at_peak = list(self._alive.values())

    def gone(self, identity: int, size: int) -> None:
        """Subtract the bytes of a storage that was freed."""
        super().gone(identity, size)
        self._alive.pop(identity, None)

    def at_peak(self) -> list[tuple[int, int, str]]:
        """Storages alive at the peak as (bytes, count, origin), the most bytes first."""
        sizes: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for size, origin in self._at_peak:
            sizes[origin] += size
            counts[origin] += 1
        return [(size, counts[origin], origin) for origin, size in sizes.most_common()]


def unobserved(optimizer: torch.optim.Optimizer, counter: PeakCounter) -> Callable[..., Any]:
    """Step of an optimizer that no dispatch mode sees; the counter notes its state afterwards.

    torch.compile refuses to run in a dispatch mode. Buffers of compiled code are not counted.
    """
    own_step = optimizer.step

    def step(*args: Any) -> Any:
        with _disable_current_modes():
            result = own_step(*args)
        for state in optimizer.state.values():
            for value in state.values():
                names = getattr(value, "tensor_attrs", None)
                counter.note(value if names is None else [getattr(value, n) for n in names])
        return result

    return step


_SKIPPED = ("storages.py", "live_tensors.py", "counting.py", "_python_dispatch.py", "weakref.py")


def _origin() -> str:
    """Innermost lines of Python that led to an operation, with the operation's name."""
    frame = sys._getframe()
    lines: list[str] = []
    name = ""
    while frame is not None and len(lines) < 3:
        code = frame.f_code
        if code.co_name == "__torch_dispatch__" and not name:
            name = str(frame.f_locals.get("func"))
        file = code.co_filename.rsplit("/", 1)[-1]
        if file not in _SKIPPED and "torch/utils" not in code.co_filename:
            lines.append(f"{file}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return f"{name} {' < '.join(lines)}"
