"""Counts the bytes of live tensors, operation by operation, as a device's allocator would."""

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from trials.devices.device import DeviceOutOfMemoryError


class LiveTensorCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, knows how many bytes live tensors occupy, and the most they ever did.

    Every storage an operation returns is counted once, however many tensors share it, from the
    operation that made it until Python and autograd let go of it. Workspace that a kernel takes and
    gives back inside one operation is not seen. The count depends on the operations alone, so the
    same step gives the same bytes in every process.

    Args:
        already_live: tensors made before counting starts (weights, buffers).
        budget_bytes: exceeding it raises DeviceOutOfMemoryError from the operation that did.
    """

    def __init__(self, already_live: Iterable[torch.Tensor], budget_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.budget_bytes = budget_bytes
        self.current_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}
        self._finalizers: dict[int, weakref.finalize[..., torch.UntypedStorage]] = {}
        for tensor in already_live:
            self._count(tensor)

    def __enter__(self) -> Self:
        # A collection at a moment of Python's choosing would make the peak differ between runs.
        gc.collect()
        self._collected_automatically = gc.isenabled()
        gc.disable()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        if self._collected_automatically:
            gc.enable()
        for finalizer in self._finalizers.values():
            finalizer.detach()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs the operation and counts what it returned."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        if tensor.is_meta:
            return  # it has a size and no memory
        storage = tensor.untyped_storage()
        identity = storage._cdata  # noqa: SLF001 - the one name all tensors of a storage share
        size = storage.nbytes()
        known = self._sizes.get(identity)
        if known == size:
            return
        if known is None:
            self._finalizers[identity] = weakref.finalize(storage, self._forget, identity)
        self._sizes[identity] = size
        self.current_bytes += size - (known or 0)
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        if self.current_bytes > self.budget_bytes:
            raise DeviceOutOfMemoryError(
                f"{self.current_bytes} bytes of live tensors exceed the budget of "
                f"{self.budget_bytes} bytes"
            )

    def _forget(self, identity: int) -> None:
        self.current_bytes -= self._sizes.pop(identity)
        del self._finalizers[identity]
