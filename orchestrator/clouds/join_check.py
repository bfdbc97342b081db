"""Check of a machine's GPU before it joins a cluster: ``join-check``."""

import json
from collections.abc import Callable, Sequence

from gpu_catalog.catalog import Catalog
from gpu_catalog.errors import UserError
from trials.devices.identity import identity_mistake
from trials.devices.nvml import visible_device


class JoinError(UserError):
    """This machine's GPU is not the one that its node declares; one line on why."""


def node_resources(
    keys: Sequence[str],
    catalog: Catalog,
    look: Callable[[], tuple[str, int] | None] = visible_device,
) -> str:
    """Resources of this machine's node as JSON for ``ray start --resources``.

    Args:
        keys: keys of the catalog; this machine's GPU must be one of them.
        catalog: GPUs.
        look: returns name and memory in bytes of this machine's GPU; None without one.

    Raises:
        JoinError: the GPU is none of them, or no key is given.
        UnknownGpuError: a key is not in the catalog.
    """
    if not keys:
        raise JoinError("join-check: no key: give one of 'catalog gpus'")
    mistakes = []
    for gpu in [catalog.gpu(key) for key in keys]:
        mistake = None if gpu.kind == "cpu" else _mistake(gpu.key, catalog, look())
        if mistake is None:
            return json.dumps({gpu.key: 1})
        mistakes.append(mistake)
    raise JoinError(mistakes[0] if len(mistakes) == 1 else _no_match_text(keys, look()))


def _mistake(key: str, catalog: Catalog, device: tuple[str, int] | None) -> str | None:
    if device is None:
        return f"{key}: NVML finds no NVIDIA GPU on this machine: check the driver (nvidia-smi)"
    name, total_bytes = device
    return identity_mistake(catalog.gpu(key), name, total_bytes, catalog)


def _no_match_text(keys: Sequence[str], device: tuple[str, int] | None) -> str:
    if device is None:
        return f"{', '.join(keys)}: NVML finds no NVIDIA GPU on this machine: check the driver"
    name, total_bytes = device
    return (
        f"the device is {name} with {total_bytes / 2**30:.1f} GiB, but this cluster measures on "
        f"{', '.join(keys)}"
    )
