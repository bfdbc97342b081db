"""Check of a machine before it joins: GPU, driver, memory, disk, clock (``join-check``)."""

import contextlib
import datetime as dt
import email.utils
import http.client
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from gpu_catalog.catalog import Catalog
from gpu_catalog.errors import UserError
from gpu_catalog.gpu import Gpu
from orchestrator.clouds.cuda_support import least_driver
from trials.child_process.gpu_use import GpuUse, use_of_gpu
from trials.devices.identity import identity_mistake
from trials.devices.nvml import visible_devices

GIB = 2**30
LEAST_FREE_SHARE = 0.9  # of a GPU's memory: the context that is asked takes some itself
LEAST_DISK_BYTES = 5 * GIB  # below it Ray refuses objects; weights from the hub take more
MOST_CLOCK_SECONDS = 30.0  # of difference: what times are compared by is minutes
# Ray's agent on every node answers HTTP here, and so with a date, also to whom it refuses.
AGENT_PORT = 52365
AGENT_SECONDS = 10.0
NO_GPU = "NVML finds no NVIDIA GPU on this machine: check the driver"


class JoinError(UserError):
    """This machine cannot do what its node declares; one line on why, with the remedy."""


def node_resources(
    keys: Sequence[str],
    catalog: Catalog,
    look: Callable[[], Sequence[tuple[str, int]]] = visible_devices,
    try_gpu: Callable[[], GpuUse] = use_of_gpu,
    weights_gib: float = 0.0,
) -> str:
    """Resources of this machine's node as JSON for ``ray start --resources``.

    Args:
        keys: keys of the catalog; this machine's GPUs must all be of one of them.
        catalog: GPUs.
        look: returns name and memory in bytes of each of this machine's GPUs.
        try_gpu: tries to use them.
        weights_gib: size of the weights that the node loads from the hub.

    Raises:
        JoinError: a GPU is none of them or of no use, the disk is full, or no key is given.
        UnknownGpuError: a key is not in the catalog.
    """
    if not keys:
        raise JoinError("join-check: no key: give one of 'catalog gpus'")
    devices, mistakes = look(), []
    device = devices[0] if devices else None
    for gpu in [catalog.gpu(key) for key in keys]:
        if gpu.kind == "cpu":
            mistake = None
        elif device is None:
            mistake = f"{gpu.key}: {NO_GPU} (nvidia-smi)"
        else:
            mistake = identity_mistake(gpu, *device, catalog)
        if mistake is None:
            mistake = _full_disk(weights_gib)
            if gpu.kind == "cuda":
                mistake = mistake or _of_two_kinds(gpu, devices, catalog) or _of_no_use(try_gpu())
            if mistake is not None:
                raise JoinError(f"{gpu.key}: {mistake}")
            return json.dumps({gpu.key: 1 if gpu.kind == "cpu" else len(devices)})
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


def _of_two_kinds(gpu: Gpu, devices: Sequence[tuple[str, int]], catalog: Catalog) -> str | None:
    """Reason why the GPUs of this machine are not those of one node; None if they are."""
    others = [name for name, size in devices if identity_mistake(gpu, name, size, catalog)]
    if not others:
        return None
    return (
        f"this machine also has {', '.join(dict.fromkeys(others))}: set CUDA_VISIBLE_DEVICES to "
        "its GPUs of one kind"
    )


def _of_no_use(use: GpuUse) -> str | None:
    """Reason why PyTorch cannot train on the GPU as it is now, with the remedy; None if it can."""
    if use.cuda is None:
        return (
            f"PyTorch {use.torch} is a build without CUDA: install one with CUDA "
            "(pytorch.org/get-started)"
        )
    if use.error is not None and "driver" in use.error.lower():
        least = least_driver(use.cuda)
        newer = "" if least is None else f" to {least} or newer"
        return (
            f"PyTorch {use.torch} is built with CUDA {use.cuda}, which this driver does not run "
            f"({use.error}): update the driver{newer}, or install PyTorch for the driver's CUDA"
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


def _full_disk(weights_gib: float) -> str | None:
    """Reason why the disk that weights are downloaded to is too full; None if it is not."""
    folder = home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    while not folder.exists():
        folder = folder.parent
    missing = max(0.0, weights_gib * GIB - _cached_bytes(home / "hub"))
    free, least = shutil.disk_usage(folder).free, LEAST_DISK_BYTES + missing
    if free >= least:
        return None
    weights = f", of which {missing / GIB:g} for weights" if weights_gib else " besides weights"
    return (
        f"{folder} has {free / GIB:.1f} GiB free, and needs {least / GIB:g}{weights}: free some, "
        "or set HF_HOME to a larger disk"
    )


def _cached_bytes(hub: Path) -> int:
    """Size of what the hub's cache has, also of other models."""
    total = 0
    for file in hub.glob("models--*/blobs/*"):
        with contextlib.suppress(OSError):  # another node moves what it has downloaded
            total += file.stat().st_size
    return total


def clock_mistake(head: str, now: Callable[[], dt.datetime], port: int = AGENT_PORT) -> str | None:
    """Reason why this machine's clock may not join, as the head of the cluster has another time.

    None too where the head gives no time: a cluster whose agents have other ports works.
    """
    connection = http.client.HTTPConnection(head, port, timeout=AGENT_SECONDS)
    try:
        connection.request("HEAD", "/")
        date = connection.getresponse().getheader("Date", "")
        heads = email.utils.parsedate_to_datetime(date)
    except (OSError, ValueError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    seconds = (now() - heads).total_seconds()
    if abs(seconds) <= MOST_CLOCK_SECONDS:
        return None
    where = "ahead of" if seconds > 0 else "behind"
    return (
        f"the clock of this machine is {abs(seconds):.0f} s {where} that of the head ({head}), and "
        f"may differ by {MOST_CLOCK_SECONDS:.0f} s: synchronise both ('timedatectl set-ntp true')"
    )
