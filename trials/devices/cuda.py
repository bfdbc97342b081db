"""An NVIDIA GPU as a device: PyTorch's allocator counts its memory, NVML reads its sensors."""

import gc
import os
import time
from collections.abc import Callable, Mapping

import torch

from gpu_catalog.catalog import Catalog, load_catalog
from gpu_catalog.gpu import Gpu
from trials.devices.device import AfterStep, DeviceError, of_steps
from trials.devices.identity import identity_mistake
from trials.devices.nvml import Neighbours, Nvml
from trials.records.failure_classification import classify
from trials.records.observation import DeviceReading, MemoryReading, Outcome

# The driver releases a killed process's memory a moment after its end: at most SETTLING_SECONDS.
# Memory in use that has not fallen for SETTLED_SECONDS belongs to a living process; less than
# SETTLED_BYTES belongs to none.
SETTLING_SECONDS = 5.0
SETTLED_SECONDS = 1.0
SETTLED_BYTES = 64 * 2**20
# Where both are set, PyTorch takes some settings from either.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class GpuTakenError(RuntimeError):
    """Other processes leave no room on the GPU: no verdict on a batch, and it may pass."""


class CudaDevice:
    """Runs steps on the first GPU that CUDA shows to this process. Made once per process.

    ``memory_limit_bytes`` is the memory that PyTorch's allocator can reserve: the memory left free
    by the CUDA context and cuBLAS, as in any training process. A cap is reduced by the memory that
    these take here, since they would take it on the smaller GPU; it is not reduced by the memory of
    other processes. CUDA loads a kernel at its first use: those MiB count neither way, but are part
    of the readings' ``overhead_bytes``.

    Args:
        gpu: catalog row that the GPU must match.
        memory_cap_bytes: usable memory of the smaller GPU that this one stands in for.
        held_share: fraction of the GPU's memory that another part of the training holds.
        on_context: called once CUDA has its context, before the memory is measured.

    Raises:
        DeviceError: there is no GPU, or another one.
        GpuTakenError: other processes have filled the GPU.
    """

    def __init__(
        self,
        gpu: Gpu,
        *,
        memory_cap_bytes: int | None,
        held_share: float = 0.0,
        on_context: Callable[[], None] = lambda: None,
    ) -> None:
        _require_cuda(gpu)
        self._on_context = on_context
        self.torch_device = torch.device("cuda", 0)
        properties = torch.cuda.get_device_properties(0)
        self.name: str = properties.name
        check_identity(gpu, properties.name, properties.total_memory)
        self._nvml = Nvml.of(str(properties.uuid))
        self._neighbours = self._open_neighbours()
        self._enter(gpu)
        self.memory_limit_bytes = self._limit_allocator(memory_cap_bytes, held_share)
        self.allocator: str | None = allocator_settings(os.environ)
        self.versions = cuda_versions(self._nvml)

    def settle(self) -> None:
        """Return memory that earlier probes left cached to the driver."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def measure_memory(
        self,
        step: Callable[[], object],
        *,
        steps: int,
        already_live: list[torch.Tensor],
        after_step: AfterStep | None = None,
    ) -> MemoryReading:
        """Run steps and return the peaks of PyTorch's allocator, which counts earlier tensors too.

        Raises:
            torch.OutOfMemoryError: the steps do not fit; libraries raise other errors for it.
        """
        del already_live
        readings = []
        for _ in range(steps):
            torch.cuda.reset_peak_memory_stats()
            retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
            step()
            torch.cuda.synchronize()
            readings.append(self._memory_reading(retries))
            if after_step is not None:
                after_step(readings[-1])
        return of_steps(readings)

    def _memory_reading(self, retries: int) -> MemoryReading:
        """Peaks since they were reset, when the allocator had retried so often."""
        stats = torch.cuda.memory_stats()
        used = None if self._nvml is None else self._nvml.used_memory_bytes()
        foreign = None if self._neighbours is None else self._neighbours.held_bytes()
        own = None if used is None or foreign is None else used - foreign
        overhead = None if own is None else max(0, own - torch.cuda.memory_reserved())
        return MemoryReading(
            peak_allocated_bytes=torch.cuda.max_memory_allocated(),
            peak_reserved_bytes=torch.cuda.max_memory_reserved(),
            allocator_retries=stats.get("num_alloc_retries", 0) - retries,
            overhead_bytes=overhead,
            foreign_bytes=foreign,
        )

    def step_seconds(self, step: Callable[[], object]) -> float:
        """Duration of one step in seconds, from an idle GPU to an idle GPU."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        step()
        torch.cuda.synchronize()
        return time.perf_counter() - started

    def reading(self) -> DeviceReading | None:
        """Current readings of NVML; None without NVML."""
        return None if self._nvml is None else self._nvml.reading()

    def energy_joules(self) -> float | None:
        """NVML's energy counter in joules; None without NVML or on a GPU without a counter."""
        return None if self._nvml is None else self._nvml.energy_joules()

    def _open_neighbours(self) -> Neighbours | None:
        """Memory of other processes, before this one has a context; None where NVML reads none."""
        if self._nvml is None:
            return None
        used = settled(self._nvml.used_memory_bytes, time.monotonic, time.sleep)
        return None if used is None else Neighbours(self._nvml, used)

    def _enter(self, gpu: Gpu) -> None:
        """Make this process's CUDA context."""
        try:
            self._make_context()
        except RuntimeError as error:
            if classify(error)[0] is not Outcome.OUT_OF_MEMORY:
                raise
            neighbours = self._neighbours
            held = "memory" if neighbours is None else f"{neighbours.held_bytes() / 2**30:.1f} GiB"
            # Not chained: classify() would take the cause for a batch that does not fit.
            raise GpuTakenError(
                f"{gpu.key}: other processes hold {held} of the GPU and leave no room: end them"
            ) from None
        if self._neighbours is not None:
            self._neighbours.context_made()

    def _make_context(self) -> None:
        small = torch.ones(64, 64, device=self.torch_device, dtype=torch.float16)
        small @ small  # cuBLAS allocates its handle and workspace on its first use
        self._on_context()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def _limit_allocator(self, cap_bytes: int | None, held_share: float) -> int:
        """Limit the allocator to the memory it may reserve, and return that in bytes."""
        free, total = torch.cuda.mem_get_info(0)
        foreign = 0 if self._neighbours is None else self._neighbours.held_bytes()
        # The limit includes memory that the allocator holds already (cuBLAS's workspace).
        limit = memory_limit(free + torch.cuda.memory_reserved(), total, foreign, cap_bytes)
        limit = without_share(limit, cap_bytes or total, held_share)
        torch.cuda.set_per_process_memory_fraction(limit / total, 0)
        return limit


