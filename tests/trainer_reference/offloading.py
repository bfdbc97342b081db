"""A CPU that plays both GPU and host for TRL's activation offloading."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes


class _Stream:
    """A stream whose work is done at once."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class _Device:
    """Device module, and the part of torch that asks for it."""

    Stream = _Stream

    def __init__(self) -> None:
        self.accelerator = self

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def current_accelerator(self) -> torch.device:
        return torch.device("cpu")

    def get_device_module(self, _type: str) -> "_Device":
        return self

    def current_stream(self) -> _Stream:
        return _Stream()

    def stream(self, _stream: _Stream) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def empty_cache(self) -> None:
        pass

    def empty_like(self, tensor: torch.Tensor, **_: object) -> "_OnHost":
        return _OnHost(tensor.shape, tensor.stride(), tensor.dtype)

    def empty(self, elements: int, *, dtype: torch.dtype, **_: object) -> "_OnHost":
        return _OnHost((elements,), (1,), dtype)


class _OnHost:
    """Values that no counter sees."""

    def __init__(self, shape: Any, strides: Any, dtype: torch.dtype) -> None:
        self._layout = (shape, strides)
        self._dtype = dtype

    def copy_(self, tensor: torch.Tensor, **_: object) -> None:
        with _disable_current_modes():
            self._values = tensor.detach().clone()

    def to(self, device: str, **_: object) -> torch.Tensor:
        tensor = torch.empty_strided(*self._layout, dtype=self._dtype, device=device)
        with _disable_current_modes():
            tensor.copy_(self._values)
        return tensor


@contextlib.contextmanager
def host_apart() -> Iterator[None]:
    """Let TRL offload activations of the CPU to tensors that do not count as memory."""
    from trl.models import activation_offloading as library  # noqa: PLC0415 - seconds

    library.torch = _Device()
    try:
        yield
    finally:
        library.torch = torch
