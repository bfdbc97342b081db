"""Records that a driver keeps while trials run: observations, faults and the rentals of nodes."""

from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.planning.cluster_resources import ClusterResources
from orchestrator.planning.faults import Fault, Faults
from orchestrator.planning.node_pricing import NodePrices
from orchestrator.planning.spending import Meter
from orchestrator.run_folder.file_names import FAULTS, RENTED
from orchestrator.run_folder.observation_writer import ObservationWriter
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.running.progress import Progress
from orchestrator.scheduling.node_queue import Task
from trials.records.cell import Cell
from trials.records.observation import Observation
from trials.records.profile import Logged, Profiled


@dataclass(frozen=True, slots=True)
class ObservationRecorder:
    """Writes the results of trials to the run, shows them, and counts their costs."""

    writer: ObservationWriter
    progress: Progress
    meter: Meter | None = None
    learn: Callable[[Logged], None] = lambda _: None
    observations: list[Observation] = field(default_factory=list)

    def started(self, task: Task) -> None:
        """Show that a trial runs."""
        self.progress.started(task)

    def observed(self, result: Logged) -> None:
        """Record a probe or a profile that ended, unless the run has it."""
        if not self.writer.append(result):
            return
        self.learn(result)
        if self.meter is not None:
            self.meter.observed(result)
            self.progress.spent_usd = self.meter.usd
        if isinstance(result, Profiled):
            self.progress.profiled(result)
        else:
            self.observations.append(result)
            self.progress.observed(result)

    def ended(self, cell: Cell, error: str | None) -> None:
        """Show that a trial ended."""
        self.progress.ended(cell, error)


class RunJournal:
    """Records the faults of a sweep and the rentals of its nodes.

    Files are written through the writer of observations: no trial waits for a bucket that does not
    answer.
    """

    def __init__(self, folder: RunFolder, writer: ObservationWriter, rates: NodePrices) -> None:
        self._writer = writer
        self.rates = rates
        self.faults = folder.faults()

    def record_fault(self, fault: Fault) -> None:
        """Record a fault."""
        self.faults = Faults(faults=(*self.faults.faults, fault))
        self._writer.write(FAULTS, self.faults)

    def record_nodes(self, cluster: ClusterResources) -> None:
        """Record the rentals that new nodes report."""
        rented = self.rates.rented.with_nodes(cluster.nodes)
        if rented is not self.rates.rented:
            self._writer.write(RENTED, rented)
            self.rates.rented = rented
