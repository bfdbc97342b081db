"""What a sweep has cost so far, and is costing. Pure."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from gpu_catalog.catalog import Catalog
from gpu_catalog.offer import Offer
from orchestrator.cost import MINUTES_PER_HOUR, SECONDS_PER_HOUR
from orchestrator.price_files import OWN
from orchestrator.sweep import SweepSpec
from trials.observation import Observation
from trials.profile import Logged

THIS_MACHINE = "cpu"


@dataclass(frozen=True, slots=True)
class Spending:
    """What one GPU of a run has cost.

    Attributes:
        gpu: key of the GPU that ran.
        probes: that it ran.
        probe_seconds: that they took.
        startup_seconds: of a node, as assumed.
        offer: the cheapest of that GPU; absent where nobody is paid, or no price is known.
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
            offer=rented_offer(catalog, gpu),
        )
        for gpu, each in seconds.items()
    ]


def rented_offer(catalog: Catalog, gpu: str) -> Offer | None:
    """The cheapest offer of a GPU; None where there is none, or where nobody is paid.

    What the catalog has for ``cpu`` stands in for the machine that runs the sweep, which is there
    already; a price of one's own is one.
    """
    paid = [o for o in catalog.offers(gpu) if gpu != THIS_MACHINE or o.provider == OWN]
    return min(paid, key=lambda o: o.usd_per_hour, default=None)


def spent_usd(spec: SweepSpec, catalog: Catalog, observations: Sequence[Observation]) -> float:
    """What a run has cost so far, each GPU at its cheapest offer; nothing where it has none."""
    return sum(each.usd or 0.0 for each in spending(spec, catalog, observations))


class Meter:
    """Counts dollars while a sweep runs.

    Args:
        spec: of the sweep.
        catalog: its offers.
        known: what was observed and profiled before.
    """

    def __init__(self, spec: SweepSpec, catalog: Catalog, known: Sequence[Logged] = ()) -> None:
        self._startup = spec.workload.overheads.startup_minutes / MINUTES_PER_HOUR
        self._rates: dict[str, float | None] = {}
        self._catalog = catalog
        self.usd: float | None = None
        for observation in known:
            self.observed(observation)

    def observed(self, observation: Logged) -> None:
        """A probe or a profile ended; dollars stay absent until one has cost any."""
        if observation.cell.simulated:
            return
        gpu = observation.cell.device
        hours = observation.seconds / SECONDS_PER_HOUR
        if gpu not in self._rates:
            offer = rented_offer(self._catalog, gpu)
            self._rates[gpu] = None if offer is None else offer.usd_per_hour
            hours += self._startup
        rate = self._rates[gpu]
        if rate is not None:
            self.usd = (self.usd or 0.0) + hours * rate

    def reaches(self, budget_usd: float | None) -> bool:
        """Whether nothing is left of a budget; there always is where there is none."""
        return budget_usd is not None and (self.usd or 0.0) >= budget_usd
