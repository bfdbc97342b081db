"""A machine joins a cluster only with the GPU that its node declares."""

import datetime as dt
import http.server
import json
import os
import re
import threading
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_catalog.catalog import UnknownGpuError, load_catalog
from orchestrator.cli.main import main
from orchestrator.clouds import join_check
from orchestrator.clouds.join_check import JoinError, clock_mistake, node_resources
from trials.child_process.gpu_use import GpuUse, use_of_gpu
from trials.devices.nvml import visible_devices

CATALOG = load_catalog()
WORKS = GpuUse(torch="2.9", cuda="12.8", free_bytes=84 * 10**9, total_bytes=85 * 10**9)
H100 = ("NVIDIA H100 80GB HBM3", 85_020_639_232)


def test_a_machine_that_is_what_its_key_says_may_join() -> None:
    """Memory differs a little between drivers; a CPU needs no GPU."""
    assert node_resources(["H100-SXM"], CATALOG, lambda: [H100], lambda: WORKS) == '{"H100-SXM": 1}'
    assert (
        node_resources(["A40", "H100-SXM"], CATALOG, lambda: [H100], lambda: WORKS)
        == '{"H100-SXM": 1}'
    )
    a_little_more = (H100[0], H100[1] + 2**29)
    assert (
        node_resources(["H100-SXM"], CATALOG, lambda: [a_little_more], lambda: WORKS)
        == '{"H100-SXM": 1}'
    )
    assert node_resources(["cpu"], CATALOG, list, lambda: WORKS) == '{"cpu": 1}'


def test_a_machine_joins_with_all_its_gpus_if_they_are_of_one_kind() -> None:
    """Trials of one GPU run beside each other, or one of several has them together."""
    four = node_resources(["A40", "H100-SXM"], CATALOG, lambda: [H100] * 4, lambda: WORKS)
    assert four == '{"H100-SXM": 4}'
    mixed = [H100, ("NVIDIA A40", 47_608_496_128), H100]
    message = r"H100-SXM: this machine also has NVIDIA A40: set CUDA_VISIBLE_DEVICES to"
    with pytest.raises(JoinError, match=message):
        node_resources(["A40", "H100-SXM"], CATALOG, lambda: mixed, lambda: WORKS)


@pytest.mark.parametrize(
    ("keys", "device", "parts"),
    [
        (
            ["A40"],
            H100,
            ("NVIDIA H100 80GB HBM3", "79.2 GiB", "44.4 GiB", "'H100-SXM', not 'A40'"),
        ),
        (
            ["H100-SXM"],
            (H100[0], 40 * 2**30),
            ("40.0 GiB", "H100-SXM", "79.2 GiB", "whole one"),
        ),
        (
            ["A40", "L4"],
            H100,
            ("NVIDIA H100 80GB HBM3", "79.2 GiB", "A40, L4"),
        ),
        (
            ["A40"],
            None,
            ("A40: ", "NVML", "driver"),
        ),
        (
            ["A40", "L4"],
            None,
            ("A40, L4: ", "NVML", "driver"),
        ),
    ],
)
def test_a_machine_with_another_gpu_may_not_join(
    keys: list[str], device: tuple[str, int] | None, parts: tuple[str, ...]
) -> None:
    """Another name, another memory or no GPU: one line has the actual and the expected value."""
    with pytest.raises(JoinError) as error:
        node_resources(keys, CATALOG, lambda: [device] if device else [], lambda: WORKS)
    message = str(error.value)
    assert "\n" not in message
    assert [part for part in parts if part not in message] == []


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"cuda": None}, ("PyTorch 2.9 is a build without CUDA", "install one with CUDA")),
        (
            {"error": "The NVIDIA driver on your system is too old (found version 12020)."},
            (
                "CUDA 12.8, which this driver does not run",
                "12020",
                "update the driver to 525 or newer, ",
            ),
        ),
        (
            {"error": "CUDA error: no kernel image is available for execution on the device"},
            ("no product in fp32 and bf16", "no kernel image", "architecture"),
        ),
        ({"free_bytes": 45 * 10**9}, ("37.3 of its 79.2 GiB", "nvidia-smi")),
    ],
)
def test_a_gpu_that_pytorch_cannot_use_may_not_join(
    change: dict[str, Any], parts: tuple[str, ...]
) -> None:
    """It would fail every trial: one line says what does not work, and the remedy."""
    use = WORKS.model_copy(update=change)
    with pytest.raises(JoinError) as error:
        node_resources(["H100-SXM"], CATALOG, lambda: [H100], lambda: use)
    message = str(error.value)
    assert message.startswith("H100-SXM: ")
    assert "\n" not in message
    assert [part for part in parts if part not in message] == []


