"""A machine joins a cluster only as what it is: its GPU is checked at the door."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_catalog.catalog import UnknownGpuError, load_catalog
from orchestrator.cli.main import main
from orchestrator.clouds.join_check import JoinError, node_resources
from trials.devices.nvml import visible_device

CATALOG = load_catalog()
H100 = ("NVIDIA H100 80GB HBM3", 85_020_639_232)


def test_a_machine_that_is_what_its_key_says_may_join() -> None:
    """With one of it; a little memory more or less is another driver. A CPU needs no GPU."""
    assert node_resources(["H100-SXM"], CATALOG, lambda: H100) == '{"H100-SXM": 1}'
    assert node_resources(["A40", "H100-SXM"], CATALOG, lambda: H100) == '{"H100-SXM": 1}'
    a_little_more = (H100[0], H100[1] + 2**29)
    assert node_resources(["H100-SXM"], CATALOG, lambda: a_little_more) == '{"H100-SXM": 1}'
    assert node_resources(["cpu"], CATALOG, lambda: None) == '{"cpu": 1}'


@pytest.mark.parametrize(
    ("keys", "seen", "line"),
    [
        (
            ["A40"],
            H100,
            (
                "the device is NVIDIA H100 80GB HBM3 with 79.2 GiB, but A40 is NVIDIA A40 with "
                "44.4 GiB: this is H100-SXM: give its node the Ray resource 'H100-SXM', not 'A40'"
            ),
        ),
        (
            ["H100-SXM"],
            (H100[0], 40 * 2**30),
            (
                "the device is NVIDIA H100 80GB HBM3 with 40.0 GiB, but H100-SXM is NVIDIA "
                "H100 80GB HBM3 with 79.2 GiB: it is a part of one, or a variant that the catalog "
                "does not know: use a whole one"
            ),
        ),
        (
            ["A40", "L4"],
            H100,
            (
                "the device is NVIDIA H100 80GB HBM3 with 79.2 GiB: none of A40, L4, which this "
                "cluster measures on"
            ),
        ),
        (
            ["A40"],
            None,
            "A40: NVML finds no NVIDIA GPU on this machine: check the driver (nvidia-smi)",
        ),
        (
            ["A40", "L4"],
            None,
            "A40, L4: NVML finds no NVIDIA GPU on this machine: check the driver",
        ),
    ],
)
def test_a_machine_that_is_not_may_not(
    keys: list[str], seen: tuple[str, int] | None, line: str
) -> None:
    """Another name, another memory, or no GPU: one line."""
    with pytest.raises(JoinError) as error:
        node_resources(keys, CATALOG, lambda: seen)
    assert str(error.value) == line


def test_the_check_ends_with_1_and_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that `ray start` does not come after it."""
    assert main(["join-check", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out) == {"cpu": 1}
    assert main(["join-check", "A41"]) == 1
    assert capsys.readouterr().err.startswith("unknown GPU 'A41': did you mean 'A40'")
    assert main(["join-check", ","]) == 1
    assert capsys.readouterr().err == "join-check: name a key of 'catalog gpus'\n"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["join-check", "A40"]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1


def test_an_unknown_key_is_no_check_passed() -> None:
    """A slip of the pen must not join."""
    with pytest.raises(UnknownGpuError):
        node_resources(["H100"], CATALOG, lambda: H100)


class NVMLError(Exception):
    """As pynvml raises."""


def library(*, with_version_2: bool = True) -> Any:
    """A pynvml whose second GPU is an H100, with 640 MiB that the driver keeps."""

    def memory(_: object, version: int | None = None) -> SimpleNamespace:
        if version is None:
            return SimpleNamespace(total=H100[1] + 640 * 2**20, used=0)
        if not with_version_2:
            raise NVMLError
        return SimpleNamespace(total=H100[1] + 640 * 2**20, reserved=640 * 2**20, free=H100[1])

    def named(handle: object) -> bytes:
        if handle not in {1, "GPU-abc"}:
            raise NVMLError
        return H100[0].encode()

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlMemory_v2=2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetName=named,
        nvmlDeviceGetMemoryInfo=memory,
    )


def test_nvml_tells_the_memory_that_cuda_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first GPU that is shown; without what the driver keeps, where it tells that apart."""
    for shown in ("1", "GPU-abc,GPU-def"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        assert visible_device(library()) == H100
    old = visible_device(library(with_version_2=False))
    assert old is not None
    assert node_resources(["H100-SXM"], CATALOG, lambda: old) == '{"H100-SXM": 1}'
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert visible_device(library()) is None
