"""Counts the bytes of live tensors, operation by operation, as a device's allocator would."""

from collections.abc import Iterable

import torch

from trials.devices.device import DeviceOutOfMemoryError
from trials.devices.storages import StorageWatch


class LiveTensorCounter(StorageWatch):  # type: ignore[no-untyped-call]
    """While active, knows how many bytes live tensors occupy, and the most they ever did.

    Args:
        already_live: tensors made before counting starts (weights, buffers).
        budget_bytes: exceeding it raises DeviceOutOfMemoryError from the operation that did.
    """

    def __init__(self, already_live: Iterable[torch.Tensor], budget_bytes: int) -> None:
        super().__init__()
        self.budget_bytes = budget_bytes
        self.current_bytes = 0
        self.peak_bytes = 0
        self.note_all(already_live)

    def note_tensor(self, tensor: torch.Tensor) -> int:
        """Counts the storage of a tensor; one on the meta device has a size and no memory."""
        return 0 if tensor.is_meta else super().note_tensor(tensor)

    def made(self, identity: int, size: int) -> None:  # noqa: ARG002 - whose they are is no matter
        """Counts its bytes."""
        self.current_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        if self.current_bytes > self.budget_bytes:
            raise DeviceOutOfMemoryError(
                f"{self.current_bytes} bytes of live tensors exceed the budget of "
                f"{self.budget_bytes} bytes"
            )

    def gone(self, identity: int, size: int) -> None:  # noqa: ARG002 - as above
        """Counts them no more."""
        self.current_bytes -= size
