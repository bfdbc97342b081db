"""Watches which storages live, operation by operation."""

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class StorageWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, hears of every storage an operation returned, and of its end.

    A storage is heard of once, however many tensors share it, from the operation that made it until
    Python and autograd let go of it. Workspace that a kernel takes and gives back inside one
    operation is not seen. What is heard depends on the operations alone, so the same step gives the
    same in every process.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: dict[int, int] = {}
        self._finalizers: dict[int, weakref.finalize[..., torch.UntypedStorage]] = {}

    def made(self, identity: int, size: int) -> None:
        """A storage of so many bytes is there."""
        raise NotImplementedError

    def gone(self, identity: int, size: int) -> None:
        """A storage is there no more."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        # A collection at a moment of Python's choosing would make two runs differ.
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
        """Runs the operation and notes what it returned."""
        result = func(*args, **(kwargs or {}))
        self.note(result)
        return result

    def note(self, result: object) -> None:
        """Notes every tensor in what an operation returned."""
        for leaf in tree_iter(result):
            if isinstance(leaf, torch.Tensor):
                self.note_tensor(leaf)

    def note_all(self, tensors: Iterable[torch.Tensor]) -> None:
        """Notes tensors that no operation returned."""
        for tensor in tensors:
            self.note_tensor(tensor)

    def note_tensor(self, tensor: torch.Tensor) -> int:
        """Notes the storage of a tensor; returns its identity."""
        storage = tensor.untyped_storage()
        identity: int = storage._cdata  # noqa: SLF001 - the one name all tensors of a storage share
        size = storage.nbytes()
        known = self._sizes.get(identity)
        if known == size:
            return identity
        if known is None:
            self._finalizers[identity] = weakref.finalize(storage, self._forget, identity)
        else:
            self.gone(identity, known)
        self._sizes[identity] = size
        self.made(identity, size)
        return identity

    def _forget(self, identity: int) -> None:
        del self._finalizers[identity]
        self.gone(identity, self._sizes.pop(identity))
