"""What to run: the cells of a specification, less what is known, less what cannot be had. Pure."""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

from gpu_catalog.catalog import Catalog
from gpu_catalog.gpu import Gpu
from gpu_catalog.record import Record
from orchestrator.planning.cluster_resources import ClusterResources
from orchestrator.spec.sweep_spec import SweepSpec
from trials.records.cell import Cell
from trials.records.compatibility import incompatibility
from trials.records.model import Model
from trials.records.observation import Observation, by_cell
from trials.simulation.trace_request import not_simulated
from trials.trial import TrialTask, next_probe


class Skip(Record):
    """A cell that is not measured, and why."""

    cell: Cell
    reason: str


class Plan(Record):
    """What a driver set out to do.

    Attributes:
        complete: cells whose observations say all there is to say.
        pending: cells to measure.
        skipped: cells that cannot be measured on this cluster.
        given_up: pending cells whose trials died too often, and of what the last one did.
    """

    complete: tuple[Cell, ...]
    pending: tuple[Cell, ...]
    skipped: tuple[Skip, ...]
    given_up: tuple[Skip, ...] = ()

    def after(self, no_node: Mapping[Cell, str], died: Mapping[Cell, str]) -> "Plan":
        """The same, told of what could not be had.

        Args:
            no_node: cells for whose GPU there was no node, and why.
            died: cells whose trials died too often, and of what.
        """
        gone = [cell for cell in self.pending if cell in no_node]
        return self.model_copy(
            update={
                "pending": tuple(cell for cell in self.pending if cell not in no_node),
                "skipped": (*self.skipped, *(Skip(cell=c, reason=no_node[c]) for c in gone)),
                "given_up": tuple(Skip(cell=c, reason=died[c]) for c in self.pending if c in died),
            }
        )


def trial_task(
    spec: SweepSpec,
    catalog: Catalog,
    cell: Cell,
    observations: Sequence[Observation],
    *,
    threads: int = 1,
) -> TrialTask:
    """A cell as a trial, given what was observed of it."""
    return TrialTask(
        cell=cell,
        model=spec.model(cell.model),
        gpu=catalog.gpu(cell.device),
        target=None if cell.capped_on is None else catalog.gpu(cell.gpu),
        threads=threads,
        seed=spec.seed,
        batch_limit=spec.max_batch_size,
        # A simulation says the same each time.
        boundary_repeats=0 if cell.simulated else spec.boundary_repeats,
        timing=spec.timing,
        build_timeout_seconds=spec.build_timeout_seconds,
        probe_timeout_seconds=spec.probe_timeout_seconds,
        done=tuple(o for o in observations if o.cell == cell),
    )


def make_plan(
    spec: SweepSpec,
    catalog: Catalog,
    cluster: ClusterResources,
    observations: Sequence[Observation],
) -> Plan:
    """Sorts the cells of a specification by what is to be done with them.

    Pending cells take turns over the GPUs, so that no GPU waits behind another one's queue.
    """
    complete, skipped = [], []
    pending: dict[str, list[Cell]] = defaultdict(list)
    seen = by_cell(observations)
    for cell in spec.all_cells():
        reason = _why_not(cell, spec.model(cell.model), catalog, cluster)
        known = seen[cell]
        if known and next_probe(trial_task(spec, catalog, cell, known), known) is None:
            complete.append(cell)
        elif reason is not None:
            skipped.append(Skip(cell=cell, reason=reason))
        else:
            pending[cell.device].append(cell)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*pending.values()))
    return Plan(
        complete=tuple(complete),
        pending=tuple(cell for cell in turns if cell is not None),
        skipped=tuple(skipped),
    )


def _why_not_simulated(cell: Cell, model: Model, gpu: Gpu) -> str | None:
    if gpu.kind != "cuda":
        return f"only CUDA GPUs are simulated: measure on {gpu.key} (leave simulated_on out)"
    return incompatibility(cell.recipe, model, gpu) or not_simulated(cell.recipe, model, gpu)


def _why_not(cell: Cell, model: Model, catalog: Catalog, cluster: ClusterResources) -> str | None:
    if cell.capped_on is not None:
        # A largest batch of a GPU that cannot run the recipe would be nobody's.
        reason = incompatibility(cell.recipe, model, catalog.gpu(cell.gpu))
        if reason is not None:
            return reason
    gpu = catalog.gpu(cell.device)
    if cell.simulated:
        return _why_not_simulated(cell, model, gpu)
    nodes = cluster.nodes_for(gpu)
    # Without a node to ask, what no node could have is still told rather than the missing node.
    reasons = [incompatibility(cell.recipe, model, gpu, node.packages) for node in nodes] or [
        incompatibility(cell.recipe, model, gpu)
    ]
    if all(reason is not None for reason in reasons):
        return reasons[0]
    if not nodes:
        return (
            f"no node of the cluster has a core and the resource {gpu.key!r}: start one with "
            f"ray start --num-cpus=1 --resources='{{\"{gpu.key}\": 1}}'"
        )
    return None
