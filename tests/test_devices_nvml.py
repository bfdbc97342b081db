"""NVML readings from a fake library, including what a GPU or driver does not support."""

from types import SimpleNamespace

import pytest

from trials.devices.nvml import Neighbours, Nvml
from trials.records.observation import DeviceReading


class NVMLError(Exception):
    """The error that pynvml raises for unsupported calls."""


def unsupported(*_: object, **__: object) -> object:
    """Raise the error of an unsupported call."""
    raise NVMLError("Not Supported")


def memory(_: object, version: int | None = None) -> SimpleNamespace:
    """Memory of a GPU whose driver reserves 615 MiB; only version 2 reports the reserve."""
    if version is None:
        return SimpleNamespace(total=143771, free=142156, used=1615)
    return SimpleNamespace(total=143771, free=142156, reserved=615, used=1000)


def reserved_in_used(handle: object, version: int | None = None) -> SimpleNamespace:
    """Version 2 of a driver of 2022: the reserve counts as used."""
    info = memory(handle, version)
    info.used = 1615
    return info


def without_version_2(handle: object, version: int | None = None) -> SimpleNamespace:
    """Memory info of a driver before 510, without version 2."""
    if version is not None:
        unsupported()
    return memory(handle)


def library(**changed: object) -> SimpleNamespace:
    """A fake pynvml whose one GPU is busy, warm and throttled by its power cap."""
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
        "nvmlMemory_v2": 2,
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": unsupported,
        "nvmlDeviceGetTotalEnergyConsumption": lambda _: 1_500,
        "nvmlSystemGetDriverVersion": lambda: "580.1",
    }
    return SimpleNamespace(**(values | changed))


def nvml(**changed: object) -> Nvml:
    """The GPU of the fake library."""
    return Nvml(library(**changed), object())  # type: ignore[arg-type]


def test_a_reading_has_clocks_temperature_power_and_throttle_reasons() -> None:
    """A reading is converted to the units of the record."""
    assert nvml().reading() == DeviceReading(
        sm_clock_mhz=1980,
        memory_clock_mhz=3201,
        temperature_celsius=61,
        power_watts=698.5,
        throttle_reasons=("SwPowerCap",),
        used_memory_bytes=1000,
    )


def test_an_idle_gpu_is_not_throttled() -> None:
    """Idling lowers the clocks but is no throttle reason."""
    idle = nvml(nvmlDeviceGetCurrentClocksEventReasons=lambda _: 1)
    assert idle.reading().throttle_reasons == ()


def test_throttle_reasons_of_an_older_driver_are_read_by_their_older_name() -> None:
    """Older drivers call the event reasons throttle reasons."""
    older = nvml(
        nvmlDeviceGetCurrentClocksEventReasons=unsupported,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: 8 | 4,
    )
    assert older.reading().throttle_reasons == ("HwSlowdown", "SwPowerCap")


def test_energy_is_in_joules_and_the_driver_version_is_text() -> None:
    """NVML counts millijoules; older libraries return the version as bytes."""
    assert nvml().energy_joules() == 1.5
    assert nvml().driver_version == "580.1"
    assert nvml(nvmlSystemGetDriverVersion=lambda: b"470.2").driver_version == "470.2"


def test_unsupported_readings_are_absent() -> None:
    """An unsupported reading is None: neither an error nor a zero."""
    names = [name for name in vars(library()) if name.startswith(("nvmlDevice", "nvmlSystem"))]
    mute = nvml(**dict.fromkeys(names, unsupported))
    assert mute.reading() == DeviceReading()
    assert mute.energy_joules() is None
    assert mute.driver_version is None
    assert mute.used_memory_bytes() is None
    assert mute.process_bytes() == {}


@pytest.mark.parametrize(
    ("answer", "used"), [(memory, 1000), (reserved_in_used, 1000), (without_version_2, 1615)]
)
def test_the_drivers_reserve_is_not_used_memory(answer: object, used: int) -> None:
    """The reserve would look like another process; only old drivers cannot separate it."""
    assert nvml(nvmlDeviceGetMemoryInfo=answer).used_memory_bytes() == used


@pytest.mark.parametrize("prefix", ["GPU-", "MIG-"])
def test_the_gpu_is_found_by_torchs_uuid(prefix: str) -> None:
    """Torch's UUID lacks NVML's prefix."""
    handles = {f"{prefix}8932": "handle"}

    def handle(uuid: str) -> str:
        return handles.get(uuid) or str(unsupported())

    nvml_gpu = Nvml.of("8932", library(nvmlDeviceGetHandleByUUID=handle))  # type: ignore[arg-type]
    assert nvml_gpu is not None
    assert nvml_gpu.driver_version == "580.1"


def test_a_gpu_unknown_to_nvml_has_no_readings() -> None:
    """NVML is absent for a UUID that it does not list."""
    assert Nvml.of("8932", library()) is None  # type: ignore[arg-type]


class Processes:
    """Processes of a GPU as NVML lists them: bytes by process id."""

    def __init__(self, **held: int | None) -> None:
        self.held = held

    def listed(self, _: object) -> list[SimpleNamespace]:
        """Processes in pynvml's form."""
        return [
            SimpleNamespace(pid=int(name[1:]), usedGpuMemory=held)
            for name, held in self.held.items()
        ]


def test_memory_of_other_processes_follows_their_coming_and_going() -> None:
    """The process that appeared with the CUDA context is this one, whatever id NVML gives it."""
    gpu = Processes(p1=300, p2=None)
    others = Neighbours(nvml(nvmlDeviceGetComputeRunningProcesses=gpu.listed), 350)
    assert others.held_bytes() == 350
    gpu.held |= {"p77": 500}
    others.context_made()
    assert others.held_bytes() == 350
    gpu.held |= {"p78": 1000, "p77": 9000}
    assert others.held_bytes() == 1350
    del gpu.held["p1"]
    assert others.held_bytes() == 1050


def test_without_a_process_list_the_memory_used_at_the_start_counts_as_others() -> None:
    """Many containers list no processes."""
    others = Neighbours(nvml(nvmlDeviceGetComputeRunningProcesses=unsupported), 350)
    others.context_made()
    assert others.held_bytes() == 350


def test_two_processes_that_appear_together_are_not_attributed() -> None:
    """Either of the two may be this process, so neither counts as another."""
    gpu = Processes()
    others = Neighbours(nvml(nvmlDeviceGetComputeRunningProcesses=gpu.listed), 0)
    gpu.held = {"p77": 500, "p78": 500}
    others.context_made()
    assert others.held_bytes() == 0


def test_a_machine_without_nvml_has_no_readings() -> None:
    """The library is installed, the driver is not."""
    assert Nvml.of("no-such-gpu") is None


@pytest.mark.parametrize("missing", ["nvmlDeviceGetTotalEnergyConsumption"])
def test_a_function_missing_in_an_older_library_is_no_error(missing: str) -> None:
    """A missing function reads as unsupported."""
    old = library()
    delattr(old, missing)
    assert Nvml(old, object()).energy_joules() is None  # type: ignore[arg-type]