def test_a_full_disk_may_not_join(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Weights go to HF_HOME, which need not exist yet."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "none" / "yet"))
    monkeypatch.setattr(join_check, "LEAST_DISK_BYTES", 10**18)
    with pytest.raises(JoinError, match=f"cpu: {tmp_path} has .* GiB free, .* set HF_HOME"):
        node_resources(["cpu"], CATALOG, list)


def test_the_disk_has_room_for_the_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A disk that is enough without them may be too small with them."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert main(["join-check", "cpu", "--weights-gib", "0.5"]) == 0
    capsys.readouterr()
    assert main(["join-check", "cpu", "--weights-gib", "1000000"]) == 1
    assert re.search(r" needs 1\S+, of which 1e\+06 for weights: ", capsys.readouterr().err)


def test_weights_in_the_cache_need_no_more_room(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A node that joins again, or one that shares the cache, downloads only what is missing."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    blobs = tmp_path / "hub" / "models--one--two" / "blobs"
    blobs.mkdir(parents=True)
    weights = blobs / "0a1b"
    weights.touch()
    os.truncate(weights, 2**42)  # 4,096 GiB without a block of the disk
    assert main(["join-check", "cpu", "--weights-gib", "4000"]) == 0
    capsys.readouterr()
    assert main(["join-check", "cpu", "--weights-gib", "1000000"]) == 1
    assert " of which 995904 for weights: " in capsys.readouterr().err


class Clock(http.server.BaseHTTPRequestHandler):
    """An agent of Ray that refuses everybody, whose clock is a minute fast."""

    def do_HEAD(self) -> None:
        self.send_error(401)

    def date_time_string(self, timestamp: float | None = None) -> str:
        del timestamp
        return super().date_time_string(time.time() + 60)

    def log_request(self, *_: object) -> None:
        """Log nothing."""

    def log_error(self, *_: object) -> None:
        """Log nothing."""


def test_a_clock_that_differs_from_the_heads_may_not_join() -> None:
    """The head's agent has a date even for whom it refuses; a head without one is no reason."""
    now = lambda: dt.datetime.now(dt.UTC)  # noqa: E731
    with http.server.HTTPServer(("127.0.0.1", 0), Clock) as head:
        threading.Thread(target=head.serve_forever, daemon=True).start()
        port = head.server_port
        mistake = clock_mistake("127.0.0.1", now, port)
        assert clock_mistake("127.0.0.1", lambda: now() + dt.timedelta(minutes=1), port) is None
        head.shutdown()
    assert mistake is not None
    assert re.match(r"the clock .* is (59|60|61) s behind .*127\.0\.0\.1.*timedatectl", mistake)
    assert clock_mistake("127.0.0.1", now, port) is None


def test_the_gpu_is_tried_in_a_process_of_its_own() -> None:
    """Its answer is this machine's own; the parent imports no PyTorch for it."""
    use = use_of_gpu()
    assert use.torch == metadata.version("torch")
    assert use.error is None or "\n" not in use.error


def test_a_failed_check_exits_with_1_and_prints_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status keeps `ray start` from running after it."""
    assert main(["join-check", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out) == {"cpu": 1}
    assert main(["join-check", "A41"]) == 1
    assert capsys.readouterr().err.startswith("unknown GPU 'A41'")
    assert main(["join-check", ","]) == 1
    assert capsys.readouterr().err.startswith("join-check: no key")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["join-check", "A40"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1


def test_an_unknown_key_does_not_pass() -> None:
    """A mistyped key must not join."""
    with pytest.raises(UnknownGpuError):
        node_resources(["H100"], CATALOG, lambda: [H100], lambda: WORKS)


class NVMLError(Exception):
    """The error that pynvml raises."""


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
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetName=named,
        nvmlDeviceGetMemoryInfo=memory,
    )


def test_nvml_gives_the_memory_that_cuda_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of each visible GPU, less what the driver reserves, where that is known."""
    for shown in ("1", "GPU-abc,GPU-def"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        assert visible_devices(library()) == [H100]
    old = visible_devices(library(with_version_2=False))
    assert node_resources(["H100-SXM"], CATALOG, lambda: old, lambda: WORKS) == '{"H100-SXM": 1}'
    for hidden in ("0", "", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert visible_devices(library()) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-abc,0,1")  # CUDA stops at what is no GPU
    assert visible_devices(library()) == [H100, H100]
