"""Identity of a device: whether it is the catalog's GPU, by its name and its memory."""

from gpu_catalog.catalog import Catalog, UnknownGpuError
from gpu_catalog.gpu import Gpu

# Driver and ECC setting change the memory that one GPU reports by a few percent; GPUs that share a
# name differ by a third or more (A100-PCIE-40GB and 80GB, V100 of 16 and 32 GB).
MEMORY_TOLERANCE = 0.10


def identity_mistake(gpu: Gpu, name: str, total_bytes: int, catalog: Catalog) -> str | None:
    """Reason why a device is not this GPU, with the remedy; None when it is."""
    expected = gpu.usable_memory_bytes
    named = name in gpu.device_names
    if named and (expected is None or abs(total_bytes - expected) <= MEMORY_TOLERANCE * expected):
        return None
    wanted = " or ".join(gpu.device_names)
    memory = "" if expected is None else f" with {expected / 2**30:.1f} GiB"
    remedy = "it is a part of one, or a variant that the catalog does not know: use a whole one"
    return (
        f"the device is {name} with {total_bytes / 2**30:.1f} GiB, but {gpu.key} is "
        f"{wanted}{memory}: {remedy if named else _remedy(gpu, name, catalog)}"
    )


def _remedy(gpu: Gpu, name: str, catalog: Catalog) -> str:
    """Remedy for a device of another name."""
    try:
        key = catalog.gpu_by_device_name(name).key
    except UnknownGpuError:
        return "add it to the specification's catalog (catalog: gpus:)"
    return f"this is {key}: give its node the Ray resource {key!r}, not {gpu.key!r}"
