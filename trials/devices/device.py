"""What a trial asks of a device, whichever it is."""

from collections.abc import Callable
from typing import Protocol

import torch

from trials.records.observation import DeviceReading, MemoryReading


class DeviceError(RuntimeError):
    """The device is not the one the trial was sent to, or cannot be used."""


class DeviceOutOfMemoryError(RuntimeError):
    """The device's memory budget was exceeded."""


class Device(Protocol):
    """The memory, clock and limits of one device.

    Attributes:
        torch_device: where tensors go.
        name: what the device calls itself.
        memory_limit_bytes: device memory that probes are held against.
        allocator: settings of PyTorch's CUDA allocator; None on a CPU.
        versions: what of its software a stack is told by (driver, CUDA), name and version.
    """

    torch_device: torch.device
    name: str
    memory_limit_bytes: int
    allocator: str | None
    versions: dict[str, str]

    def settle(self) -> None:
        """Gives back what earlier probes left cached, so that each starts alike."""

    def measure_memory(
        self, step: Callable[[], object], *, steps: int, already_live: list[torch.Tensor]
    ) -> MemoryReading:
        """Runs so many steps and says what memory they took.

        Raises:
            DeviceOutOfMemoryError: they exceed the limit (a CUDA device raises
                torch.OutOfMemoryError and its relatives instead).
        """

    def step_seconds(self, step: Callable[[], object]) -> float:
        """Duration of one step, from a synchronised device to a synchronised device."""

    def reading(self) -> DeviceReading | None:
        """Clocks, temperature and the like at this moment; None where nothing tells."""

    def energy_joules(self) -> float | None:
        """A counter of the energy drawn so far; None where nothing counts it."""
