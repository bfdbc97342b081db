"""What a sweep has cost so far. Pure."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from gpu_catalog.catalog import Catalog
from gpu_catalog.offer import Offer
from orchestrator.cost import MINUTES_PER_HOUR, SECONDS_PER_HOUR
from orchestrator.sweep import SweepSpec
from trials.observation import Observation


@dataclass(frozen=True, slots=True)
class Spending:
    """What one GPU of a run has cost.

    Attributes:
        gpu: key of the GPU that ran.
        probes: that it ran.
        probe_seconds: that they took.
        startup_seconds: of a node, as assumed.
        offer: the cheapest of that GPU; absent where the catalog has none.
    """

    gpu: str
    probes: int
    probe_seconds: float
    startup_seconds: float
    offer: Offer | None

    @property
    def usd(self) -> float | None:
        """By that offer; time that a node was up and idle is not in it."""
        if self.offer is None:
            return None
        hours = (self.startup_seconds + self.probe_seconds) / SECONDS_PER_HOUR
        return hours * self.offer.usd_per_hour


def spending(
    spec: SweepSpec, catalog: Catalog, observations: Sequence[Observation]
) -> list[Spending]:
    """What each GPU that ran has cost: its probes, and the start of a node."""
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for o in observations:
        if not o.cell.simulated:
            seconds[o.cell.device].append(o.seconds)
    startup = spec.workload.overheads.startup_minutes / MINUTES_PER_HOUR * SECONDS_PER_HOUR
    return [
        Spending(
            gpu=gpu,
            probes=len(each),
            probe_seconds=sum(each),
            startup_seconds=startup,
            offer=min(catalog.offers(gpu), key=lambda o: o.usd_per_hour, default=None),
        )
        for gpu, each in seconds.items()
    ]


def spent_usd(spec: SweepSpec, catalog: Catalog, observations: Sequence[Observation]) -> float:
    """What a run has cost so far, each GPU at its cheapest offer; nothing where it has none."""
    return sum(each.usd or 0.0 for each in spending(spec, catalog, observations))
