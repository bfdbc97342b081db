"""Check of a machine before it joins a cluster: GPU, driver, memory, disk (``join-check``)."""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from gpu_catalog.catalog import Catalog
from gpu_catalog.errors import UserError
from trials.child_process.gpu_use import GpuUse, use_of_gpu
from trials.devices.identity import identity_mistake
from trials.devices.nvml import visible_device

GIB = 2**30
LEAST_FREE_SHARE = 0.9  # of a GPU's memory: the context that is asked takes some itself
LEAST_DISK_BYTES = 5 * GIB  # below it Ray refuses objects; weights from the hub take more
NO_GPU = "NVML finds no NVIDIA GPU on this machine: check the driver"


class JoinError(UserError):
    """This machine cannot do what its node declares; one line on why, with the remedy."""


def node_resources(
    keys: Sequence[str],
    catalog: Catalog,
    look: Callable[[], tuple[str, int] | None] = visible_device,
    try_gpu: Callable[[], GpuUse] = use_of_gpu,
) -> str:
    """Resources of this machine's node as JSON for ``ray start --resources``.

    Args:
        keys: keys of the catalog; this machine's GPU must be one of them.
        catalog: GPUs.
        look: returns name and memory in bytes of this machine's GPU; None without one.
        try_gpu: tries to use it.

    Raises:
        JoinError: the GPU is none of them or of no use, the disk is full, or no key is given.
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
            mistake = _full_disk() or (None if gpu.kind == "cpu" else _of_no_use(try_gpu()))
            if mistake is not None:
                raise JoinError(f"{gpu.key}: {mistake}")
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


def _of_no_use(use: GpuUse) -> str | None:
    """Reason why PyTorch cannot train on the GPU as it is now, with the remedy; None if it can."""
    if use.cuda is None:
        return (
            f"PyTorch {use.torch} is a build without CUDA: install one with CUDA "
            "(pytorch.org/get-started)"
        )
    if use.error is not None and "driver" in use.error.lower():
        return (
            f"PyTorch {use.torch} is built with CUDA {use.cuda}, which this driver does not run "
            f"({use.error}): update the driver, or install PyTorch for the driver's CUDA"
        )
    if use.error is not None:
        return (
            f"PyTorch {use.torch} with CUDA {use.cuda} runs no product in fp32 and bf16 on it "
            f"({use.error}): look at nvidia-smi, and install a PyTorch that has its architecture"
        )
    if use.free_bytes is None or use.total_bytes is None:
        return None
    if use.free_bytes < LEAST_FREE_SHARE * use.total_bytes:
        return (
            f"other processes hold {(use.total_bytes - use.free_bytes) / GIB:.1f} of its "
            f"{use.total_bytes / GIB:.1f} GiB: end them (nvidia-smi lists them)"
        )
    return None


def _full_disk() -> str | None:
    """Reason why the disk that weights are downloaded to is too full; None if it is not."""
    folder = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free >= LEAST_DISK_BYTES:
        return None
    return (
        f"{folder} has {free / GIB:.1f} GiB free, and needs {LEAST_DISK_BYTES / GIB:.0f} and the "
        "weights: free some, or set HF_HOME to a larger disk"
    )
