"""NVML's readings by a library made up for it: what it says, and what it does not support."""

from types import SimpleNamespace

import pytest

from trials.devices.nvml import Neighbours, Nvml
from trials.records.observation import DeviceReading


class NVMLError(Exception):
    """As pynvml raises for what a GPU or driver does not support."""


def unsupported(*_: object, **__: object) -> object:
    """What a GPU answers to what it does not have."""
    raise NVMLError("Not Supported")


def memory(_: object, version: int | None = None) -> SimpleNamespace:
    """615 MiB that the driver keeps for itself, which only the newer question tells apart."""
    if version is None:
        return SimpleNamespace(total=143771, free=142156, used=1615)
    return SimpleNamespace(total=143771, free=142156, reserved=615, used=1000)


def reserved_in_used(handle: object, version: int | None = None) -> SimpleNamespace:
    """The same as told by a driver of 2022, by its manual."""
    told = memory(handle, version)
    told.used = 1615
    return told


def without_version_2(handle: object, version: int | None = None) -> SimpleNamespace:
    """Before driver 510."""
    if version is not None:
        unsupported()
    return memory(handle)


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
        "nvmlMemory_v2": 2,
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": unsupported,
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
        used_memory_bytes=1000,
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
    assert mute.process_bytes() == {}


@pytest.mark.parametrize(
    ("answer", "used"), [(memory, 1000), (reserved_in_used, 1000), (without_version_2, 1615)]
)
def test_what_the_driver_keeps_is_in_use_by_nobody(answer: object, used: int) -> None:
    """It would look like another process; only old drivers cannot tell it apart."""
    assert nvml(nvmlDeviceGetMemoryInfo=answer).used_memory_bytes() == used


@pytest.mark.parametrize("prefix", ["GPU-", "MIG-"])
def test_the_gpu_is_found_by_the_uuid_that_torch_tells(prefix: str) -> None:
    """Which lacks NVML's prefix."""
    known = {f"{prefix}8932": "handle"}

    def handle(uuid: str) -> str:
        return known.get(uuid) or str(unsupported())

    found = Nvml.of("8932", library(nvmlDeviceGetHandleByUUID=handle))  # type: ignore[arg-type]
    assert found is not None
    assert found.driver_version == "580.1"


def test_a_gpu_that_nvml_does_not_know_has_nothing_to_ask() -> None:
    """As where there is no NVML."""
    assert Nvml.of("8932", library()) is None  # type: ignore[arg-type]


class Processes:
    """What NVML lists of a GPU's processes, as the test sets it: process id and bytes."""

    def __init__(self, **held: int | None) -> None:
        self.held = held

    def listed(self, _: object) -> list[SimpleNamespace]:
        """In pynvml's form."""
        return [
            SimpleNamespace(pid=int(name[1:]), usedGpuMemory=held)
            for name, held in self.held.items()
        ]


def test_other_processes_are_told_from_this_one_as_they_come_and_go() -> None:
    """This one is the one that came with its CUDA context, whatever its id is to NVML."""
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


def test_others_are_what_was_in_use_at_first_where_processes_are_not_listed() -> None:
    """As in many containers."""
    others = Neighbours(nvml(nvmlDeviceGetComputeRunningProcesses=unsupported), 350)
    others.context_made()
    assert others.held_bytes() == 350


def test_nobody_is_told_from_this_process_where_another_came_with_it() -> None:
    """Either may be this one."""
    gpu = Processes()
    others = Neighbours(nvml(nvmlDeviceGetComputeRunningProcesses=gpu.listed), 0)
    gpu.held = {"p77": 500, "p78": 500}
    others.context_made()
    assert others.held_bytes() == 0


def test_a_machine_without_nvml_has_nothing_to_ask() -> None:
    """The library is there, the driver is not."""
    assert Nvml.of("no-such-gpu") is None


@pytest.mark.parametrize("missing", ["nvmlDeviceGetTotalEnergyConsumption"])
def test_a_library_too_old_to_know_a_question_is_no_error(missing: str) -> None:
    """As what is not supported."""
    old = library()
    delattr(old, missing)
    assert Nvml(old, object()).energy_joules() is None  # type: ignore[arg-type]
