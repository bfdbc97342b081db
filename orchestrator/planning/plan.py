"""Plan of a sweep: cells that are complete, pending and skipped. Pure."""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

from gpu_catalog.catalog import Catalog
from gpu_catalog.gpu import Gpu
from gpu_catalog.record import Record
from orchestrator.planning.cluster_resources import ClusterResources
from orchestrator.spec.data_kinds import wrong_kind
from orchestrator.spec.job_tokens import drawn_lengths, job_of
from orchestrator.spec.sweep_spec import SweepSpec
from trials.drawn_lengths import DrawnLengths
from trials.recipes.layout_support import unmeasured, unsupported
from trials.records.cell import Cell, by_cell
from trials.records.compatibility import incompatibility
from trials.records.model import Model
from trials.records.observation import Observation
from trials.simulation.trace_request import not_simulated
from trials.trial import TrialTask, next_probe

COMPILING_SECONDS = 600.0
"""Further time of a build and of a probe whose model is compiled, before any timed step."""


class Skip(Record):
    """A cell that is not measured, with the reason."""

    cell: Cell
    reason: str


class Plan(Record):
    """Plan that a driver executes.

    Attributes:
        complete: cells that need no further observations.
        pending: cells to measure.
        skipped: cells that cannot be measured on this cluster.
        given_up: pending cells whose trials died too often, with the last cause.
    """

    complete: tuple[Cell, ...]
    pending: tuple[Cell, ...]
    skipped: tuple[Skip, ...]
    given_up: tuple[Skip, ...] = ()

    def after(self, no_node: Mapping[Cell, str], died: Mapping[Cell, str]) -> "Plan":
        """Copy of the plan with the cells that no node could measure, or whose trials ``died``."""
        unplaced = (Skip(cell=c, reason=no_node[c]) for c in self.pending if c in no_node)
        changes = {
            "pending": tuple(cell for cell in self.pending if cell not in no_node),
            "skipped": (*self.skipped, *unplaced),
            "given_up": tuple(Skip(cell=c, reason=died[c]) for c in self.pending if c in died),
        }
        return self.model_copy(update=changes)


def trial_task(
    spec: SweepSpec,
    catalog: Catalog,
    cell: Cell,
    observations: Sequence[Observation],
    *,
    threads: int = 1,
) -> TrialTask:
    """Task of a cell's trial, continuing from its observations.

    Those of other cells estimate its largest batch, where a search begins.
    """
    from fitting.largest_batch_prediction import likely_largest  # noqa: PLC0415 - plans need no laws

    task = _task(spec, catalog, cell, threads)
    likely = likely_largest(cell, task.memory_guess_bytes, observations)
    done = tuple(by_cell(observations)[cell])
    return task.model_copy(update={"done": done, "likely_largest": likely})


def _task(spec: SweepSpec, catalog: Catalog, cell: Cell, threads: int = 1) -> TrialTask:
    """Task of a cell's trial without observations."""
    compiling = 0.0 if cell.recipe.compile is None else COMPILING_SECONDS
    # Its parts are valid, and to check a model again takes as long as to replay a trial.
    return TrialTask.of_checked(
        {
            "cell": cell,
            "model": spec.model(cell.model),
            "gpu": catalog.gpu(cell.device),
            "target": None if cell.capped_on is None else catalog.gpu(cell.gpu),
            "threads": threads,
            "seed": spec.seed,
            "batch_limit": cell.rank_recipe.batch_limit(spec.max_batch_size),
            # A simulation is deterministic.
            "boundary_repeats": 0 if cell.simulated else spec.boundary_repeats,
            "drawn": _drawn(spec, cell),
            "timing": spec.timing,
            "build_timeout_seconds": spec.build_timeout_seconds + compiling,
            "probe_timeout_seconds": spec.probe_timeout_seconds + compiling,
        }
    )


def _drawn(spec: SweepSpec, cell: Cell) -> DrawnLengths | None:
    """Lengths that a trial draws batches from; None for the cell's length alone."""
    if not spec.draws_lengths(cell):
        return None
    if cell.simulated:
        from trials.simulation.varying_lengths import shorter_traces  # noqa: PLC0415 - as above

        if not shorter_traces(cell):
            return None
    job = job_of(spec.workload, cell.recipe, cell.seq_len)
    return None if wrong_kind(job, cell.recipe) else drawn_lengths(job, cell.seq_len)


