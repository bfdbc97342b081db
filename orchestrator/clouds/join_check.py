"""Whether this machine may join a cluster as a node of a GPU: what its bootstrap asks."""

import json
from collections.abc import Callable, Sequence

from gpu_catalog.catalog import Catalog
from gpu_catalog.errors import UserError
from trials.devices.identity import identity_mistake
from trials.devices.nvml import visible_device


class JoinError(UserError):
    """This machine is not what its node would say it is; one line on why."""


def node_resources(
    keys: Sequence[str],
    catalog: Catalog,
    look: Callable[[], tuple[str, int] | None] = visible_device,
) -> str:
    """The resources of this machine's node, as ``ray start --resources`` takes them.

    Args:
        keys: of the catalog; this machine must be one of them.
        catalog: GPUs.
        look: tells name and memory, in bytes, of the GPU here.

    Raises:
        JoinError: it is none of them, or none is named.
        UnknownGpuError: a key is none of the catalog's.
    """
    if not keys:
        raise JoinError("join-check: name a key of 'catalog gpus'")
    mistakes = []
    for gpu in [catalog.gpu(key) for key in keys]:
        mistake = None if gpu.kind == "cpu" else _mistake(gpu.key, catalog, look())
        if mistake is None:
            return json.dumps({gpu.key: 1})
        mistakes.append(mistake)
    raise JoinError(mistakes[0] if len(mistakes) == 1 else _of_several(keys, look()))


def _mistake(key: str, catalog: Catalog, seen: tuple[str, int] | None) -> str | None:
    if seen is None:
        return f"{key}: NVML finds no NVIDIA GPU on this machine: check the driver (nvidia-smi)"
    name, total_bytes = seen
    return identity_mistake(catalog.gpu(key), name, total_bytes, catalog)


def _of_several(keys: Sequence[str], seen: tuple[str, int] | None) -> str:
    if seen is None:
        return f"{', '.join(keys)}: NVML finds no NVIDIA GPU on this machine: check the driver"
    name, total_bytes = seen
    return (
        f"the device is {name} with {total_bytes / 2**30:.1f} GiB: none of {', '.join(keys)}, "
        "which this cluster measures on"
    )
