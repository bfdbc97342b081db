"""Execution of a sweep's trials: scheduled on nodes, run by Ray, recorded, priced and shown."""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fitting.largest_batch_prediction import memory_subject
from orchestrator.planning.cluster_resources import ClusterResources
from orchestrator.planning.faults import Fault
from orchestrator.planning.plan import Plan, trial_task
from orchestrator.planning.slow_nodes import slow_nodes
from orchestrator.planning.spending import Meter
from orchestrator.ray_backend.cluster import cluster_now
from orchestrator.ray_backend.tune_loggers import Tool, tune_callbacks
from orchestrator.ray_backend.tune_runner import run_trials
from orchestrator.run_folder.file_names import PLAN
from orchestrator.running.recorder import ObservationRecorder, RunJournal
from orchestrator.running.session import SweepSession
from orchestrator.scheduling.node_queue import Task
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.scheduling.strategy import MeasurementRequest
from trials.profile_trial import ProfileTask
from trials.records.cell import Cell, by_cell
from trials.records.observation import Observation
from trials.records.profile import ProfileRule, linked_nodes, sizes_to_profile
from trials.trial import TrialTask, next_probe

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Trials that are executed together.

    Attributes:
        cluster: nodes to size the trials for.
        complete: cells of the sweep that were complete before, for the progress display.
        to_simulate: cells that are simulated afterwards, likewise.
        loggers: Ray Tune callbacks.
        nodes_out: ids of nodes to avoid, with the reasons.
    """

    cluster: ClusterResources
    complete: int = 0
    to_simulate: int = 0
    loggers: Sequence[Any] = ()
    nodes_out: Mapping[str, str] = field(default_factory=dict)


class TrialExecutor:
    """Executes the trials of a sweep on the connected cluster.

    Args:
        session: the run.
        cluster: nodes at the start of the sweep.
        journal: faults and nodes until now; a bucket may lack the last ones.
        wait_seconds: time to wait for a node that the autoscaler starts.
        budget_usd: no probe begins once the run has cost this much; None for no limit.

    Attributes:
        session: the run.
        no_node: cells that had no node, with the reasons.
        died: cells whose trials died too often, with the last causes.
    """

    def __init__(
        self,
        session: SweepSession,
        cluster: ClusterResources,
        journal: RunJournal,
        *,
        wait_seconds: float,
        budget_usd: float | None,
    ) -> None:
        self.session = session
        self.no_node: dict[Cell, str] = {}
        self.died: dict[Cell, str] = {}
        self._cluster = cluster
        self._links = session.folder.links()
        self._wait_seconds = wait_seconds
        self._budget_usd = budget_usd
        self._journal = journal
        self._journal.record_nodes(cluster)

    @property
    def spent_usd(self) -> float:
        """Dollars that the run has cost until now."""
        return self._meter().usd or 0.0

    def replan(self) -> tuple[list[Observation], Plan]:
        """Observations until now, and the plan that they leave, which is written to the run."""
        observations = self.session.folder.observations()
        plan = self.session.plan(self._cluster, observations).after(self.no_node, self.died)
        self.session.writer.write(PLAN, plan)
        return observations, plan

    def measure(
        self, wanted: Mapping[Cell, MeasurementRequest], plan: Plan, log_to: Sequence[Tool]
    ) -> None:
        """Measure cells of a plan, and log their trials to tools."""
        folder, name = self.session.folder.storage.local_folder(), self.session.spec.name
        loggers = tune_callbacks(log_to, folder, name, list(wanted))
        to_simulate = sum(cell.simulated for cell in plan.pending)
        batch = _Batch(self._cluster, len(plan.complete), to_simulate, loggers)
        scheduler = self._measure(wanted, batch)
        self.no_node |= scheduler.no_node
        self.died |= scheduler.died

    def retime_slow_cells(self) -> bool:
        """Time the batches of slow nodes again, where another node with that GPU is up.

        Returns:
            Whether anything was timed.
        """
        slow = slow_nodes(self.session.folder.observations())
        if not slow:
            return False
        # Nodes may have joined whose GPUs the sweep began without.
        cluster = cluster_now()
        reasons = {node.node_id: node.text for node in slow}
        out = {*reasons, *self._journal.faults.nodes_out(), *cluster.leaving}
        sizes: dict[Cell, list[int]] = defaultdict(list)
        for cell, sizes_on_node in (item for node in slow for item in node.standing.items()):
            resources = self._request(cluster, cell)
            if resources is not None and cluster.holding(resources, out, nodes=cell.nodes):
                sizes[cell] += sizes_on_node
        if not sizes:
            return False
        nodes = "; ".join(reasons.values())
        trials = "1 trial" if len(sizes) == 1 else f"{len(sizes)} trials"
        if self._meter().reaches(self._budget_usd):
            logger.info("%s: the budget is spent before timing %s again", nodes, trials)
            return False
        logger.info("%s: timing %s again elsewhere", nodes, trials)
        wanted = {cell: MeasurementRequest(timed=tuple(timed)) for cell, timed in sizes.items()}
        self._measure(wanted, _Batch(cluster, nodes_out=reasons))
        return True

    def profile(self, plan: Plan) -> None:
        """Profile the complete cells of a plan."""
        folder = self.session.folder
        # A cell may have been measured on a GPU that no node has now.
        largest = {
            cell: batch_size
            for cell, batch_size in self.session.largest_to_profile(plan).items()
            if self._request(self._cluster, cell)
        }
        if not largest:
            return
        if self._meter().reaches(self._budget_usd):
            logger.info(
                "%s: the budget is spent: %d cells are not profiled", folder.path, len(largest)
            )
            return
        logger.info("%s: profiling %d cells", folder.path, len(largest))
        profiles = by_cell(folder.profiles())

        def task(cell: Cell) -> ProfileTask | None:
            sizes = sizes_to_profile(largest[cell], profiles[cell])
            if not sizes:
                return None
            return ProfileTask(
                trial=self._trial(cell, (), self._cluster),
                rule=ProfileRule(),
                batch_sizes=tuple(sizes),
                done=tuple(profiles[cell]),
            )

        self._execute(list(largest), task, profiles, _Batch(self._cluster))

    def _meter(self) -> Meter:
        """Meter of the run until now, with the faults that a bucket may still lack."""
        session, faults = self.session, self._journal.faults.faults
        return Meter(session.spec, session.rates, session.folder.logged(), faults)

    def _measure(self, wanted: Mapping[Cell, MeasurementRequest], batch: _Batch) -> Scheduler:
        observations = by_cell(self.session.folder.observations())
        # A run may have too many cells to go through all of them for every trial.
        subjects: dict[object, list[Cell]] = defaultdict(list)
        for one in dict.fromkeys((*observations, *wanted)):
            subjects[memory_subject(one)].append(one)

        def task(cell: Cell) -> TrialTask | None:
            request = wanted[cell]
            alike = [o for c in subjects[memory_subject(cell)] for o in observations[c]]
            trial = self._trial(cell, alike, batch.cluster).model_copy(
                update={
                    "timed": request.timed,
                    "most_seconds": request.most_seconds,
                    "slow_nodes": tuple(batch.nodes_out),
                    "linked": linked_nodes(self._links, cell),
                }
            )
            return None if next_probe(trial, trial.done) is None else trial

        return self._execute(list(wanted), task, observations, batch)

    def _request(self, cluster: ClusterResources, cell: Cell) -> Mapping[str, float] | None:
        """Resources that a trial requests of each of its nodes; None without such a GPU."""
        return cluster.trial_resources(self.session.catalog.gpu(cell.device), cell.ranks_per_node)

    def _trial(
        self, cell: Cell, observations: Sequence[Observation], cluster: ClusterResources
    ) -> TrialTask:
        catalog = self.session.catalog
        threads = cluster.threads(catalog.gpu(cell.device))
        return trial_task(self.session.spec, catalog, cell, observations, threads=threads)

    def _execute(
        self,
        cells: Sequence[Cell],
        task: Callable[[Cell], Task | None],
        results: Mapping[Cell, list[Any]],
        batch: _Batch,
    ) -> Scheduler:
        """Run trials to their end; the scheduler has the cells that could not be measured.

        New results of a cell are added to ``results``, from which ``task`` makes its next task.
        """
        session, journal, meter = self.session, self._journal, self._meter()
        resources = {
            cell.devices: self._request(batch.cluster, cell)
            for cell in {c.devices: c for c in cells}.values()
        }
        with session.progress(cells, complete=batch.complete) as progress:
            progress.spent_usd, progress.to_simulate = meter.usd, batch.to_simulate

            def note(fault: Fault) -> None:
                journal.record_fault(fault)
                meter.lost(fault)
                progress.spent_usd = meter.usd
                if fault.cell is None:  # else the line of its trial says it
                    progress.remark(f"{fault.node or fault.gpu}: {fault.reason}")

            scheduler = Scheduler(
                cells,
                task,
                {devices: request or {} for devices, request in resources.items()},
                batch.cluster,
                wait_seconds=self._wait_seconds,
                nodes_out={**batch.nodes_out, **journal.faults.nodes_out()},
                note=note,
                is_spent=partial(meter.reaches, self._budget_usd),
            )
            recorder = ObservationRecorder(session.writer, progress, meter, results, self._links)
            run_trials(scheduler, recorder, cluster_now, batch.loggers, journal.record_nodes)
        return scheduler
