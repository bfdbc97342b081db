"""Check of this machine's GPU: measured in minutes and without Ray, for ``make gpu-check``."""

import time
from collections.abc import Callable, Sequence
from importlib import resources

from gpu_catalog.catalog import Catalog, UnknownGpuError
from gpu_catalog.errors import UserError
from gpu_catalog.gpu import Gpu
from orchestrator.planning.cluster_resources import ClusterResources, Node
from orchestrator.planning.plan import Plan
from orchestrator.spec.sweep_spec import SweepSpec, can_stand_in
from trials.devices.nvml import visible_device
from trials.recipes.optional_packages import importable_extras
from trials.records.cell import Cell
from trials.records.observation import Observation

SMALLER_GPUS = ("A40", "A100-40GB-SXM")
# A larger batch takes longer than the ones before: a probe begins only if this many times the
# longest probe until now still fits into the time.
MARGIN = 1.5


class GpuCheckError(UserError):
    """This machine has no GPU that can be checked."""


def gpu_of_this_machine(catalog: Catalog) -> Gpu:
    """Catalog row of the first GPU that CUDA shows.

    Raises:
        GpuCheckError: there is none, or the catalog lacks it.
    """
    device = visible_device()
    if device is None:
        raise GpuCheckError("no NVIDIA GPU: NVML finds none on this machine")
    try:
        return catalog.gpu_by_device_name(device[0])
    except UnknownGpuError as error:
        raise GpuCheckError(f"{error}") from None


def device_of(key: str | None, catalog: Catalog) -> Gpu:
    """Catalog row of a key, or without one that of this machine's GPU, else of its CPU.

    Raises:
        GpuCheckError: the catalog lacks this machine's GPU.
        UnknownGpuError: the catalog lacks the key.
    """
    if key is None and visible_device() is not None:
        return gpu_of_this_machine(catalog)
    return catalog.gpu(key or "cpu")


def gpu_check_spec_text(gpu: Gpu, catalog: Catalog) -> str:
    """Specification of the check of a GPU."""
    template = resources.files("orchestrator.spec") / "shipped" / "gpu-check.template"
    smaller = [key for key in SMALLER_GPUS if can_stand_in(gpu, catalog.gpu(key))]
    return template.read_text(encoding="utf-8").format(gpu=gpu.key, as_if=", ".join(smaller))


def machine_with(gpu: Gpu, cores: int) -> ClusterResources:
    """This machine as the one node of a cluster."""
    return ClusterResources((Node({"CPU": float(cores), gpu.key: 1.0}, importable_extras()),))


def in_order_of_value(spec: SweepSpec, plan: Plan) -> list[Cell]:
    """Cells to measure, by ascending sequence length.

    Of recipes that differ in kernels alone, the first possible one is measured. At one length, the
    GPU itself comes before the smaller GPUs that it stands in for. These have only the first
    possible recipe of each model.
    """
    possible = {*plan.pending, *plan.complete}
    chosen: dict[tuple[object, ...], Cell] = {}
    for cell in spec.all_cells():
        if cell in possible:
            recipe = cell.recipe.model_copy(update={"attention": None, "mamba": None})
            among = recipe if cell.capped_on is None else None
            subject = (cell.gpu, cell.capped_on, cell.model, cell.active_experts, cell.seq_len)
            chosen.setdefault((*subject, among), cell)
    pending = [cell for cell in chosen.values() if cell in plan.pending]
    return sorted(pending, key=lambda cell: (cell.seq_len, cell.capped_on is not None))


def time_is_left(
    seconds: float,
    observed: Sequence[Observation],
    clock: Callable[[], float] = time.monotonic,
) -> Callable[[], bool]:
    """Start a timer; the function that it returns says whether another probe may begin.

    Args:
        seconds: time limit of all probes, from now.
        observed: list that grows as probes end; the next may take as long as the longest.
        clock: seconds, monotonic.
    """
    end = clock() + seconds

    def keep_going() -> bool:
        longest = max((o.seconds for o in observed), default=0.0)
        return clock() + MARGIN * longest < end

    return keep_going
