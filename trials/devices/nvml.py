"""What NVML says of one GPU. What it does not say of this GPU is absent, never an error."""

import contextlib
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
    def of(cls, uuid: str) -> Self | None:
        """The GPU of this UUID, as torch tells it, with or without its prefix; None without NVML.

        By UUID, because CUDA may number the GPUs otherwise, or see a part of them only.
        """
        try:
            import pynvml  # noqa: PLC0415 - a machine without a GPU need not have it

            pynvml.nvmlInit()
        except Exception:  # noqa: BLE001 - no library, no driver: nothing to ask
            return None
        for prefix in ("GPU-", "MIG-", ""):
            with contextlib.suppress(pynvml.NVMLError):
                return cls(pynvml, pynvml.nvmlDeviceGetHandleByUUID(prefix + uuid))
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
        """Memory of the whole device in use, by every process and the driver."""
        return self._ask(lambda: int(self._library.nvmlDeviceGetMemoryInfo(self._handle).used))

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


def visible_device_name() -> str | None:
    """What the first GPU that CUDA would show calls itself; None where there is none.

    Torch is not asked, which would make a CUDA context.
    """
    try:
        import pynvml  # noqa: PLC0415 - a machine without a GPU need not have it

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - no library, no driver: no GPU
        return None
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    try:
        if first.isdigit():
            return _text(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(int(first))))
        return _text(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByUUID(first)))
    except pynvml.NVMLError:
        return None


def _is_one_bit(value: object) -> bool:
    return isinstance(value, int) and value > 0 and value & (value - 1) == 0


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
