"""The driver of a sweep: places trials, keeps what they report, until enough is known."""

import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from gpu_catalog.catalog import Catalog
from orchestrator.cluster import cluster_address, cluster_now, connected_cluster, this_machine
from orchestrator.cost import SECONDS_PER_HOUR
from orchestrator.effort import Effort, expected_text, what_is_left
from orchestrator.faults import Fault, Faults
from orchestrator.local_runner import simulate_trials
from orchestrator.placer import Placer
from orchestrator.plan import ClusterResources, Plan, make_plan, trial_task
from orchestrator.progress import Progress
from orchestrator.runner import run_trials
from orchestrator.spending import Meter, rented_offer, spent_usd
from orchestrator.store import FAULTS, PLAN, ObservationWriter, RunFolder
from orchestrator.sweep import SweepSpec
from trials.observation import Observation
from trials.simulation.clock import Constants
from trials.simulation.traces import Traces
from trials.trial import TrialTask, next_ask
from trials.workload import Cell


class PlanError(RuntimeError):
    """A sweep cannot have what it must; a line for each cell."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What of a cell is to be measured.

    Attributes:
        timed: batch sizes; None for all of the ladder's, empty for the largest alone.
        most_seconds: no probe begins later than this after the trial did; absent for no limit.
    """

    timed: tuple[int, ...] | None = None
    most_seconds: float | None = None


class Strategy(Protocol):
    """Says what to measure.

    Attributes:
        budget_usd: no probe begins once the run has cost so much (``spending.Meter``); absent for
            no limit. It is passed by one probe on each node at most.
    """

    budget_usd: float | None

    def wanted(self, plan: Plan, observations: Sequence[Observation]) -> dict[Cell, Asked]:
        """What to measure next, in this order; empty when that was all.

        What was wanted before has been tried as often as it may be.
        """


class Everything:
    """Every cell, whole.

    Args:
        spec: of the sweep.
        catalog: its GPUs and offers.
        budget_usd: what the run may cost, as ``spent_usd`` counts it; absent for no limit. A GPU
            is left out when the start of its node alone would spend the rest.
    """

    def __init__(self, spec: SweepSpec, catalog: Catalog, budget_usd: float | None = None) -> None:
        self._spec = spec
        self._catalog = catalog
        self.budget_usd = budget_usd
        self._tried: set[Cell] = set()

    def wanted(self, plan: Plan, observations: Sequence[Observation]) -> dict[Cell, Asked]:
        """What is pending."""
        cells = [cell for cell in to_measure(plan) if cell not in self._tried]
        payable = self._payable(cells, observations)
        wanted = {cell: Asked() for cell in cells if cell.device in payable}
        self._tried |= wanted.keys()
        return wanted

    def _payable(self, cells: Sequence[Cell], observations: Sequence[Observation]) -> set[str]:
        """The GPUs the budget has something left for when their nodes have started, in order."""
        devices = list(dict.fromkeys(cell.device for cell in cells))
        if self.budget_usd is None:
            return set(devices)
        effort = Effort(observations, self._spec.workload.overheads.startup_minutes)
        planned = spent_usd(self._spec, self._catalog, observations)
        found = set()
        for device in devices:
            offer = rented_offer(self._catalog, device)
            rate = 0.0 if offer is None else offer.usd_per_hour / SECONDS_PER_HOUR
            start = effort.start_seconds(device) * rate
            if planned + start < self.budget_usd or offer is None:
                planned += start
                found.add(device)
        return found


