"""Memory of the tensors that a rank keeps on the host."""

import weakref

import torch


def pinned_bytes(size: int) -> int:
    """Bytes of pinned memory that PyTorch takes for some (``CachingHostAllocator::allocate``)."""
    return 1 << (size - 1).bit_length() if size else 0


class HostTensors:
    """Counts the bytes of storages on the host while anything holds them.

    Attributes:
        live_bytes: bytes of the storages now.
        peak_bytes: most bytes of them at once.
    """

    def __init__(self) -> None:
        self.live_bytes = self.peak_bytes = 0
        self._sizes: dict[int, int] = {}
        self._finalizers: dict[int, weakref.finalize[..., torch.UntypedStorage]] = {}
        self._pinned: set[int] = set()

    def note(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor, once, until its end; pinned ones keep their size."""
        storage = tensor.untyped_storage()
        identity: int = storage._cdata  # noqa: SLF001 - the one name all tensors of a storage share
        if identity in self._pinned:
            return
        if identity not in self._finalizers:
            self._finalizers[identity] = weakref.finalize(storage, self._forget, identity)
        self._resize(identity, storage.nbytes())

    def pin(self, tensor: torch.Tensor) -> None:
        """Count a tensor as its copy in pinned memory, which exists beside it for a moment."""
        self.note(tensor)
        storage = tensor.untyped_storage()
        identity: int = storage._cdata  # noqa: SLF001 - as above
        if identity in self._pinned or not storage.nbytes():
            return
        pinned = pinned_bytes(storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + pinned)
        self._pinned.add(identity)
        self._resize(identity, pinned)

    def _resize(self, identity: int, size: int) -> None:
        self.live_bytes += size - self._sizes.get(identity, 0)
        self._sizes[identity] = size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, identity: int) -> None:
        del self._finalizers[identity]
        self._pinned.discard(identity)
        self.live_bytes -= self._sizes.pop(identity)

    def close(self) -> None:
        """Stop counting."""
        for finalizer in list(self._finalizers.values()):
            finalizer.detach()
