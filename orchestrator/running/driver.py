"""The driver of a sweep: places trials, keeps what they report, until enough is known."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from gpu_catalog.catalog import Catalog
from gpu_catalog.errors import UserError
from orchestrator.console import remark
from orchestrator.planning.cluster_resources import ClusterResources, this_machine
from orchestrator.planning.faults import Fault
from orchestrator.planning.measurement_cost import Budget, expected_text, remaining_work
from orchestrator.planning.node_pricing import NodePrices
from orchestrator.planning.plan import Plan, make_plan, trial_task
from orchestrator.planning.slow_nodes import slow_nodes
from orchestrator.planning.spending import Meter
from orchestrator.ray_backend.cluster import cluster_address, cluster_now, connected_cluster
from orchestrator.ray_backend.tune_loggers import Tool, tune_callbacks
from orchestrator.ray_backend.tune_runner import run_trials
from orchestrator.run_folder.file_names import PLAN
from orchestrator.run_folder.observation_writer import ObservationWriter
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.running.progress import Progress
from orchestrator.running.recorder import ObservationRecorder, RunJournal
from orchestrator.scheduling.node_queue import Task
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.scheduling.strategy import MeasurementRequest, Strategy, to_measure
from orchestrator.spec.sweep_spec import SweepSpec
from trials.profile_trial import ProfileTask
from trials.records.cell import Cell
from trials.records.observation import Observation, by_cell, largest_batch
from trials.records.profile import Logged, Profiled, ProfileRule, sizes_to_profile
from trials.trial import TrialTask, next_ask


class PlanError(UserError):
    """A sweep cannot have what it must; a line for each cell."""


def measure(  # noqa: PLR0913 - what a sweep is made of
    folder: RunFolder,
    writer: ObservationWriter,
    spec: SweepSpec,
    rates: NodePrices,
    strategy: Strategy,
    *,
    wait_seconds: float,
    log_to: Sequence[Tool] = (),
) -> Plan:
    """Measures what is not known yet, and tells what is known in the end.

    Args:
        folder: of the run.
        writer: to its observations.
        spec: of the sweep.
        rates: what nodes cost, by its GPUs and offers.
        strategy: says what to measure, in which order.
        wait_seconds: how long to wait for a node that the cluster's autoscaler is to start.
        log_to: tools that draw the trials, too.
    """
    known, catalog = folder.observations(), rates.catalog
    plan = make_plan(spec, catalog, this_machine(), known)
    profile = spec.profile and strategy.makes_profiles
    to_profile = profile and largest_to_profile(folder, plan)
    if cluster_address() is None and not to_measure(plan) and not to_profile:
        writer.write(PLAN, plan)
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
        writer.write(PLAN, plan)
        tell_skipped(plan)
        diary = RunJournal(folder, writer, rates)
        diary.saw(cluster)
        left = remaining_work(spec, rates, cluster, plan, known)
        round_ = TrialExecutor(folder, writer, spec, diary, cluster, wait_seconds)
        purse = Budget(strategy.budget_usd, round_.spent_usd, profile)
        for line in expected_text(left, purse, rates):
            remark(line)
        no_node: dict[Cell, str] = {}
        died: dict[Cell, str] = {}

        def look_back() -> tuple[list[Observation], Plan]:
            """What is known by now, and the plan that is left."""
            seen = folder.observations()
            left = make_plan(spec, catalog, cluster, seen).after(no_node, died)
            writer.write(PLAN, left)
            return seen, left

        while wanted := strategy.wanted(plan, known, round_.spent_usd):
            loggers = _loggers(log_to, folder, spec, wanted)
            placer = round_.measure(wanted, len(plan.complete), strategy.budget_usd, loggers)
            no_node |= placer.no_node
            died |= placer.died
            known, plan = look_back()
        if round_.retime_slow_cells(strategy.budget_usd):  # which may make a cell whole
            known, plan = look_back()
        if profile:
            round_.profile(plan, strategy.budget_usd)
    return plan


def _loggers(
    tools: Sequence[Tool], folder: RunFolder, spec: SweepSpec, cells: Iterable[Cell]
) -> list[Any]:
    place = folder.place.local_folder()
    return tune_callbacks(tools, place, spec.name, list(cells), remark)


@dataclass(frozen=True, slots=True)
class TrialExecutor:
    """What the trials of a sweep go by.

    Attributes:
        folder: of the run.
        writer: to its observations.
        spec: of the sweep.
        diary: what else it learns, and what nodes cost.
        cluster: what there was when the sweep began.
        wait_seconds: how long to wait for a node that the cluster is to start.
    """

    folder: RunFolder
    writer: ObservationWriter
    spec: SweepSpec
    diary: RunJournal
    cluster: ClusterResources
    wait_seconds: float

    def measure(
        self,
        wanted: Mapping[Cell, MeasurementRequest],
        complete: int,
        budget_usd: float | None,
        loggers: Sequence[Any] = (),
        slow: Mapping[str, str] = MappingProxyType({}),
    ) -> Scheduler:
        """Has cells measured; the placer knows what could not be had.

        Args:
            wanted: what of which cells, in this order.
            complete: how many cells of the sweep are known.
            budget_usd: no probe begins once the run has cost so much; absent for no limit.
            loggers: Ray Tune's own callbacks, told of the trials.
            slow: ids of nodes that nothing is to be timed on, and why.
        """
        known = by_cell(self.folder.observations())

        def learn(ended: Logged) -> None:
            if isinstance(ended, Observation):
                known[ended.cell].append(ended)

        def task(cell: Cell) -> TrialTask | None:
            of, whole = wanted[cell], self._trial(cell, known[cell])
            asked = whole.model_copy(
                update={
                    "timed": of.timed,
                    "most_seconds": of.most_seconds,
                    "slow_nodes": tuple(slow),
                }
            )
            return None if next_ask(asked, asked.done) is None else asked

        return self._place(list(wanted), task, learn, complete, budget_usd, loggers, slow)

    def retime_slow_cells(self, budget_usd: float | None) -> bool:
        """Has cells that slow nodes timed timed by others, where there are such now.

        Returns:
            Whether there was anything to time.
        """
        found = slow_nodes(self.folder.observations())
        slow = {each.node_id: each.text for each in found}
        now = cluster_now() if found else self.cluster
        out = {*slow, *self.diary.faults.nodes_out(), *now.leaving}
        sizes: dict[Cell, list[int]] = defaultdict(list)
        for cell, of_cell in ((c, s) for each in found for c, s in each.standing.items()):
            asked = now.trial_resources(self.catalog.gpu(cell.device))
            if asked is not None and now.holding(asked, out):
                sizes[cell] += of_cell
        wanted = {cell: MeasurementRequest(timed=tuple(of_cell)) for cell, of_cell in sizes.items()}
        if wanted:
            remark(f"{'; '.join(slow.values())}: timing {len(wanted)} trials again elsewhere")
            # A node may have joined whose GPU the sweep began without.
            replace(self, cluster=now).measure(wanted, 0, budget_usd, slow=slow)
        return bool(wanted)

    def profile(self, plan: Plan, budget_usd: float | None) -> None:
        """Has the cells profiled that are measured."""
        # A cell that was measured elsewhere may have no node here now.
        left = {
            cell: largest
            for cell, largest in largest_to_profile(self.folder, plan).items()
            if self.cluster.trial_resources(self.catalog.gpu(cell.device))
        }
        known = by_cell(self.folder.profiles())
        meter = self._meter()
        if left and meter.reaches(budget_usd):
            remark(f"{self.folder.path}: the budget is spent: {len(left)} cells are not profiled")
            return
        if not left:
            return
        remark(f"{self.folder.path}: profiling {len(left)} cells")

        def learn(ended: Logged) -> None:
            if isinstance(ended, Profiled):
                known[ended.cell].append(ended)

        def task(cell: Cell) -> ProfileTask | None:
            sizes = sizes_to_profile(left[cell], known[cell])
            if not sizes:
                return None
            return ProfileTask(
                trial=self._trial(cell, ()),
                rule=ProfileRule(),
                batch_sizes=tuple(sizes),
                done=tuple(known[cell]),
            )

        self._place(list(left), task, learn, 0, budget_usd)

    @property
    def spent_usd(self) -> float:
        """What the run has cost by now."""
        return self._meter().usd or 0.0

    @property
    def catalog(self) -> Catalog:
        """The GPUs and offers of the sweep."""
        return self.diary.rates.catalog

    def _meter(self) -> Meter:
        logged, faults = self.folder.logged(), self.diary.faults.faults
        return Meter(self.spec, self.diary.rates, logged, faults)

    def _trial(self, cell: Cell, known: Sequence[Observation]) -> TrialTask:
        threads = self.cluster.threads(self.catalog.gpu(cell.device))
        return trial_task(self.spec, self.catalog, cell, known, threads=threads)

    def _place(  # noqa: PLR0913, PLR0917 - what a round is
        self,
        cells: Sequence[Cell],
        task: Callable[[Cell], Task | None],
        learn: Callable[[Logged], None],
        complete: int,
        budget_usd: float | None,
        loggers: Sequence[Any] = (),
        slow: Mapping[str, str] = MappingProxyType({}),
    ) -> Scheduler:
        gpus = {cell.device: self.catalog.gpu(cell.device) for cell in cells}
        diary, meter = self.diary, self._meter()
        with Progress(cells, complete=complete, known=self.folder.observations()) as progress:
            progress.spent_usd = meter.usd

            def note(fault: Fault) -> None:
                diary.note(fault)
                meter.lost(fault)
                progress.spent_usd = meter.usd
                if fault.cell is None:  # no trial's own line tells it
                    progress.remark(f"{fault.node or fault.gpu}: {fault.reason}")

            placer = Scheduler(
                cells,
                task,
                {key: self.cluster.trial_resources(gpu) or {} for key, gpu in gpus.items()},
                self.cluster,
                wait_seconds=self.wait_seconds,
                nodes_out={**slow, **diary.faults.nodes_out()},
                note=note,
                is_spent=partial(meter.reaches, budget_usd),
            )
            keeper = ObservationRecorder(self.writer, progress, meter, learn)
            run_trials(placer, keeper, cluster_now, loggers, diary.saw)
        return placer


def largest_to_profile(folder: RunFolder, plan: Plan) -> dict[Cell, int]:
    """The largest batch of each cell that a device of its own has measured, where one is to do."""
    known, profiled = by_cell(folder.observations()), by_cell(folder.profiles())
    left = {}
    for cell in plan.complete:
        if cell.simulated or cell.capped_on is not None:
            continue
        found = largest_batch(known[cell])
        if found is not None and sizes_to_profile(found[0], profiled[cell]):
            left[cell] = found[0]
    return left


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
