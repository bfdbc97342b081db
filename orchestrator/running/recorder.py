"""Records that a driver keeps while trials run: observations, faults and the rentals of nodes."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
from trials.records.profile import LinkTimes, Logged, Profiled


@dataclass(frozen=True, slots=True)
class ObservationRecorder:
    """Writes the results of trials to the run, shows them, and counts their costs.

    Attributes:
        results: probes or profiles by cell, to which new ones are added.
        links: timed links, to which new ones are added.
        observations: new observations.
    """

    writer: ObservationWriter
    progress: Progress
    meter: Meter | None = None
    results: Mapping[Cell, list[Any]] = field(default_factory=lambda: defaultdict(list))
    links: list[LinkTimes] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)

    def started(self, task: Task) -> None:
        """Show that a trial runs."""
        self.progress.started(task)

    def observed(self, result: Logged) -> None:
        """Record a probe, a profile or a link, unless the run has it."""
        if not self.writer.append(result):
            return
        if self.meter is not None:
            self.meter.observed(result)
            self.progress.spent_usd = self.meter.usd
        if isinstance(result, LinkTimes):
            self.links.append(result)
            if result.detail is not None:
                self.progress.remark(f"{result.cell.key}: links were not timed: {result.detail}")
            return
        self.results[result.cell].append(result)
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
