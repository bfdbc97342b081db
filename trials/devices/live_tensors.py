"""Bytes of live tensors, counted operation by operation as a device's allocator would."""

from collections.abc import Iterable

import torch

from trials.devices.device import DeviceOutOfMemoryError
from trials.devices.storages import StorageWatch


class LiveTensorCounter(StorageWatch):  # type: ignore[no-untyped-call]
    """Counts the bytes of live tensors while active, and their peak.

    Args:
        already_live: tensors made before counting starts (weights, buffers).
        budget_bytes: an operation that exceeds it raises DeviceOutOfMemoryError.
    """

    def __init__(self, already_live: Iterable[torch.Tensor], budget_bytes: int) -> None:
        super().__init__()
        self.budget_bytes = budget_bytes
        self.current_bytes = 0
        self.peak_bytes = 0
        self.note_all(already_live)

    def note_tensor(self, tensor: torch.Tensor) -> int:
        """Count the storage of a tensor; on the meta device it has a size but no memory."""
        return 0 if tensor.is_meta else super().note_tensor(tensor)

    def made(self, identity: int, size: int) -> None:  # noqa: ARG002 - the base class passes it
        """Add the bytes of a new storage."""
        self.current_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        if self.current_bytes > self.budget_bytes:
            raise DeviceOutOfMemoryError(
                f"{self.current_bytes} bytes of live tensors exceed the budget of "
                f"{self.budget_bytes} bytes"
            )

    def gone(self, identity: int, size: int) -> None:  # noqa: ARG002 - as above
        """Subtract the bytes of a storage that was freed."""
        self.current_bytes -= size
