"""What a driver keeps while trials run: what they report, and what it learns beside that."""

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
    """Keeps what the trials report, shows it, and counts what it costs.

    Args:
        writer: to the run's observations.
        progress: shows them.
        meter: counts what they cost; absent where nobody asks.
        learn: is told of all that is kept.
    """

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
        self.seen: list[Observation] = []

    def started(self, cell: Cell) -> None:
        """A trial runs."""
        self._progress.started(cell)

    def observed(self, observation: Logged) -> None:
        """A probe or a profile ended."""
        if not self._writer.append(observation):
            return
        self._learn(observation)
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
        self._progress.ended(cell, error)


class RunJournal:
    """Keeps what a sweep learns beside its observations: what goes wrong, and of its nodes.

    It is written the way observations are: no trial waits for a bucket that is away.

    Args:
        folder: of the run.
        writer: to it.
        rates: are told what nodes say that they are rented as.
    """

    def __init__(self, folder: RunFolder, writer: ObservationWriter, rates: NodePrices) -> None:
        self._writer = writer
        self.rates = rates
        self.faults = folder.faults()

    def note(self, fault: Fault) -> None:
        """Writes down what went wrong."""
        self.faults = Faults(faults=(*self.faults.faults, fault))
        self._writer.write(FAULTS, self.faults)

    def saw(self, cluster: ClusterResources) -> None:
        """Writes down what nodes are rented as that were not there before."""
        rented = self.rates.rented.with_nodes(cluster.nodes)
        if rented is not self.rates.rented:
            self._writer.write(RENTED, rented)
            self.rates.rented = rented
