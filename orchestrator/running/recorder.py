"""Records that a driver keeps while trials run: observations, faults and the rentals of nodes."""

from collections.abc import Callable

from orchestrator.planning.cluster_resources import ClusterResources
from orchestrator.planning.faults import Fault, Faults
from orchestrator.planning.node_pricing import NodePrices
from orchestrator.planning.spending import Meter
from orchestrator.run_folder.file_names import FAULTS, RENTED
from orchestrator.run_folder.observation_writer import ObservationWriter
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.running.progress import Progress
from trials.records.cell import Cell
from trials.records.observation import Observation
from trials.records.profile import Logged, Profiled


class ObservationRecorder:
    """Writes the results of trials to the run, shows them, and counts their costs."""

    def __init__(
        self,
        writer: ObservationWriter,
        progress: Progress,
        meter: Meter | None = None,
        learn: Callable[[Logged], None] = lambda _: None,
    ) -> None:
        self._writer = writer
        self._progress = progress
        self._meter = meter
        self._learn = learn
        self.observations: list[Observation] = []

    def started(self, cell: Cell) -> None:
        """Show that a trial runs."""
        self._progress.started(cell)

    def observed(self, result: Logged) -> None:
        """Record a probe or a profile that ended, unless the run has it."""
        if not self._writer.append(result):
            return
        self._learn(result)
        if self._meter is not None:
            self._meter.observed(result)
            self._progress.spent_usd = self._meter.usd
        if isinstance(result, Profiled):
            self._progress.profiled(result)
        else:
            self.observations.append(result)
            self._progress.observed(result)

    def ended(self, cell: Cell, error: str | None) -> None:
        """Show that a trial ended."""
        self._progress.ended(cell, error)


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
