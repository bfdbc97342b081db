"""The CPU as a device: a memory budget, live tensors counted against it, a monotonic clock."""

import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from gpu_catalog.gpu import Gpu
from trials.devices.live_tensors import LiveTensorCounter


class CpuDevice:
    """Runs steps on the CPU.

    Args:
        gpu: the catalog row; its usable memory is the budget.
        threads: CPU threads a step may use.
    """

    def __init__(self, gpu: Gpu, *, threads: int) -> None:
        assert gpu.usable_memory_bytes is not None  # the catalog demands it of a cpu
        self.budget_bytes = gpu.usable_memory_bytes
        self.threads = threads
        torch.set_num_threads(threads)

    @property
    def name(self) -> str:
        """What the processor calls itself."""
        cpuinfo = Path("/proc/cpuinfo")
        if cpuinfo.exists():
            for line in cpuinfo.read_text(encoding="utf-8").splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        return platform.processor() or platform.machine()

    def peak_memory_bytes(
        self, step: Callable[[], object], *, steps: int, already_live: list[torch.Tensor]
    ) -> int:
        """The most bytes of live tensors during so many steps.

        Raises:
            DeviceOutOfMemoryError: they exceed the budget.
        """
        with LiveTensorCounter(already_live, self.budget_bytes) as counter:
            for _ in range(steps):
                step()
        return counter.peak_bytes

    def step_seconds(self, step: Callable[[], object]) -> float:
        """Duration of one step, nothing counted meanwhile."""
        started = time.perf_counter()
        step()
        return time.perf_counter() - started
