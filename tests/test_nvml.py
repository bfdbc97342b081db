"""NVML's readings by a library made up for it: what it says, and what it does not support."""

from types import SimpleNamespace

import pytest

from trials.devices.nvml import Nvml
from trials.observation import DeviceReading


class NVMLError(Exception):
    """As pynvml raises for what a GPU or driver does not support."""


def unsupported(*_: object) -> object:
    """What a GPU answers to what it does not have."""
    raise NVMLError("Not Supported")


def library(**changed: object) -> SimpleNamespace:
    """A pynvml whose one GPU is busy, warm and held down by its power cap."""
    values: dict[str, object] = {
        "NVMLError": NVMLError,
        "NVML_CLOCK_SM": 1,
        "NVML_CLOCK_MEM": 2,
        "NVML_TEMPERATURE_GPU": 0,
        "nvmlClocksEventReasonGpuIdle": 1,
        "nvmlClocksEventReasonSwPowerCap": 4,
        "nvmlClocksThrottleReasonSwPowerCap": 4,
        "nvmlClocksThrottleReasonHwSlowdown": 8,
        "nvmlClocksThrottleReasonAll": 13,
        "nvmlDeviceGetClockInfo": lambda _, kind: {1: 1980, 2: 3201}[kind],
        "nvmlDeviceGetTemperature": lambda *_: 61,
        "nvmlDeviceGetPowerUsage": lambda _: 698_500,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda _: 4,
        "nvmlDeviceGetCurrentClocksThrottleReasons": unsupported,
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(used=12345),
        "nvmlDeviceGetTotalEnergyConsumption": lambda _: 1_500,
        "nvmlSystemGetDriverVersion": lambda: "580.1",
    }
    return SimpleNamespace(**(values | changed))


def nvml(**changed: object) -> Nvml:
    """The GPU of that library."""
    return Nvml(library(**changed), object())  # type: ignore[arg-type]


def test_a_reading_has_clocks_temperature_power_and_what_holds_the_clocks_down() -> None:
    """In the units of the record."""
    assert nvml().reading() == DeviceReading(
        sm_clock_mhz=1980,
        memory_clock_mhz=3201,
        temperature_celsius=61,
        power_watts=698.5,
        throttle_reasons=("SwPowerCap",),
        used_memory_bytes=12345,
    )


def test_an_idle_gpu_is_not_throttled() -> None:
    """Clocks that nobody needs are down for no reason that matters."""
    idle = nvml(nvmlDeviceGetCurrentClocksEventReasons=lambda _: 1)
    assert idle.reading().throttle_reasons == ()


def test_an_older_driver_is_asked_under_the_older_name() -> None:
    """The reasons were called otherwise before."""
    older = nvml(
        nvmlDeviceGetCurrentClocksEventReasons=unsupported,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: 8 | 4,
    )
    assert older.reading().throttle_reasons == ("HwSlowdown", "SwPowerCap")


def test_energy_is_in_joules_and_the_driver_has_its_version() -> None:
    """NVML counts millijoules; older libraries give bytes."""
    assert nvml().energy_joules() == 1.5
    assert nvml().driver_version == "580.1"
    assert nvml(nvmlSystemGetDriverVersion=lambda: b"470.2").driver_version == "470.2"


def test_what_a_gpu_does_not_support_is_absent() -> None:
    """Never an error, never a zero."""
    names = [name for name in vars(library()) if name.startswith(("nvmlDevice", "nvmlSystem"))]
    mute = nvml(**dict.fromkeys(names, unsupported))
    assert mute.reading() == DeviceReading()
    assert mute.energy_joules() is None
    assert mute.driver_version is None
    assert mute.used_memory_bytes() is None


def test_a_machine_without_nvml_has_nothing_to_ask() -> None:
    """The library is there, the driver is not."""
    assert Nvml.of("no-such-gpu") is None


@pytest.mark.parametrize("missing", ["nvmlDeviceGetTotalEnergyConsumption"])
def test_a_library_too_old_to_know_a_question_is_no_error(missing: str) -> None:
    """As what is not supported."""
    old = library()
    delattr(old, missing)
    assert Nvml(old, object()).energy_joules() is None  # type: ignore[arg-type]
