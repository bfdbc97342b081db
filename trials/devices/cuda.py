"""An NVIDIA GPU as a device: PyTorch's allocator counts its memory, NVML reads its sensors."""

import gc
import os
import time
from collections.abc import Callable

import torch

from gpu_catalog.catalog import Catalog, UnknownGpuError, load_catalog
from gpu_catalog.gpu import Gpu
from trials.devices.device import DeviceError
from trials.devices.nvml import Nvml
from trials.observation import DeviceReading, MemoryReading

# The same GPU reports a little more or less with another driver or ECC setting; two GPUs that share
# a name differ by a third and more (A100-PCIE-40GB and 80GB, V100 of 16 and 32).
MEMORY_TOLERANCE = 0.10
# A killed process's memory comes back a moment after it is gone.
SETTLING_SECONDS = 5.0
SETTLED_BYTES = 64 * 2**20
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class CudaDevice:
    """Runs steps on the first GPU that CUDA shows to this process.

    Args:
        gpu: the catalog row of the GPU it must be.
        memory_cap_bytes: usable memory of a smaller GPU it stands in for. What the CUDA context and
            the libraries take on this GPU is taken off it, as they would take it there.

    Raises:
        DeviceError: there is no GPU, or another one.
    """

    def __init__(self, gpu: Gpu, *, memory_cap_bytes: int | None) -> None:
        if not torch.cuda.is_available():
            raise DeviceError(
                f"{gpu.key}: CUDA shows no GPU to this process: check the driver, torch's build "
                f"({torch.__version__}) and CUDA_VISIBLE_DEVICES"
            )
        self.torch_device = torch.device("cuda", 0)
        properties = torch.cuda.get_device_properties(0)
        self.name: str = properties.name
        check_identity(gpu, properties.name, properties.total_memory)
        self._nvml = Nvml.of(str(properties.uuid))
        # Before the context exists, everything in use is somebody else's.
        self._foreign_bytes = self._settled_use()
        torch.zeros(1, device=self.torch_device)  # makes the context
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(0)
        self.memory_limit_bytes = _limit(free, total, memory_cap_bytes)
        torch.cuda.set_per_process_memory_fraction(self.memory_limit_bytes / total, 0)
        self.allocator: str | None = next(
            (os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ), ""
        )
        versions = {
            "cuda": torch.version.cuda,
            "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
            "driver": None if self._nvml is None else self._nvml.driver_version,
        }
        self.versions = {name: text for name, text in versions.items() if text is not None}

    def settle(self) -> None:
        """Gives what earlier probes left cached back to the driver."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def measure_memory(
        self, step: Callable[[], object], *, steps: int, already_live: list[torch.Tensor]
    ) -> MemoryReading:
        """Peaks of PyTorch's allocator over so many steps; it knows what was live before.

        Raises:
            torch.OutOfMemoryError: they do not fit; libraries raise other errors for it.
        """
        del already_live
        torch.cuda.reset_peak_memory_stats()
        retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        used = None if self._nvml is None else self._nvml.used_memory_bytes()
        foreign = self._foreign_bytes
        mine = None if used is None or foreign is None else used - foreign
        overhead = None if mine is None else max(0, mine - torch.cuda.memory_reserved())
        return MemoryReading(
            peak_allocated_bytes=torch.cuda.max_memory_allocated(),
            peak_reserved_bytes=torch.cuda.max_memory_reserved(),
            allocator_retries=stats.get("num_alloc_retries", 0) - retries,
            overhead_bytes=overhead,
            foreign_bytes=foreign,
        )

    def step_seconds(self, step: Callable[[], object]) -> float:
        """Duration of one step, from an idle GPU to an idle GPU."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        step()
        torch.cuda.synchronize()
        return time.perf_counter() - started

    def reading(self) -> DeviceReading | None:
        """What NVML reads now; None without NVML."""
        return None if self._nvml is None else self._nvml.reading()

    def energy_joules(self) -> float | None:
        """NVML's counter; None without NVML or on a GPU that has none."""
        return None if self._nvml is None else self._nvml.energy_joules()

    def _settled_use(self) -> int | None:
        """Device memory in use once it no longer falls; None without NVML."""
        if self._nvml is None:
            return None
        return settled(self._nvml.used_memory_bytes, time.monotonic, time.sleep)


def settled(
    used_bytes: Callable[[], int | None],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> int | None:
    """The reading of a gauge once it stops falling, or after a while; None if it reads nothing."""
    latest, deadline = used_bytes(), clock() + SETTLING_SECONDS
    while latest is not None and clock() < deadline:
        sleep(0.2)
        following = used_bytes()
        if following is None or following > latest - SETTLED_BYTES:
            return latest if following is None else min(latest, following)
        latest = following
    return latest


def check_identity(gpu: Gpu, name: str, total_bytes: int, catalog: Catalog | None = None) -> None:
    """Makes sure that a device is the catalog's GPU, by its exact name and its memory.

    Raises:
        DeviceError: it is not; one line says what it is and what to do.
    """
    expected = gpu.usable_memory_bytes
    if name in gpu.device_names and (
        expected is None or abs(total_bytes - expected) <= MEMORY_TOLERANCE * expected
    ):
        return
    try:
        known = (catalog or load_catalog()).gpu_by_device_name(name).key
        remedy = f"this is {known}: give its node the Ray resource {known!r}, not {gpu.key!r}"
    except UnknownGpuError:
        remedy = "add it to the specification's catalog (catalog: gpus:)"
    wanted = " or ".join(gpu.device_names)
    memory = "" if expected is None else f" with {expected / 2**30:.1f} GiB"
    raise DeviceError(
        f"the device is {name} with {total_bytes / 2**30:.1f} GiB, but {gpu.key} is "
        f"{wanted}{memory}: {remedy}"
    )


def _limit(free_bytes: int, total_bytes: int, cap_bytes: int | None) -> int:
    """What the allocator may reserve: what is free, or what would be on the smaller GPU."""
    if cap_bytes is None:
        return free_bytes
    overhead = total_bytes - free_bytes
    if not overhead < cap_bytes <= total_bytes:
        raise DeviceError(
            f"a GPU of {total_bytes / 2**30:.1f} GiB, {overhead / 2**30:.1f} of them taken, "
            f"cannot stand in for one of {cap_bytes / 2**30:.1f} GiB: use a larger one, with "
            "nothing else on it"
        )
    return cap_bytes - overhead
