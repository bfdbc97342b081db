"""NVML's readings of one GPU; a reading that this GPU does not have is None, never an error.

By pynvml itself: nvitop's ``Device`` has neither throttle reasons nor energy, and would be one more
package on the GPU machine.
"""

import contextlib
import importlib
import os
from types import ModuleType
from typing import Any, Self

from trials.records.observation import DeviceReading

# Reasons that hold no clock down that a step wants: nothing runs, or somebody set the clock.
NO_THROTTLING = ("GpuIdle", "ApplicationsClocksSetting", "UserDefinedClocks", "DisplayClockSetting")
REASON_PREFIXES = ("nvmlClocksEventReason", "nvmlClocksThrottleReason")


class Nvml:
    """One GPU as NVML sees it.

    Args:
        library: the pynvml module.
        handle: NVML's handle of the GPU.
    """

    def __init__(self, library: ModuleType, handle: Any) -> None:
        self._library = library
        self._handle = handle

    @classmethod
    def of(cls, uuid: str, library: ModuleType | None = None) -> Self | None:
        """The GPU of this UUID, as torch has it, with or without its prefix; None without NVML.

        By UUID, because CUDA may number the GPUs otherwise, or see a part of them only.
        """
        library = library or _initialised_library()
        if library is None:
            return None
        for prefix in ("GPU-", "MIG-", ""):
            with contextlib.suppress(library.NVMLError):
                return cls(library, library.nvmlDeviceGetHandleByUUID(prefix + uuid))
        return None

    @property
    def driver_version(self) -> str | None:
        """Version of the NVIDIA driver."""
        try:
            return _text(self._library.nvmlSystemGetDriverVersion())
        except self._library.NVMLError:
            return None

    def energy_joules(self) -> float | None:
        """Energy the GPU has drawn since the driver was loaded (Volta and later)."""
        millijoules = self._ask("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1000

    def used_memory_bytes(self) -> int | None:
        """Memory of the whole device in use, by every process.

        Without what the driver keeps for itself, which CUDA does not count among the GPU's memory
        either: hundreds of MiB, which would look like another process. Drivers before 510 do not
        report it apart.
        """
        try:
            return _memory(self._library, self._handle)[1]
        except self._library.NVMLError:
            return None

    def process_bytes(self) -> dict[int, int]:
        """Memory of each process that computes on the GPU, as far as NVML reports it.

        By NVML's process ids: inside a container they may be the host's, or there are none.
        """
        listed = self._ask("nvmlDeviceGetComputeRunningProcesses") or ()
        return {p.pid: p.usedGpuMemory for p in listed if p.usedGpuMemory is not None}

    def reading(self) -> DeviceReading:
        """Clocks, temperature, power, and what holds the clocks down, now."""
        library = self._library
        power = self._ask("nvmlDeviceGetPowerUsage")
        return DeviceReading(
            sm_clock_mhz=self._ask("nvmlDeviceGetClockInfo", library.NVML_CLOCK_SM),
            memory_clock_mhz=self._ask("nvmlDeviceGetClockInfo", library.NVML_CLOCK_MEM),
            temperature_celsius=self._ask("nvmlDeviceGetTemperature", library.NVML_TEMPERATURE_GPU),
            power_watts=None if power is None else power / 1000,
            throttle_reasons=self._throttle_reasons(),
            used_memory_bytes=self.used_memory_bytes(),
        )

    def _throttle_reasons(self) -> tuple[str, ...]:
        # The newer name first; drivers before 535 know the other one only.
        mask = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if mask is None:
            mask = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
        bits = {
            name.removeprefix(prefix): getattr(self._library, name)
            for prefix in REASON_PREFIXES
            for name in dir(self._library)
            if name.startswith(prefix)
        }
        holding = {name for name, bit in bits.items() if bit & mask and bit.bit_count() == 1}
        return tuple(sorted(holding.difference(NO_THROTTLING)))

    def _ask(self, function: str, *arguments: object) -> Any:
        """The answer about this GPU; None where the library, the driver or the GPU has none."""
        try:
            return getattr(self._library, function)(self._handle, *arguments)
        except (self._library.NVMLError, AttributeError):
            return None


class Neighbours:
    """The GPU's memory that other processes hold.

    What is in use before this process has a CUDA context is theirs. Later it comes from what
    NVML lists, where it lists this process: the one that came with the context, since its id there
    may be another than here.

    Args:
        nvml: the GPU, on which this process has no context yet.
        used_bytes: its memory in use.
    """

    def __init__(self, nvml: Nvml, used_bytes: int) -> None:
        self._nvml = nvml
        self._before = nvml.process_bytes()
        self._unlisted_bytes = used_bytes - sum(self._before.values())
        self._own: set[int] = set()

    def context_made(self) -> None:
        """To be called when this process has its context."""
        self._own = self._nvml.process_bytes().keys() - self._before.keys()

    def held_bytes(self) -> int:
        """What they hold now; what they held at first where NVML does not list this process."""
        listed = self._nvml.process_bytes() if len(self._own) == 1 else self._before
        others = sum(held for pid, held in listed.items() if pid not in self._own)
        return max(0, self._unlisted_bytes + others)


def visible_device(library: ModuleType | None = None) -> tuple[str, int] | None:
    """Name and memory, in bytes, of the first GPU that CUDA would show; None where there is none.

    Torch is not asked, which would make a CUDA context.

    Args:
        library: the pynvml module; absent for the one that is installed.
    """
    library = library or _initialised_library()
    if library is None:
        return None
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    try:
        handle = (
            library.nvmlDeviceGetHandleByIndex(int(first))
            if first.isdigit()
            else library.nvmlDeviceGetHandleByUUID(first)
        )
        return _text(library.nvmlDeviceGetName(handle)), _memory(library, handle)[0]
    except library.NVMLError:
        return None


def _memory(library: ModuleType, handle: Any) -> tuple[int, int]:
    """Bytes in total and in use, without what the driver keeps, where it reports that."""
    with contextlib.suppress(library.NVMLError, AttributeError):
        memory = library.nvmlDeviceGetMemoryInfo(handle, version=library.nvmlMemory_v2)
        total = int(memory.total - memory.reserved)
        # Not its ``used``: NVML's manuals disagree on whether the reserved part is in it.
        return total, total - int(memory.free)
    memory = library.nvmlDeviceGetMemoryInfo(handle)
    return int(memory.total), int(memory.used)


def _initialised_library() -> ModuleType | None:
    try:
        library = importlib.import_module("pynvml")  # a machine without a GPU need not have it
        library.nvmlInit()
    except Exception:  # noqa: BLE001 - no library, no driver: nothing to ask
        return None
    return library


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
