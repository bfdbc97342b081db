"""Check of a machine's GPU before it joins a cluster: ``join-check``."""

import json
from collections.abc import Callable, Sequence

from gpu_catalog.catalog import Catalog
from gpu_catalog.errors import UserError
from trials.devices.identity import identity_mistake
from trials.devices.nvml import visible_device

NO_GPU = "NVML finds no NVIDIA GPU on this machine: check the driver"


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
    device, mistakes = look(), []
    for gpu in [catalog.gpu(key) for key in keys]:
        if gpu.kind == "cpu":
            mistake = None
        elif device is None:
            mistake = f"{gpu.key}: {NO_GPU} (nvidia-smi)"
        else:
            mistake = identity_mistake(gpu, *device, catalog)
        if mistake is None:
            return json.dumps({gpu.key: 1})
        mistakes.append(mistake)
    names = ", ".join(keys)
    if len(mistakes) == 1:
        raise JoinError(mistakes[0])
    if device is None:
        raise JoinError(f"{names}: {NO_GPU}")
    raise JoinError(
        f"the device is {device[0]} with {device[1] / 2**30:.1f} GiB, but this cluster measures "
        f"on {names}"
    )
