"""CUDA of PyTorch on the nodes: the driver that it needs, and the GPUs that it runs on."""

from gpu_catalog.gpu import Gpu

PINNED_CUDA = "13.0"
"""CUDA that the torch of constraints.txt is built with, from the Python Package Index."""

# CUDA's release notes, "CUDA driver versions" and "deprecated and dropped features": versions of
# one major number run on the first driver of it; 13.0 dropped Maxwell, Pascal and Volta.
LEAST_DRIVERS = {"12": 525, "13": 580}
LEAST_CAPABILITIES = {"12": 5.0, "13": 7.5}


def least_driver(cuda: str) -> int | None:
    """Branch of the oldest driver that runs a version of CUDA; None where it is not known."""
    return LEAST_DRIVERS.get(cuda.partition(".")[0])


def too_old(gpu: Gpu, cuda: str = PINNED_CUDA) -> str | None:
    """Reason why a version of CUDA does not run on a GPU; None if it does, as far as is known."""
    least = LEAST_CAPABILITIES.get(cuda.partition(".")[0])
    capability = gpu.compute_capability
    if least is None or capability is None or float(capability) >= least:
        return None
    return (
        f"excluded: the pinned PyTorch is built with CUDA {cuda}, which runs on compute capability "
        f"{least} and newer; it has {capability}"
    )
