"""The CPU as a device: a memory budget that live tensors count against, and a monotonic clock."""

import contextlib
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from gpu_catalog.gpu import Gpu
from trials.devices.device import AfterStep, of_steps
from trials.devices.live_tensors import LiveTensorCounter
from trials.records.observation import DeviceReading, MemoryReading

Observed = Callable[[LiveTensorCounter], contextlib.AbstractContextManager[object]]


class CpuDevice:
    """Runs steps on the CPU.

    Args:
        gpu: catalog row; its usable memory is the budget.
        memory_cap_bytes: a smaller budget, to stand in for a smaller device.
        held_share: fraction of the budget that others hold.
        threads: CPU threads a step may use.
        observed: context in which a counter sees all memory of a step; absent where it does anyway.
    """

    torch_device = torch.device("cpu")
    allocator: str | None = None

    def __init__(
        self,
        gpu: Gpu,
        *,
        memory_cap_bytes: int | None = None,
        held_share: float = 0.0,
        threads: int,
        observed: Observed = contextlib.nullcontext,
    ) -> None:
        assert gpu.usable_memory_bytes is not None  # the catalog requires it of a cpu
        budget = memory_cap_bytes or gpu.usable_memory_bytes
        self.memory_limit_bytes = round(budget * (1 - held_share))
        self.name = processor_name()
        self.versions: dict[str, str] = {}
        self._observed = observed
        torch.set_num_threads(threads)

    def settle(self) -> None:
        """Do nothing: a CPU keeps no cache between probes."""

    def measure_memory(
        self,
        step: Callable[[], object],
        *,
        steps: int,
        already_live: list[torch.Tensor],
        after_step: AfterStep | None = None,
    ) -> MemoryReading:
        """Run steps and return the most bytes of tensors alive at once.

        Raises:
            DeviceOutOfMemoryError: live tensors exceed the budget.
        """
        readings = []
        counter = LiveTensorCounter(already_live, self.memory_limit_bytes)
        with counter, self._observed(counter):
            for _ in range(steps):
                counter.peak_bytes = counter.current_bytes
                step()
                readings.append(MemoryReading(peak_allocated_bytes=counter.peak_bytes))
                if after_step is not None:
                    after_step(readings[-1])
        return of_steps(readings)

    def step_seconds(self, step: Callable[[], object]) -> float:
        """Duration of one step in seconds, without the counting of tensors."""
        started = time.perf_counter()
        step()
        return time.perf_counter() - started

    def reading(self) -> DeviceReading | None:
        """Return None: no interface reads a processor's clocks on every machine."""
        return None

    def energy_joules(self) -> float | None:
        """Return None: a CPU has no portable energy counter."""
        return None


def processor_name() -> str:
    """Name of the processor by the operating system."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
