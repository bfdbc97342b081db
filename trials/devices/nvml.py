"""What NVML says of one GPU. What it does not say of this GPU is absent, never an error."""

import contextlib
import importlib
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, Self, TypeVar

from trials.observation import DeviceReading

T = TypeVar("T")
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
        """The GPU of this UUID, as torch tells it, with or without its prefix; None without NVML.

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
        """Of the NVIDIA driver."""
        return self._ask(lambda: _text(self._library.nvmlSystemGetDriverVersion()))

    def energy_joules(self) -> float | None:
        """Energy the GPU has drawn since the driver was loaded (Volta and later)."""
        millijoules = self._ask(
            lambda: self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        )
        return None if millijoules is None else millijoules / 1000

    def used_memory_bytes(self) -> int | None:
        """Memory of the whole device in use, by every process.

        Without what the driver keeps for itself, which CUDA does not count among the GPU's memory
        either: hundreds of MiB, which would look like another process. Drivers before 510 do not
        tell it apart.
        """
        library, handle = self._library, self._handle
        told_apart = self._ask(
            lambda: library.nvmlDeviceGetMemoryInfo(handle, version=library.nvmlMemory_v2)
        )
        if told_apart is not None:
            # Not its ``used``: whether that has the reserved part in it, NVML's manuals disagree.
            return int(told_apart.total - told_apart.free - told_apart.reserved)
        return self._ask(lambda: int(library.nvmlDeviceGetMemoryInfo(handle).used))

    def process_bytes(self) -> dict[int, int]:
        """Memory of each process that computes on the GPU, as far as NVML tells.

        By NVML's process ids: inside a container they may be the host's, or none be told at all.
        """
        library = self._library
        listed = self._ask(lambda: library.nvmlDeviceGetComputeRunningProcesses(self._handle))
        return {p.pid: p.usedGpuMemory for p in listed or () if p.usedGpuMemory is not None}

    def reading(self) -> DeviceReading:
        """Clocks, temperature, power, and what holds the clocks down, now."""
        library, handle = self._library, self._handle
        power = self._ask(lambda: library.nvmlDeviceGetPowerUsage(handle))
        return DeviceReading(
            sm_clock_mhz=self._ask(
                lambda: library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM)
            ),
            memory_clock_mhz=self._ask(
                lambda: library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_MEM)
            ),
            temperature_celsius=self._ask(
                lambda: library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU)
            ),
            power_watts=None if power is None else power / 1000,
            throttle_reasons=self._throttle_reasons(),
            used_memory_bytes=self.used_memory_bytes(),
        )

    def _throttle_reasons(self) -> tuple[str, ...]:
        library = self._library
        # The newer name first; older drivers and libraries know the other one only.
        mask = self._ask(lambda: library.nvmlDeviceGetCurrentClocksEventReasons(self._handle))
        if mask is None:
            mask = self._ask(
                lambda: library.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
            )
        reasons = {
            name.removeprefix(prefix)
            for prefix in REASON_PREFIXES
            for name in dir(library)
            if name.startswith(prefix) and _is_one_bit(getattr(library, name)) and mask
            if mask & getattr(library, name)
        }
        return tuple(sorted(reasons - set(NO_THROTTLING)))

    def _ask(self, question: Callable[[], T]) -> T | None:
        try:
            return question()
        except (self._library.NVMLError, AttributeError):
            return None


class Neighbours:
    """The GPU's memory that other processes hold.

    What is in use before this process has a CUDA context is theirs. Later it is told from what
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


def visible_device_name() -> str | None:
    """What the first GPU that CUDA would show calls itself; None where there is none.

    Torch is not asked, which would make a CUDA context.
    """
    seen = visible_device()
    return None if seen is None else seen[0]


def visible_device(library: ModuleType | None = None) -> tuple[str, int] | None:
    """Name and memory, in bytes, of the first GPU that CUDA would show; None where there is none.

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
        return _text(library.nvmlDeviceGetName(handle)), _usable_bytes(library, handle)
    except library.NVMLError:
        return None


def _usable_bytes(library: ModuleType, handle: Any) -> int:
    """Memory that CUDA would call the total: without what the driver keeps, where it tells."""
    with contextlib.suppress(library.NVMLError, AttributeError):
        told = library.nvmlDeviceGetMemoryInfo(handle, version=library.nvmlMemory_v2)
        return int(told.total - told.reserved)
    return int(library.nvmlDeviceGetMemoryInfo(handle).total)


def _initialised_library() -> ModuleType | None:
    try:
        library = importlib.import_module("pynvml")  # a machine without a GPU need not have it
        library.nvmlInit()
    except Exception:  # noqa: BLE001 - no library, no driver: nothing to ask
        return None
    return library


def _is_one_bit(value: object) -> bool:
    return isinstance(value, int) and value > 0 and value & (value - 1) == 0


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