def make_plan(
    spec: SweepSpec,
    catalog: Catalog,
    cluster: ClusterResources,
    observations: Sequence[Observation],
) -> Plan:
    """Sort the cells of a specification into complete, pending and skipped ones.

    Pending cells alternate between GPUs, so that no GPU waits behind another one's queue.
    """
    complete, skipped = [], []
    pending: dict[str, list[Cell]] = defaultdict(list)
    reasons: dict[tuple[object, ...], str | None] = {}
    of_cell = by_cell(observations)
    for cell in spec.all_cells():
        observed = of_cell[cell]
        if observed and next_probe(_task(spec, catalog, cell), observed) is None:
            complete.append(cell)
            continue
        alike = cell.gpu, cell.capped_on, cell.simulated, cell.model, cell.recipe, cell.parallel
        if alike not in reasons:
            reasons[alike] = obstacle(cell, spec.model(cell.model), catalog, cluster)
        if reason := reasons[alike]:
            skipped.append(Skip(cell=cell, reason=reason))
        else:
            pending[cell.devices].append(cell)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*pending.values()))
    return Plan(
        complete=tuple(complete),
        pending=tuple(cell for cell in turns if cell is not None),
        skipped=tuple(skipped),
    )


def obstacle(cell: Cell, model: Model, catalog: Catalog, cluster: ClusterResources) -> str | None:
    """Reason why a cluster cannot measure a cell, whatever its length; None where it can."""
    if cell.capped_on is not None:
        # A largest batch is meaningless on a GPU that cannot run the recipe.
        reason = incompatibility(cell.recipe, model, catalog.gpu(cell.gpu))
        if reason is not None:
            return reason
    gpu = catalog.gpu(cell.device)
    if cell.simulated and gpu.kind == "cpu":
        return f"only CUDA GPUs are simulated: measure on {gpu.key} (leave simulated_on out)"
    if cell.simulated:
        reason = incompatibility(cell.recipe, model, gpu) or not_simulated(cell.recipe, model, gpu)
        if reason is None and cell.parallel is not None:
            reason = unsupported(cell.recipe, model.text, cell.parallel)
        return reason
    return _not_placed(cell, model, gpu, cluster)


def _not_placed(cell: Cell, model: Model, gpu: Gpu, cluster: ClusterResources) -> str | None:
    """Reason why no node of the cluster can measure a cell."""
    nodes = cluster.nodes_for(gpu)
    # Without a node, an incompatibility of the GPU itself is a better reason than the missing node.
    packages = [node.packages for node in nodes] or [None]
    reasons = [incompatibility(cell.recipe, model, gpu, extras) for extras in packages]
    if all(reason is not None for reason in reasons):
        return reasons[0]
    if cell.parallel is not None and (
        refused := unmeasured(cell.recipe, model.text, cell.parallel)
    ):
        return refused
    request = cluster.trial_resources(gpu, cell.ranks_per_node)
    if request is None:
        return _no_node(cell, gpu, is_own=cluster.is_own)
    is_startable = cluster.starting(cell.node_devices) >= cell.nodes
    if cell.parallel is None or is_startable or cluster.holding(request, nodes=cell.nodes):
        return None
    wanted = " and ".join(f"{amount:g} {name}" for name, amount in request.items())
    if cell.nodes == 1:
        cores = max(node.resources["CPU"] for node in nodes)
        return (
            f"{cell.ranks} ranks need a machine with {cell.ranks} cores; the largest has {cores:g}"
            if gpu.kind == "cpu" and cores < cell.ranks
            else f"no node of the cluster has {wanted}, which {cell.ranks} ranks need: start one"
        )
    return (
        f"the cluster does not have {cell.nodes} nodes with {wanted} each, which {cell.ranks} "
        f"ranks on {cell.nodes} nodes need: start more"
    )


def _no_node(cell: Cell, gpu: Gpu, *, is_own: bool) -> str:
    """Reason where no node has the GPU: of a cluster, or of the Ray of the sweep's own."""
    resources = f"--num-cpus=1 --resources='{{\"{gpu.key}\": {cell.ranks_per_node}}}'"
    if not is_own:
        one = "one" if cell.nodes == 1 else cell.nodes
        return (
            f"no node of the cluster has a core and the resource {gpu.key!r}: start {one} with "
            f"ray start {resources}"
        )
    without_it = "measure on a cluster ('deploy' and 'launch')"
    if gpu.kind == "cuda":
        without_it = f"simulate it (simulated_on: [{gpu.key}]), use 'estimate', or {without_it}"
    text = f"Ray on this machine has no {cell.devices}: {without_it}"
    if cell.nodes > 1:
        return text
    return f"{text}; if it is there, ray start --head {resources}, and set RAY_ADDRESS=auto"
