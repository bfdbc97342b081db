"""An NVIDIA GPU as a device: PyTorch's allocator counts its memory, NVML reads its sensors."""

import gc
import os
import time
from collections.abc import Callable, Mapping

import torch

from gpu_catalog.catalog import Catalog, load_catalog
from gpu_catalog.gpu import Gpu
from trials.devices.device import DeviceError
from trials.devices.identity import identity_mistake
from trials.devices.nvml import Neighbours, Nvml
from trials.records.failure_classification import classify
from trials.records.observation import DeviceReading, MemoryReading, Outcome

# A killed process's memory comes back a moment after it is gone: so long at most, and when it has
# not fallen for so long it is a living one's. As little as this is nobody's.
SETTLING_SECONDS = 5.0
SETTLED_SECONDS = 1.0
SETTLED_BYTES = 64 * 2**20
# Torch takes some settings from the one and some from the other where both are set.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class GpuTakenError(RuntimeError):
    """Other processes leave no room on the GPU. That says nothing of a batch, and it may pass."""


class CudaDevice:
    """Runs steps on the first GPU that CUDA shows to this process. Made once in a process.

    ``memory_limit_bytes`` is what PyTorch's allocator can reserve: what CUDA has free once its
    context and cuBLAS have theirs, as in any training process. Under a cap, what they take on this
    GPU is taken off it, as they would take it on the smaller one; what others hold here is not.
    Kernels are loaded, and take device memory, as they are first used: these some more MiB are in
    neither, but in the readings' ``overhead_bytes``.

    Args:
        gpu: the catalog row of the GPU it must be.
        memory_cap_bytes: usable memory of a smaller GPU it stands in for.

    Raises:
        DeviceError: there is no GPU, or another one.
        GpuTakenError: it is, and is full.
    """

    def __init__(self, gpu: Gpu, *, memory_cap_bytes: int | None) -> None:
        _require_cuda(gpu)
        self.torch_device = torch.device("cuda", 0)
        properties = torch.cuda.get_device_properties(0)
        self.name: str = properties.name
        check_identity(gpu, properties.name, properties.total_memory)
        self._nvml = Nvml.of(str(properties.uuid))
        self._neighbours = self._found_neighbours()
        self._enter(gpu)
        self.memory_limit_bytes = self._limit_allocator(memory_cap_bytes)
        self.allocator: str | None = allocator_settings(os.environ)
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        versions = {
            "cuda": torch.version.cuda,
            "cudnn": None if cudnn is None else str(cudnn),
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
        foreign = None if self._neighbours is None else self._neighbours.held_bytes()
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

    def _found_neighbours(self) -> Neighbours | None:
        """None where NVML does not tell."""
        if self._nvml is None:
            return None
        used = settled(self._nvml.used_memory_bytes, time.monotonic, time.sleep)
        return None if used is None else Neighbours(self._nvml, used)

    def _enter(self, gpu: Gpu) -> None:
        """Makes this process's CUDA context."""
        try:
            self._make_context()
        except RuntimeError as error:
            if classify(error)[0] is not Outcome.OUT_OF_MEMORY:
                raise
            held = self._neighbours
            others = "something" if held is None else f"{held.held_bytes() / 2**30:.1f} GiB"
            # Not chained: what it came from would be told as a batch that does not fit.
            raise GpuTakenError(
                f"{gpu.key}: other processes hold {others} of the GPU and leave no room: end them"
            ) from None
        if self._neighbours is not None:
            self._neighbours.context_made()

    def _make_context(self) -> None:
        small = torch.ones(64, 64, device=self.torch_device, dtype=torch.float16)
        small @ small  # cuBLAS takes memory for itself on its first use, and so does every step
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def _limit_allocator(self, cap_bytes: int | None) -> int:
        """Holds the allocator to what it may reserve.

        Returns:
            That many bytes.
        """
        free, total = torch.cuda.mem_get_info(0)
        foreign = 0 if self._neighbours is None else self._neighbours.held_bytes()
        # What the allocator holds already (cuBLAS's workspace) is part of what it may.
        limit = memory_limit(free + torch.cuda.memory_reserved(), total, foreign, cap_bytes)
        torch.cuda.set_per_process_memory_fraction(limit / total, 0)
        return limit


def settled(
    used_bytes: Callable[[], int | None],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> int | None:
    """The least a gauge of memory reads until it has stopped falling; None if it reads nothing.

    One that reads next to nothing is not waited for.
    """
    least = used_bytes()
    now = clock()
    fell_at, deadline = now, now + SETTLING_SECONDS
    while least is not None and least > SETTLED_BYTES:
        now = clock()
        if now >= deadline or now - fell_at >= SETTLED_SECONDS:
            break
        sleep(0.2)
        following = used_bytes()
        if following is None:
            break
        if following < least - SETTLED_BYTES:
            fell_at = clock()
        least = min(least, following)
    return least


def memory_limit(
    free_bytes: int, total_bytes: int, foreign_bytes: int, cap_bytes: int | None
) -> int:
    """What the allocator may reserve: what is free, or what would be on the smaller GPU.

    Args:
        free_bytes: free on this GPU, and what the allocator holds of it already.
        total_bytes: of this GPU.
        foreign_bytes: of other processes.
        cap_bytes: usable memory of the smaller GPU; absent if this stands in for none.

    Raises:
        DeviceError: this GPU has not as much to give.
    """
    if cap_bytes is None:
        return free_bytes
    overhead = max(0, total_bytes - free_bytes - foreign_bytes)
    if not overhead < cap_bytes <= free_bytes + overhead:
        raise DeviceError(
            f"a GPU of {total_bytes / 2**30:.1f} GiB, {foreign_bytes / 2**30:.1f} of them held by "
            f"others and {overhead / 2**30:.1f} by CUDA, cannot stand in for one of "
            f"{cap_bytes / 2**30:.1f} GiB: use a larger one, with nothing else on it"
        )
    return cap_bytes - overhead


def allocator_settings(environ: Mapping[str, str]) -> str:
    """What PyTorch's CUDA allocator was told by the environment; empty if nothing."""
    told = [environ[name] for name in ALLOCATOR_VARIABLES if environ.get(name)]
    return "; ".join(dict.fromkeys(told))


def check_identity(gpu: Gpu, name: str, total_bytes: int, catalog: Catalog | None = None) -> None:
    """Makes sure that a device is the catalog's GPU, by its exact name and its memory.

    Raises:
        DeviceError: it is not; one line says what it is and what to do.
    """
    mistake = identity_mistake(gpu, name, total_bytes, catalog or load_catalog())
    if mistake is not None:
        raise DeviceError(mistake)


def _require_cuda(gpu: Gpu) -> None:
    # Torch can tell, and libraries that fall back to the CPU when they find CUDA unusable do not.
    if torch.cuda._is_in_bad_fork():  # noqa: SLF001 - torch has no public name for it
        raise DeviceError(
            f"{gpu.key}: CUDA was touched before this process was forked and is of no use here: "
            "its parent must not import peft nor bitsandbytes, which ask the GPU as they load"
        )
    if not torch.cuda.is_available():
        raise DeviceError(
            f"{gpu.key}: CUDA shows no GPU to this process: check the driver, torch's build "
            f"({torch.__version__}) and CUDA_VISIBLE_DEVICES"
        )
