"""NVML's readings of one GPU. A reading that this GPU lacks is None, never an error.

It uses pynvml itself: nvitop's ``Device`` reads neither throttle reasons nor energy, and would be
one more package on the GPU machine.
"""

import contextlib
import importlib
import os
from types import ModuleType
from typing import Any, Self

from trials.records.observation import DeviceReading

# Reasons for a low clock that do not slow a step down: an idle GPU, or a clock that somebody set.
NO_THROTTLING = ("GpuIdle", "ApplicationsClocksSetting", "UserDefinedClocks", "DisplayClockSetting")
REASON_PREFIXES = ("nvmlClocksEventReason", "nvmlClocksThrottleReason")


class Nvml:
    """Readings of one GPU."""

    def __init__(self, library: ModuleType, handle: Any) -> None:
        self._library = library
        self._handle = handle

    @classmethod
    def of(cls, uuid: str, library: ModuleType | None = None) -> Self | None:
        """Open the GPU with this UUID; None without NVML.

        UUIDs identify GPUs in both worlds: CUDA may number them in another order, or see only some.

        Args:
            uuid: UUID as torch has it, with or without its prefix.
            library: the pynvml module; absent for the installed one.
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
        """Energy in joules drawn since the driver was loaded (Volta and later)."""
        millijoules = self._ask("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1000

    def used_memory_bytes(self) -> int | None:
        """Bytes of the whole device in use by all processes.

        It leaves out the driver's reserved memory, which CUDA does not count as memory of the GPU
        either: hundreds of MiB that would look like another process. Drivers before 510 do not
        report it separately.
        """
        try:
            return _memory(self._library, self._handle)[1]
        except self._library.NVMLError:
            return None

    def process_bytes(self) -> dict[int, int]:
        """Bytes of each process that computes on the GPU, by NVML's process id.

        Inside a container NVML lists processes by the host's ids, or not at all.
        """
        listed = self._ask("nvmlDeviceGetComputeRunningProcesses") or ()
        return {p.pid: p.usedGpuMemory for p in listed if p.usedGpuMemory is not None}

    def reading(self) -> DeviceReading:
        """Read clocks, temperature, power and the reasons for low clocks."""
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
        # The newer name first; drivers before 535 have the other one alone.
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
        """Reading of this GPU; None where the library, the driver or the GPU has none."""
        try:
            return getattr(self._library, function)(self._handle, *arguments)
        except (self._library.NVMLError, AttributeError):
            return None


class Neighbours:
    """Memory of the GPU that other processes hold.

    Memory in use before this process has a CUDA context belongs to others. Afterwards NVML's list
    of processes gives their memory, if this process is on it: it is the entry that appeared with
    the context, since its id there may differ from its own.

    Args:
        nvml: the GPU, on which this process has no context yet.
        used_bytes: memory in use on it.
    """

    def __init__(self, nvml: Nvml, used_bytes: int) -> None:
        self._nvml = nvml
        self._before = nvml.process_bytes()
        self._unlisted_bytes = used_bytes - sum(self._before.values())
        self._own: set[int] = set()

    def context_made(self) -> None:
        """Note this process's entry; to be called once it has its context."""
        self._own = self._nvml.process_bytes().keys() - self._before.keys()

    def held_bytes(self) -> int:
        """Bytes that others hold now, or held at first where NVML does not list this process."""
        listed = self._nvml.process_bytes() if len(self._own) == 1 else self._before
        others = sum(held for pid, held in listed.items() if pid not in self._own)
        return max(0, self._unlisted_bytes + others)


def visible_devices(library: ModuleType | None = None) -> list[tuple[str, int]]:
    """Name and bytes of each GPU that CUDA would show.

    It avoids torch, which would make a CUDA context.

    Args:
        library: the pynvml module; absent for the installed one.
    """
    library = library or _initialised_library()
    devices: list[tuple[str, int]] = []
    if library is None:
        return devices
    # As CUDA does, the list ends at the first entry that is no GPU.
    with contextlib.suppress(library.NVMLError):
        every = ",".join(map(str, range(library.nvmlDeviceGetCount())))
        for entry in filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",")):
            handle = (
                library.nvmlDeviceGetHandleByIndex(int(entry))
                if entry.isdigit()
                else library.nvmlDeviceGetHandleByUUID(entry)
            )
            devices.append((_text(library.nvmlDeviceGetName(handle)), _memory(library, handle)[0]))
    return devices


def visible_device() -> tuple[str, int] | None:
    """Name and bytes of the first GPU that CUDA would show; None where there is none."""
    return next(iter(visible_devices()), None)


def _memory(library: ModuleType, handle: Any) -> tuple[int, int]:
    """Bytes in total and in use, without the driver's reserved memory where it reports that."""
    with contextlib.suppress(library.NVMLError, AttributeError):
        memory = library.nvmlDeviceGetMemoryInfo(handle, version=library.nvmlMemory_v2)
        total = int(memory.total - memory.reserved)
        # Not ``used``: NVML's manuals disagree on whether it includes the reserved part.
        return total, total - int(memory.free)
    memory = library.nvmlDeviceGetMemoryInfo(handle)
    return int(memory.total), int(memory.used)


def _initialised_library() -> ModuleType | None:
    try:
        library = importlib.import_module("pynvml")  # optional on a machine without a GPU
        library.nvmlInit()
    except Exception:  # noqa: BLE001 - no library or no driver: no readings
        return None
    return library


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
