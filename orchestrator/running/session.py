"""A run that a driver writes to, with what its work is planned and priced by."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from gpu_catalog.catalog import Catalog
from orchestrator.planning.cluster_resources import ClusterResources
from orchestrator.planning.node_pricing import NodePrices
from orchestrator.planning.plan import Plan, make_plan
from orchestrator.planning.spending import Meter
from orchestrator.run_folder.load_results import spending_meter
from orchestrator.run_folder.observation_writer import ObservationWriter
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.spec.sweep_spec import SweepSpec
from trials.records.observation import Observation


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

    def meter(self) -> Meter:
        """Meter of the dollars that the run has spent until now."""
        return spending_meter(self.folder, self.spec, self.rates)