class Keeper:
    """Keeps what the trials report, shows it, and counts what it costs.

    Args:
        writer: to the run's observations.
        progress: shows them.
        meter: counts what they cost; absent where nobody asks.
        known: what is known of each cell: kept up to date.
    """

    def __init__(
        self,
        writer: ObservationWriter,
        progress: Progress,
        meter: Meter | None = None,
        known: dict[Cell, list[Observation]] | None = None,
    ) -> None:
        self._writer = writer
        self._progress = progress
        self._meter = meter
        self._known = known
        self.seen: list[Observation] = []

    def started(self, cell: Cell) -> None:
        """A trial runs."""
        self._progress.started(cell)

    def observed(self, observation: Observation) -> None:
        """A probe ended."""
        if self._writer.append(observation):
            self.seen.append(observation)
            if self._known is not None:
                self._known[observation.cell].append(observation)
            if self._meter is not None:
                self._meter.observed(observation)
                self._progress.spent_usd = self._meter.usd
            self._progress.observed(observation)

    def ended(self, cell: Cell, error: str | None) -> None:
        """A trial is over."""
        self._progress.ended(cell, error)


class FaultDiary:
    """Keeps what goes wrong in the run folder, and shows what no trial's own line tells."""

    def __init__(self, folder: RunFolder, progress: Progress) -> None:
        self._folder = folder
        self._progress = progress
        self.faults = folder.faults()

    def note(self, fault: Fault) -> None:
        """Writes it down."""
        self.faults = Faults(faults=(*self.faults.faults, fault))
        self._folder.write(FAULTS, self.faults)
        if fault.cell is None:
            self._progress.remark(f"{fault.node or fault.gpu}: {fault.reason}")


def measure(  # noqa: PLR0913 - what a sweep is
    folder: RunFolder,
    writer: ObservationWriter,
    spec: SweepSpec,
    catalog: Catalog,
    strategy: Strategy,
    *,
    wait_seconds: float,
) -> Plan:
    """Measures what is not known yet, and tells what is known in the end.

    Args:
        folder: of the run.
        writer: to its observations.
        spec: of the sweep.
        catalog: its GPUs and offers.
        strategy: says what to measure.
        wait_seconds: how long to wait for a node that the cluster's autoscaler is to start.
    """
    known = folder.observations()
    plan = make_plan(spec, catalog, this_machine(), known)
    if cluster_address() is None and not to_measure(plan):
        folder.write(PLAN, plan)
        tell_skipped(plan)
        if plan.complete and not plan.pending:
            remark(f"{folder.path}: nothing left to measure; another --out measures anew")
        return plan
    remark(
        f"{folder.path}: starting Ray" if cluster_address() is None else f"{folder.path}: on Ray"
    )
    # A Ray job starts in a copy of its working directory, which Ray may take away under it: nodes
    # that share a machine share the copy, and the first to be done with it removes it.
    os.chdir(folder.place.local_folder())
    with connected_cluster(ask_for_packages=needs_extras(spec)) as cluster:
        plan = make_plan(spec, catalog, cluster, known)
        folder.write(PLAN, plan)
        tell_skipped(plan)
        left = what_is_left(spec, catalog, cluster, plan, known)
        for line in expected_text(left, strategy.budget_usd):
            remark(line)
        no_node: dict[Cell, str] = {}
        died: dict[Cell, str] = {}
        while wanted := strategy.wanted(plan, known):
            round_ = Round(folder, writer, spec, catalog, cluster, wait_seconds)
            placer = round_.run(wanted, len(plan.complete), strategy.budget_usd)
            no_node |= placer.no_node
            died |= placer.died
            known = folder.observations()
            plan = make_plan(spec, catalog, cluster, known).after(no_node, died)
            folder.write(PLAN, plan)
    return plan


