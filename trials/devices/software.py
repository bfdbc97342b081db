"""Software of a process, as part of the environment of its measurements."""

import contextlib
import platform
import socket
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from trials.records.observation import Environment

# Packages whose versions decide whether measurements are comparable.
STACK = (
    "bitsandbytes",
    "causal-conv1d",
    "cut-cross-entropy",
    "deepspeed",
    "flash-attn",
    "liger-kernel",
    "mamba-ssm",
    "peft",
    "torch",
    "torchao",
    "transformers",
    "triton",
    "trl",
)


def environment(
    device_versions: Mapping[str, str], device_name: str, allocator: str | None, threads: int
) -> Environment:
    """Environment of this process.

    Args:
        device_versions: versions of the device's software by name.
        device_name: name of the device by its driver.
        allocator: settings of PyTorch's CUDA allocator; None on a CPU.
        threads: CPU threads that a step may use.
    """
    versions = {"python": platform.python_version()} | dict(device_versions)
    for name in STACK:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return Environment(
        versions=tuple(sorted(versions.items())),
        device_name=device_name,
        threads=threads,
        allocator=allocator,
        host=socket.gethostname(),
    )
