"""What a sweep has cost so far, and is costing. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from gpu_catalog.offer import Identity, Offer
from orchestrator.planning.faults import Fault
from orchestrator.planning.node_pricing import NodePrices
from orchestrator.pricing.catalog_file import OWN
from orchestrator.spec.job import SECONDS_PER_HOUR, SECONDS_PER_MINUTE
from orchestrator.spec.sweep_spec import SweepSpec
from trials.records.profile import Logged


@dataclass(slots=True)
class Spending:
    """What one GPU of a run has cost, at one offer.

    Attributes:
        gpu: key of the GPU that ran.
        offer: what its nodes are taken to be rented as; absent where nobody is paid, or no price is
            known.
        start_seconds: of a node, as assumed; none of a machine of one's own.
        probes: that it ran, and profiles.
        probe_seconds: that they took.
        lost_seconds: of trials that died, since their last word.
    """

    gpu: str
    offer: Offer | None
    start_seconds: float
    probes: int = 0
    probe_seconds: float = 0.0
    lost_seconds: float = 0.0
    _hosts: dict[str, str] = field(default_factory=dict)

    def on(self, node_id: str | None, host: str | None = None) -> None:
        """A node did something.

        Ray started anew on a machine makes it another node, which nobody has to rent again: that
        one is counted which reports the same host.
        """
        if node_id is not None and (host is not None or node_id not in self._hosts):
            self._hosts[node_id] = host or node_id
        elif host is not None:
            self._hosts[host] = host

    @property
    def nodes(self) -> int:
        """That were started, as far as they are known: one at least."""
        return len(set(self._hosts.values())) or 1

    @property
    def startup_seconds(self) -> float:
        """Of all of them."""
        return self.nodes * self.start_seconds

    @property
    def usd(self) -> float | None:
        """By that offer; time that a node was up and idle is not in it."""
        if self.offer is None:
            return None
        seconds = self.startup_seconds + self.probe_seconds + self.lost_seconds
        return seconds / SECONDS_PER_HOUR * self.offer.usd_per_hour


def startup_seconds(startup_minutes: float, offer: Offer | None) -> float:
    """Of a node that is rented; a machine of one's own is there."""
    if offer is None or offer.provider == OWN:
        return 0.0
    return startup_minutes * SECONDS_PER_MINUTE


class Meter:
    """Counts dollars while a sweep runs.

    Args:
        spec: of the sweep.
        rates: what its nodes cost.
        known: what was observed and profiled before.
        faults: what went wrong before.
    """

    def __init__(
        self,
        spec: SweepSpec,
        rates: NodePrices,
        known: Iterable[Logged] = (),
        faults: Iterable[Fault] = (),
    ) -> None:
        self._startup_minutes = spec.workload.overheads.startup_minutes
        self._rates = rates
        self._spent: dict[tuple[str, Identity | None], Spending] = {}
        self._of_node: dict[tuple[str, str | None], Spending] = {}
        for each in known:
            self.observed(each)
        for fault in faults:
            self.lost(fault)

    @property
    def spent(self) -> list[Spending]:
        """On each GPU, at each offer that its nodes are rented as."""
        return list(self._spent.values())

    def observed(self, ended: Logged) -> None:
        """A probe or a profile ended."""
        if ended.cell.simulated:
            return
        where = ended.environment
        node_id = None if where is None else where.node_id
        spending = self._spending(ended.cell.device, node_id)
        spending.on(node_id, None if where is None else where.host)
        spending.probes += 1
        spending.probe_seconds += ended.seconds

    def lost(self, fault: Fault) -> None:
        """Something went wrong: what a trial did since its last word is paid for as well."""
        if not fault.lost_seconds:
            return
        spending = self._spending(fault.gpu, fault.node_id)
        spending.on(fault.node_id)
        spending.lost_seconds += fault.lost_seconds

    def _spending(self, gpu: str, node_id: str | None) -> Spending:
        found = self._of_node.get((gpu, node_id))
        if found is None:
            offer = self._rates.offer(gpu, node_id)
            start = startup_seconds(self._startup_minutes, offer)
            key = gpu, None if offer is None else offer.identity
            found = self._spent.setdefault(key, Spending(gpu, offer, start))
            self._of_node[gpu, node_id] = found
        return found

    @property
    def usd(self) -> float | None:
        """Spent so far; absent where nothing that ran is paid for."""
        paid = [each.usd for each in self._spent.values() if each.usd is not None]
        return sum(paid) if paid else None

    def reaches(self, budget_usd: float | None) -> bool:
        """Whether nothing is left of a budget; there always is where there is none."""
        return budget_usd is not None and (self.usd or 0.0) >= budget_usd

    def text(self) -> Iterator[str]:
        """What was spent, on what, and what of it is assumed; nothing where nobody is paid."""
        if self.usd is None:
            return
        lost = sum(each.lost_seconds for each in self.spent if each.offer is not None)
        starts = sum(each.nodes for each in self.spent if each.start_seconds)
        parts = [
            "probes",
            f"{lost:.0f} s lost with trials that died" if lost else "",
            f"{starts} start{'s' * (starts > 1)} of a node ({self._startup_minutes:g} min, assumed)"
            if starts
            else "",
        ]
        listed = ", ".join(part for part in parts if part)
        yield f"spent: ${self.usd:.3g}: {listed}"
        yield self._rates.text((each.gpu, each.offer) for each in self.spent)
