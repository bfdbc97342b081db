"""The driver of a sweep: places trials, keeps what they report, until enough is known."""

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from gpu_catalog.catalog import Catalog
from orchestrator.cluster import cluster_address, connected_cluster, this_machine
from orchestrator.cost import SECONDS_PER_HOUR
from orchestrator.effort import Effort, expected_text, what_is_left
from orchestrator.local_runner import simulate_trials
from orchestrator.plan import ClusterResources, Plan, make_plan, trial_task
from orchestrator.progress import Progress
from orchestrator.runner import run_trials
from orchestrator.spending import Meter, rented_offer, spent_usd
from orchestrator.store import PLAN, ObservationWriter, RunFolder
from orchestrator.sweep import SweepSpec
from orchestrator.tune_loggers import Tool, tune_callbacks
from trials.observation import Observation, largest_batch
from trials.profile import Logged, Profiled, ProfileRule, sizes_to_profile
from trials.profile_trial import ProfileTask
from trials.simulation.clock import Constants
from trials.simulation.traces import Traces
from trials.trial import next_ask
from trials.workload import Cell

ROUNDS = 3  # a trial that died with its node or worker is placed again, this often in all


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
        """What to place next, in this order; empty when that was all."""

    def ended(self, cells: set[Cell]) -> None:
        """Told which of these trials came to their own end."""


class Everything:
    """Every cell, whole; those whose trials died again, a few times.

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
        self._rounds = 0
        self._ended: set[Cell] = set()

    def wanted(self, plan: Plan, observations: Sequence[Observation]) -> dict[Cell, Asked]:
        """What is pending."""
        self._rounds += 1
        if self._rounds > ROUNDS:
            return {}
        # A trial that ended and is pending still has tried all it can.
        cells = [cell for cell in to_measure(plan) if cell not in self._ended]
        payable = self._payable(cells, observations)
        return {cell: Asked() for cell in cells if cell.device in payable}

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

    def ended(self, cells: set[Cell]) -> None:
        """Once is enough: what they could not have they tried for."""
        self._ended |= cells


class Keeper:
    """Keeps what the trials report, shows it, and counts what it costs."""

    def __init__(
        self, writer: ObservationWriter, progress: Progress, meter: Meter | None = None
    ) -> None:
        self._writer = writer
        self._progress = progress
        self._meter = meter
        self.ended_well: set[Cell] = set()
        self.seen: list[Observation] = []

    def started(self, cell: Cell) -> None:
        """A trial runs."""
        self._progress.started(cell)

    def observed(self, observation: Logged) -> None:
        """A probe or a profile ended."""
        if not self._writer.append(observation):
            return
        if self._meter is not None:
            self._meter.observed(observation)
            self._progress.spent_usd = self._meter.usd
        if isinstance(observation, Profiled):
            self._progress.profiled(observation)
        else:
            self.seen.append(observation)
            self._progress.observed(observation)

    def ended(self, cell: Cell, error: str | None) -> None:
        """A trial is over."""
        if error is None:
            self.ended_well.add(cell)
        self._progress.ended(cell, error)


def measure(  # noqa: PLR0913 - what a sweep is made of
    folder: RunFolder,
    writer: ObservationWriter,
    spec: SweepSpec,
    catalog: Catalog,
    strategy: Strategy,
    *,
    profile: bool = False,
    log_to: Sequence[Tool] = (),
) -> Plan:
    """Measures what is not known yet, and tells what is known in the end.

    Args:
        folder: the run.
        writer: of its observations.
        spec: what is wanted.
        catalog: the GPUs.
        strategy: what of it to measure, in which order.
        profile: profile the cells that are measured, too, when that is done.
        log_to: tools that draw the trials, too.
    """
    known = folder.observations()
    plan = make_plan(spec, catalog, this_machine(), known)
    to_profile = profile and to_be_profiled(folder, plan)
    if cluster_address() is None and not to_measure(plan) and not to_profile:
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
        while wanted := strategy.wanted(plan, known):
            tasks = [
                trial_task(
                    spec, catalog, cell, known, threads=cluster.threads(catalog.gpu(cell.device))
                ).model_copy(update={"timed": of.timed, "most_seconds": of.most_seconds})
                for cell, of in wanted.items()
            ]
            with Progress(list(wanted), complete=len(plan.complete)) as progress:
                meter = Meter(spec, catalog, [*known, *folder.profiles()])
                progress.spent_usd = meter.usd
                keeper = Keeper(writer, progress, meter)
                over = partial(meter.reaches, strategy.budget_usd)
                run_trials(tasks, cluster, keeper, over, _loggers(log_to, folder, spec, wanted))
            strategy.ended(keeper.ended_well)
            known = folder.observations()
            plan = make_plan(spec, catalog, cluster, known)
            folder.write(PLAN, plan)
        if profile:
            _profile(folder, writer, spec, catalog, cluster, plan, strategy.budget_usd)
    return plan


def _loggers(
    tools: Sequence[Tool], folder: RunFolder, spec: SweepSpec, cells: Iterable[Cell]
) -> list[Any]:
    place = folder.place.local_folder()
    return tune_callbacks(tools, place, spec.name, list(cells), remark)


def to_be_profiled(folder: RunFolder, plan: Plan) -> dict[Cell, list[int]]:
    """The batch sizes still to profile of each cell that a device of its own has measured."""
    known, profiled = folder.observations(), folder.profiles()
    left = {}
    for cell in plan.complete:
        if cell.simulated or cell.capped_on is not None:
            continue
        found = largest_batch([o for o in known if o.cell == cell])
        tried = [p for p in profiled if p.cell == cell]
        sizes = [] if found is None else sizes_to_profile(found[0], tried)
        if sizes:
            left[cell] = sizes
    return left


def _profile(  # noqa: PLR0913, PLR0917 - as above
    folder: RunFolder,
    writer: ObservationWriter,
    spec: SweepSpec,
    catalog: Catalog,
    cluster: ClusterResources,
    plan: Plan,
    budget_usd: float | None,
) -> None:
    for _ in range(ROUNDS):
        left, done = to_be_profiled(folder, plan), folder.profiles()
        meter = Meter(spec, catalog, [*folder.observations(), *done])
        if left and meter.reaches(budget_usd):
            remark(f"{folder.path}: the budget is spent: {len(left)} cells are not profiled")
            return
        # A cell that was measured elsewhere may have no node here now.
        placed = [cell for cell in left if cluster.trial_resources(catalog.gpu(cell.device))]
        if not placed:
            return
        remark(f"{folder.path}: profiling {len(placed)} cells")
        tasks = [
            ProfileTask(
                trial=trial_task(
                    spec, catalog, cell, (), threads=cluster.threads(catalog.gpu(cell.device))
                ),
                rule=ProfileRule(),
                batch_sizes=tuple(left[cell]),
                done=tuple(p for p in done if p.cell == cell),
            )
            for cell in placed
        ]
        with Progress(placed, complete=0) as progress:
            progress.spent_usd = meter.usd
            keeper = Keeper(writer, progress, meter)
            run_trials(tasks, cluster, keeper, partial(meter.reaches, budget_usd))


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
    plan = Plan(
        complete=(*plan.complete, *(cell for cell in cells if cell in done)),
        pending=tuple(cell for cell in plan.pending if cell not in done),
        skipped=plan.skipped,
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
