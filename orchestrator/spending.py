"""What a sweep has cost so far, and is costing. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gpu_catalog.catalog import Catalog
from gpu_catalog.offer import Offer
from orchestrator.cost import SECONDS_PER_HOUR, SECONDS_PER_MINUTE
from orchestrator.price_files import OWN, stands_in
from orchestrator.sweep import SweepSpec
from trials.profile import Logged


@dataclass(frozen=True, slots=True)
class Spending:
    """What one GPU of a run has cost.

    Attributes:
        gpu: key of the GPU that ran.
        probes: that it ran, and profiles.
        probe_seconds: that they took.
        startup_seconds: of a node, as assumed; none of a machine of one's own.
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


def spending(spec: SweepSpec, catalog: Catalog, logged: Iterable[Logged]) -> list[Spending]:
    """What each GPU that ran has cost: its probes and profiles, and the start of a node."""
    meter = Meter(spec, catalog, logged)
    return list(meter.by_gpu.values())


def rented_offer(catalog: Catalog, gpu: str) -> Offer | None:
    """The cheapest offer of a GPU; None where there is none, or where nobody is paid.

    What the catalog has for ``cpu`` stands in for the machine that runs the sweep, which is there
    already; a price of one's own is one.
    """
    paid = [o for o in catalog.offers(gpu) if not stands_in(gpu, o.provider)]
    return min(paid, key=lambda o: o.usd_per_hour, default=None)


def startup_seconds(startup_minutes: float, offer: Offer | None) -> float:
    """Of a node that is rented; a machine of one's own is there."""
    if offer is None or offer.provider == OWN:
        return 0.0
    return startup_minutes * SECONDS_PER_MINUTE


class Meter:
    """Counts dollars while a sweep runs.

    Args:
        spec: of the sweep.
        catalog: its offers.
        known: what was observed and profiled before.

    Attributes:
        by_gpu: what each GPU has cost, by its key.
    """

    def __init__(self, spec: SweepSpec, catalog: Catalog, known: Iterable[Logged] = ()) -> None:
        self._startup_minutes = spec.workload.overheads.startup_minutes
        self._catalog = catalog
        self.by_gpu: dict[str, Spending] = {}
        for each in known:
            self.observed(each)

    def observed(self, ended: Logged) -> None:
        """A probe or a profile ended."""
        if ended.cell.simulated:
            return
        gpu = ended.cell.device
        before = self.by_gpu.get(gpu)
        if before is None:
            offer = rented_offer(self._catalog, gpu)
            before = Spending(gpu, 0, 0.0, startup_seconds(self._startup_minutes, offer), offer)
        self.by_gpu[gpu] = replace(
            before, probes=before.probes + 1, probe_seconds=before.probe_seconds + ended.seconds
        )

    @property
    def usd(self) -> float | None:
        """Spent so far; absent where nothing that ran is paid for."""
        paid = [each.usd for each in self.by_gpu.values() if each.usd is not None]
        return sum(paid) if paid else None

    def reaches(self, budget_usd: float | None) -> bool:
        """Whether nothing is left of a budget; there always is where there is none."""
        return budget_usd is not None and (self.usd or 0.0) >= budget_usd
