"""A run that a driver writes to, with what its work is planned and priced by."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from gpu_catalog.catalog import Catalog
from orchestrator.planning.cluster_resources import ClusterResources
from orchestrator.planning.node_pricing import NodePrices
from orchestrator.planning.plan import Plan, make_plan
from orchestrator.run_folder.observation_writer import ObservationWriter
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.running.progress import Progress
from orchestrator.spec.sweep_spec import SweepSpec
from trials.records.cell import Cell, by_cell
from trials.records.observation import Observation, largest_batch
from trials.records.profile import sizes_to_profile


@dataclass(frozen=True, slots=True)
class SweepSession:
    """A run that a driver writes to."""

    folder: RunFolder
    writer: ObservationWriter
    spec: SweepSpec
    rates: NodePrices
    progress_stream: TextIO | None = None

    @property
    def catalog(self) -> Catalog:
        """GPUs and offers of the sweep."""
        return self.rates.catalog

    def plan(self, cluster: ClusterResources, observations: Sequence[Observation]) -> Plan:
        """Plan of the run on a cluster."""
        return make_plan(self.spec, self.catalog, cluster, observations)

    def progress(self, cells: Sequence[Cell], *, complete: int) -> Progress:
        """Progress display of trials, of a sweep with so many complete cells."""
        earlier, stream = self.folder.observations(), self.progress_stream
        return Progress(cells, complete=complete, earlier=earlier, stream=stream)

    def largest_to_profile(self, plan: Plan) -> dict[Cell, int]:
        """Largest batch size of each complete cell that a device measured and profiles lack.

        Several GPUs are not profiled.
        """
        observations = by_cell(self.folder.observations())
        profiles = by_cell(self.folder.profiles())
        sizes = {}
        for cell in plan.complete:
            if cell.simulated or cell.capped_on is not None or cell.parallel is not None:
                continue
            largest = largest_batch(observations[cell])
            if largest is not None and sizes_to_profile(largest[0], profiles[cell]):
                sizes[cell] = largest[0]
        return sizes
