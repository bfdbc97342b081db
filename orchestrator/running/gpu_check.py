"""The GPU of this machine, measured in minutes and without Ray: what ``make gpu-check`` runs."""

import time
from collections.abc import Callable, Sequence
from importlib import resources

from gpu_catalog.catalog import Catalog, UnknownGpuError
from gpu_catalog.errors import UserError
from gpu_catalog.gpu import Gpu
from orchestrator.planning.cluster_resources import ClusterResources, Node
from orchestrator.planning.plan import Plan
from orchestrator.spec.sweep_spec import SweepSpec
from trials.devices.nvml import visible_device
from trials.records.cell import Cell
from trials.records.observation import Observation
from trials.records.optional_packages import importable_extras

SMALLER_GPUS = ("A40", "A100-40GB-SXM")
# A probe takes longer the larger its batch: none is begun that the longest so far would not leave
# time for.
MARGIN = 1.5


class GpuCheckError(UserError):
    """There is no GPU here to check; one line on why."""


def gpu_of_this_machine(catalog: Catalog) -> Gpu:
    """The catalog's row of the GPU that CUDA shows first.

    Raises:
        GpuCheckError: there is none, or the catalog does not know it.
    """
    device = visible_device()
    if device is None:
        raise GpuCheckError("no NVIDIA GPU: NVML finds none on this machine")
    try:
        return catalog.gpu_by_device_name(device[0])
    except UnknownGpuError as error:
        raise GpuCheckError(f"{error}") from None


def this_machines_device(catalog: Catalog) -> Gpu:
    """The catalog's row of this machine's GPU; of its CPU where it has none.

    Raises:
        GpuCheckError: the catalog does not know its GPU.
    """
    return catalog.gpu("cpu") if visible_device() is None else gpu_of_this_machine(catalog)


def gpu_check_spec_text(gpu: Gpu, catalog: Catalog) -> str:
    """The specification of the check on this GPU."""
    template = resources.files("orchestrator.spec") / "shipped" / "gpu-check.template"
    smaller = [
        key
        for key in SMALLER_GPUS
        if (catalog.gpu(key).usable_memory_bytes or 0) < (gpu.usable_memory_bytes or 0)
    ]
    text = template.read_text(encoding="utf-8")
    return text.format(gpu=gpu.key, as_if=", ".join(smaller))


def machine_with(gpu: Gpu, cores: int) -> ClusterResources:
    """This machine as the one node of a cluster."""
    return ClusterResources((Node({"CPU": float(cores), gpu.key: 1.0}, importable_extras()),))


def in_order_of_value(spec: SweepSpec, plan: Plan) -> list[Cell]:
    """The cells to measure: each once in the first recipe to be had, shortest length first.

    What the GPU does itself comes before what it does in the place of a smaller one.
    """
    possible = {*plan.pending, *plan.complete}
    chosen: dict[tuple[object, ...], Cell] = {}
    for cell in spec.all_cells():
        if cell in possible:
            what = (cell.gpu, cell.capped_on, cell.model, cell.active_experts, cell.seq_len)
            chosen.setdefault(what, cell)
    pending = [cell for cell in chosen.values() if cell in plan.pending]
    return sorted(pending, key=lambda cell: (cell.seq_len, cell.capped_on is not None))


def time_is_left(
    seconds: float,
    observed: Sequence[Observation],
    clock: Callable[[], float] = time.monotonic,
) -> Callable[[], bool]:
    """Tells, from now on, whether another probe can be begun within so many seconds.

    Args:
        seconds: for everything.
        observed: a list that grows as probes end; the longest of them is what the next may take.
        clock: seconds, monotonic.
    """
    end = clock() + seconds

    def keep_going() -> bool:
        longest = max((o.seconds for o in observed), default=0.0)
        return clock() + MARGIN * longest < end

    return keep_going
