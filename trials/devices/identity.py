"""Whether a device is the catalog's GPU, by what it calls itself and how much memory it has."""

from gpu_catalog.catalog import Catalog, UnknownGpuError
from gpu_catalog.gpu import Gpu

# The same GPU reports a little more or less with another driver or ECC setting; two GPUs that share
# a name differ by a third and more (A100-PCIE-40GB and 80GB, V100 of 16 and 32).
MEMORY_TOLERANCE = 0.10


def identity_mistake(gpu: Gpu, name: str, total_bytes: int, catalog: Catalog) -> str | None:
    """What is wrong with taking a device for this GPU, and what to do; None if it is the one."""
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
    """What to do about a device of another name."""
    try:
        known = catalog.gpu_by_device_name(name).key
    except UnknownGpuError:
        return "add it to the specification's catalog (catalog: gpus:)"
    return f"this is {known}: give its node the Ray resource {known!r}, not {gpu.key!r}"