@dataclass(frozen=True, slots=True)
class Round:
    """What the trials of a sweep go by.

    Attributes:
        folder: of the run.
        writer: to its observations.
        spec: of the sweep.
        catalog: its GPUs and offers.
        cluster: what there was when the sweep began.
        wait_seconds: how long to wait for a node that the cluster is to start.
    """

    folder: RunFolder
    writer: ObservationWriter
    spec: SweepSpec
    catalog: Catalog
    cluster: ClusterResources
    wait_seconds: float

    def run(self, wanted: Mapping[Cell, Asked], complete: int, budget_usd: float | None) -> Placer:
        """Has cells measured; the placer knows what could not be had.

        Args:
            wanted: what of which cells, in this order.
            complete: how many cells of the sweep are known.
            budget_usd: no probe begins once the run has cost so much; absent for no limit.
        """
        seen = self.folder.observations()
        known: dict[Cell, list[Observation]] = defaultdict(list)
        for observation in seen:
            known[observation.cell].append(observation)
        gpus = {cell.device: self.catalog.gpu(cell.device) for cell in wanted}

        def task(cell: Cell) -> TrialTask | None:
            of, threads = wanted[cell], self.cluster.threads(gpus[cell.device])
            whole = trial_task(self.spec, self.catalog, cell, known[cell], threads=threads)
            asked = whole.model_copy(update={"timed": of.timed, "most_seconds": of.most_seconds})
            return None if next_ask(asked, asked.done) is None else asked

        with Progress(list(wanted), complete=complete) as progress:
            meter = Meter(self.spec, self.catalog, seen)
            progress.spent_usd = meter.usd
            diary = FaultDiary(self.folder, progress)
            placer = Placer(
                list(wanted),
                task,
                {key: self.cluster.trial_resources(gpu) or {} for key, gpu in gpus.items()},
                self.cluster,
                wait_seconds=self.wait_seconds,
                nodes_out=diary.faults.nodes_out(),
                note=diary.note,
                is_spent=partial(meter.reaches, budget_usd),
            )
            run_trials(placer, Keeper(self.writer, progress, meter, known), cluster_now)
        return placer


def simulate(
    folder: RunFolder, writer: ObservationWriter, spec: SweepSpec, plan: Plan, constants: Constants
) -> Plan:
    """Simulates what is to be simulated and is not known yet; the plan that is left."""
    cells = [cell for cell in plan.pending if cell.simulated]
    if not cells:
        return plan
    models = ", ".join(dict.fromkeys(cell.model for cell in cells))
    remark(f"{folder.path}: tracing {models} to simulate {len(cells)} cells; no GPU runs them")
    catalog, known = spec.merged_catalog(), folder.observations()
    tasks = [trial_task(spec, catalog, cell, known) for cell in cells]
    with Progress(cells, complete=len(plan.complete)) as progress:
        simulate_trials(tasks, Keeper(writer, progress), Traces(), constants)
    known = folder.observations()
    done = {
        cell
        for cell in cells
        if next_ask(task := trial_task(spec, catalog, cell, known), task.done) is None
    }
    plan = plan.model_copy(
        update={
            "complete": (*plan.complete, *(cell for cell in cells if cell in done)),
            "pending": tuple(cell for cell in plan.pending if cell not in done),
        }
    )
    folder.write(PLAN, plan)
    return plan


def to_measure(plan: Plan) -> tuple[Cell, ...]:
    """The pending cells that a device must run."""
    return tuple(cell for cell in plan.pending if not cell.simulated)


def needs_extras(spec: SweepSpec) -> bool:
    """Whether a recipe needs a package that not every node has."""
    return any(cell.recipe.extras for cell in spec.all_cells())


def refuse_skipped(plan: Plan) -> None:
    """For a sweep that is to have every cell.

    Raises:
        PlanError: it cannot; a line for each cell.
    """
    if plan.skipped:
        lines = [f"{skip.cell.key}: {skip.reason}" for skip in plan.skipped]
        text = f"--strict: {len(lines)} trials cannot be had, nothing was started"
        raise PlanError("\n".join([*lines, text]))


def tell_skipped(plan: Plan) -> None:
    """A line for each cell that cannot be had, with the reason."""
    for skip in plan.skipped:
        remark(f"skipped {skip.cell.key}: {skip.reason}")


def remark(text: str) -> None:
    """A line beside the results."""
    sys.stderr.write(text + "\n")
