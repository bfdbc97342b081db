"""Lifetimes of tensor storages, observed operation by operation."""

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

SUM = torch.ops.aten.add.Tensor
ENGINE = "_engine_run_backward"  # of torch/autograd/graph.py, which calls the engine
# A mode's functions, and PyTorch's wrappers of the first.
DISPATCH = {"note_result", "__torch_dispatch__", "_fn", "inner"}
DISTRIBUTED: tuple[type, ...] = (DTensor, AsyncCollectiveTensor)
"""Tensors of several ranks, whose operations are carried out on those of this rank."""


def is_distributed(types: Sequence[type]) -> bool:
    """Whether an operation on tensors of these types is one of several ranks."""
    return any(issubclass(kind, DISTRIBUTED) for kind in types)


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operator while active."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation and note it; one of several ranks becomes others, on this rank."""
        if is_distributed(types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.note_result(func, args, result)
        return result

    def note_result(self, func: Any, args: tuple[Any, ...], result: object) -> None:
        """Note an operator that ran with these arguments and returned this."""
        raise NotImplementedError


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Part of a tensor on this rank: what a distributed one wraps, or the tensor itself."""
    if isinstance(tensor, AsyncCollectiveTensor):
        return tensor.elem
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def storage_of(held: torch.Tensor | torch.UntypedStorage) -> torch.UntypedStorage:
    """Storage of a tensor's part on this rank; a storage itself."""
    return local_tensor(held).untyped_storage() if isinstance(held, torch.Tensor) else held


def is_autograds_sum(func: Callable[..., Any]) -> bool:
    """Whether autograd itself adds two gradients of one tensor. A mode's dispatch asks.

    Without a dispatch mode autograd writes the sum to the first gradient, if nothing else holds it
    (``InputBuffer::accumulate`` in PyTorch's input_buffer.cpp); under one it makes a new tensor.
    """
    if func is not SUM:
        return False
    frame = sys._getframe(1)  # noqa: SLF001 - the only way to the caller
    while frame.f_back is not None and frame.f_code.co_name in DISPATCH:
        frame = frame.f_back
    return frame.f_code.co_name == ENGINE


class StorageWatch(OperatorMode):
    """Reports every storage that an operation returns, and its end, while active.

    A storage is reported once, however many tensors share it: ``made`` by the operation that
    returned it, ``gone`` when Python and autograd hold it no more. Workspace that a kernel takes
    and frees inside one operation stays unseen. The reports depend on the operations alone, so the
    same step gives the same reports in every process.

    A sum of gradients for which autograd needs no memory without the watch (``is_autograds_sum``)
    is reported after the end of the gradient that it replaces.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: dict[int, int] = {}
        self._finalizers: dict[int, weakref.finalize[..., torch.UntypedStorage]] = {}
        self._replaced: int | None = None
        self._late: tuple[int, int] | None = None

    def made(self, identity: int, size: int) -> None:
        """Note a new storage of ``size`` bytes."""
        raise NotImplementedError

    def gone(self, identity: int, size: int) -> None:
        """Note the end of a storage of ``size`` bytes."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        # A garbage collection at an arbitrary moment would free storages earlier in one run than in
        # another. Reference counts alone free them at the same operation each time.
        gc.collect()
        self._collected_automatically = gc.isenabled()
        gc.disable()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self.report_late()
        if self._collected_automatically:
            gc.enable()
        # A list: what dies meanwhile removes its own.
        for finalizer in list(self._finalizers.values()):
            finalizer.detach()

    def note_result(self, func: Any, args: tuple[Any, ...], result: object) -> None:
        """Note the tensors that an operation returned; its dispatch calls this."""
        if is_autograds_sum(func):
            # Should the end of the first gradient be next, it is reported before the sum.
            self._replaced = storage_of(args[0])._cdata  # noqa: SLF001 - as ``note_tensor``
        self.note(result)

    def note(self, result: object) -> None:
        """Note every tensor in the result of an operation."""
        for leaf in tree_iter(result):
            if isinstance(leaf, torch.Tensor):
                self.note_tensor(leaf)

    def note_all(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note tensors that no operation returned."""
        for tensor in tensors:
            self.note_tensor(tensor)

    def note_tensor(self, tensor: torch.Tensor) -> int:
        """Note the storage of a tensor, and return its identity."""
        storage = local_tensor(tensor).untyped_storage()
        identity: int = storage._cdata  # noqa: SLF001 - the one name all tensors of a storage share
        size = storage.nbytes()
        noted = self._sizes.get(identity)
        if noted == size:
            return identity
        if noted is None:
            # PyTorch keeps one Python object per storage and revives it, so the finalizer runs when
            # C++ frees the storage: after autograd has dropped it too.
            self._finalizers[identity] = weakref.finalize(storage, self._forget, identity)
        else:
            self.gone(identity, noted)  # resized in place
        self._sizes[identity] = size
        self.report_late()
        if self._replaced is None:
            self.made(identity, size)
        else:
            self._late = identity, size
        return identity

    def report_late(self) -> None:
        """Report the storage that waits for the end of another."""
        if self._late is not None:
            late, self._late, self._replaced = self._late, None, None
            self.made(*late)

    def _forget(self, identity: int) -> None:
        del self._finalizers[identity]
        size = self._sizes.pop(identity)
        if identity == self._replaced:
            self.gone(identity, size)
            self.report_late()
        else:
            self.report_late()
            self.gone(identity, size)
