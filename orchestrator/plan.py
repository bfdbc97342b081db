"""What to run: the cells of a specification, less what is known, less what cannot be had. Pure."""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpu_catalog.catalog import Catalog
from gpu_catalog.gpu import Gpu
from gpu_catalog.record import Record
from orchestrator.sweep import SweepSpec
from trials.observation import Observation
from trials.trial import TrialTask, next_ask
from trials.workload import Cell


@dataclass(frozen=True, slots=True)
class ClusterResources:
    """What each node of a Ray cluster offers: how much of each resource, by name."""

    nodes: tuple[Mapping[str, float], ...]

    def trial_resources(self, gpu: Gpu) -> dict[str, float] | None:
        """What a trial on this GPU asks Ray for; None when the cluster cannot have it.

        The node that carries a resource equal to the catalog key is the one with that GPU. A cpu
        device needs no such node: any free core will do. Ray would wait for ever for a node that
        is not there, so one node must have all that is asked for.
        """
        with_cores = [node for node in self.nodes if node.get("CPU", 0) >= 1]
        if any(node.get(gpu.key, 0) >= 1 for node in with_cores):
            return {"CPU": 1, gpu.key: 1}
        return {"CPU": 1} if gpu.kind == "cpu" and with_cores else None


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
    """

    complete: tuple[Cell, ...]
    pending: tuple[Cell, ...]
    skipped: tuple[Skip, ...]


def trial_task(
    spec: SweepSpec, catalog: Catalog, cell: Cell, observations: Sequence[Observation]
) -> TrialTask:
    """A cell as a trial, given what was observed of it."""
    return TrialTask(
        cell=cell,
        gpu=catalog.gpu(cell.gpu),
        seed=spec.seed,
        batch_limit=spec.max_batch_size,
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
    by_cell: dict[Cell, list[Observation]] = defaultdict(list)
    for observation in observations:
        by_cell[observation.cell].append(observation)
    for cell in spec.all_cells():
        reason = _why_not(catalog.gpu(cell.gpu), cluster)
        known = by_cell[cell]
        if known and next_ask(trial_task(spec, catalog, cell, known), known) is None:
            complete.append(cell)
        elif reason is not None:
            skipped.append(Skip(cell=cell, reason=reason))
        else:
            pending[cell.gpu].append(cell)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*pending.values()))
    return Plan(
        complete=tuple(complete),
        pending=tuple(cell for cell in turns if cell is not None),
        skipped=tuple(skipped),
    )


def _why_not(gpu: Gpu, cluster: ClusterResources) -> str | None:
    if gpu.kind != "cpu":
        return (
            f"{gpu.key} is a CUDA GPU, and this version measures cpu devices only "
            "(see the CHANGELOG)"
        )
    if cluster.trial_resources(gpu) is None:
        return (
            f"no node of the cluster has a core and the resource {gpu.key!r}: start one with "
            f"ray start --num-cpus=1 --resources='{{\"{gpu.key}\": 1}}'"
        )
    return None
