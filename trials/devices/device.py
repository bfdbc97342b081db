"""Interface of a device to its trial: memory, clock, sensors."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from trials.records.observation import DeviceReading, MemoryReading

AfterStep = Callable[[MemoryReading], None]


class DeviceError(RuntimeError):
    """The device is not the one the trial was sent to, or cannot be used."""


class DeviceOutOfMemoryError(RuntimeError):
    """The device's memory budget was exceeded."""


def of_steps(readings: Sequence[MemoryReading]) -> MemoryReading:
    """Memory during several steps, by that during each of them."""
    reserved = [r.peak_reserved_bytes for r in readings if r.peak_reserved_bytes is not None]
    retries = [r.allocator_retries for r in readings if r.allocator_retries is not None]
    return readings[-1].model_copy(
        update={
            "peak_allocated_bytes": max(r.peak_allocated_bytes for r in readings),
            "peak_reserved_bytes": max(reserved, default=None),
            "allocator_retries": sum(retries) if retries else None,
        }
    )


class Device(Protocol):
    """The memory, clock and limits of one device.

    Attributes:
        torch_device: PyTorch's device for tensors.
        name: name of the device by its driver.
        memory_limit_bytes: device memory that probes may take.
        allocator: settings of PyTorch's CUDA allocator; None on a CPU.
        versions: versions of its software (driver, CUDA) by name, part of the stack.
    """

    torch_device: torch.device
    name: str
    memory_limit_bytes: int
    allocator: str | None
    versions: dict[str, str]

    def settle(self) -> None:
        """Release memory that earlier probes left cached, so that all probes start alike."""

    def measure_memory(
        self,
        step: Callable[[], object],
        *,
        steps: int,
        already_live: list[torch.Tensor],
        after_step: AfterStep | None = None,
    ) -> MemoryReading:
        """Run steps and return their peak memory.

        Args:
            step: runs a step.
            steps: number of steps.
            already_live: tensors made before.
            after_step: called after each step with its own peak memory.

        Raises:
            DeviceOutOfMemoryError: the steps exceed the limit (a CUDA device raises
                torch.OutOfMemoryError or a library's error instead).
        """

    def step_seconds(self, step: Callable[[], object]) -> float:
        """Duration of one step in seconds, from a synchronised device to a synchronised device."""

    def reading(self) -> DeviceReading | None:
        """Current clocks, temperature and power; None where no sensor reads them."""

    def energy_joules(self) -> float | None:
        """Energy drawn so far in joules; None where no counter measures it."""