def cuda_versions(nvml: Nvml | None) -> dict[str, str]:
    """Versions of CUDA's software by name; without the driver's where there is no NVML."""
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    versions = {
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
        "driver": None if nvml is None else nvml.driver_version,
    }
    return {name: text for name, text in versions.items() if text is not None}


def settled(
    used_bytes: Callable[[], int | None],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> int | None:
    """Wait until memory in use has stopped falling, and return its lowest reading in bytes.

    A reading of next to nothing ends the wait at once. None when there is no reading.

    Args:
        used_bytes: reads the memory in use.
        clock: monotonic time in seconds.
        sleep: waits for some seconds.
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
    """Bytes that the allocator may reserve: the free memory of this GPU or of the smaller one.

    Args:
        free_bytes: free memory of this GPU, with that held by the allocator already.
        total_bytes: memory of this GPU.
        foreign_bytes: memory of other processes.
        cap_bytes: usable memory of the smaller GPU that this one stands in for; None for none.

    Raises:
        DeviceError: this GPU has less free memory than the cap.
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


def without_share(limit_bytes: int, total_bytes: int, held_share: float) -> int:
    """Bytes of a memory limit without those that another part of the training holds.

    Args:
        limit_bytes: the limit.
        total_bytes: memory of the GPU.
        held_share: fraction of that memory which is held.

    Raises:
        DeviceError: nothing is left.
    """
    left = limit_bytes - round(held_share * total_bytes)
    if left <= 0:
        raise DeviceError(
            f"generation_share {held_share:g} of {total_bytes / 2**30:.1f} GiB leaves nothing of "
            f"the {limit_bytes / 2**30:.1f} GiB that the update may take: make it smaller"
        )
    return left


def allocator_settings(environ: Mapping[str, str]) -> str:
    """Settings of PyTorch's CUDA allocator in the environment; empty for none."""
    settings = [environ[name] for name in ALLOCATOR_VARIABLES if environ.get(name)]
    return "; ".join(dict.fromkeys(settings))


def check_identity(gpu: Gpu, name: str, total_bytes: int, catalog: Catalog | None = None) -> None:
    """Check that a device is the catalog's GPU, by its exact name and its memory.

    Raises:
        DeviceError: it is not; one line names the device and the remedy.
    """
    mistake = identity_mistake(gpu, name, total_bytes, catalog or load_catalog())
    if mistake is not None:
        raise DeviceError(mistake)


def _require_cuda(gpu: Gpu) -> None:
    # Libraries that find CUDA unusable fall back to the CPU without an error; torch reports it.
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
