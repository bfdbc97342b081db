"""Dollars that a sweep has spent so far. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from gpu_catalog.number_text import dollars
from gpu_catalog.offer import Identity, Offer
from orchestrator.planning.faults import Fault
from orchestrator.planning.node_pricing import NodePrices
from orchestrator.pricing.catalog_file import OWN
from orchestrator.spec.job import SECONDS_PER_HOUR, SECONDS_PER_MINUTE
from orchestrator.spec.sweep_spec import SweepSpec
from trials.records.profile import LinkTimes, Logged, Profiled


@dataclass(slots=True)
class Spending:
    """Spending of a run on one GPU, or on several at once, at one offer.

    Attributes:
        gpu: ``Cell.devices`` of its trials.
        offer: offer that its nodes are priced by, at the price of all nodes of a trial; None where
            they are free or have no known price.
        start_seconds: assumed seconds to start a node; 0 for a machine that the user owns.
        nodes_each: nodes of a trial.
        probes: number of probes and profiles.
        probe_seconds: their seconds, and those in which links were timed.
        lost_seconds: seconds of trials that died, since their last report.
    """

    gpu: str
    offer: Offer | None
    start_seconds: float
    nodes_each: int = 1
    probes: int = 0
    probe_seconds: float = 0.0
    lost_seconds: float = 0.0
    _hosts: dict[str, str] = field(default_factory=dict)

    def on(self, node_id: str | None, host: str | None = None) -> None:
        """Count a node.

        A restart of Ray gives a machine another node id. Nodes that report the same host are
        counted once, since the machine is not rented again.
        """
        if node_id is not None and (host is not None or node_id not in self._hosts):
            self._hosts[node_id] = host or node_id
        elif host is not None:
            self._hosts[host] = host

    @property
    def nodes(self) -> int:
        """Number of started nodes; at least those of a trial."""
        return len(set(self._hosts.values())) or self.nodes_each

    @property
    def startup_seconds(self) -> float:
        """Seconds to start all nodes, those of a trial at once."""
        return self.nodes / self.nodes_each * self.start_seconds

    @property
    def usd(self) -> float | None:
        """Dollars at that offer, without the time that nodes were idle."""
        if self.offer is None:
            return None
        seconds = self.startup_seconds + self.probe_seconds + self.lost_seconds
        return seconds / SECONDS_PER_HOUR * self.offer.usd_per_hour


def startup_seconds(startup_minutes: float, offer: Offer | None) -> float:
    """Seconds to start a rented node; 0 for a machine that the user owns."""
    if offer is None or offer.provider == OWN:
        return 0.0
    return startup_minutes * SECONDS_PER_MINUTE


class Meter:
    """Counts dollars while a sweep runs."""

    def __init__(
        self,
        spec: SweepSpec,
        rates: NodePrices,
        logged: Iterable[Logged] = (),
        faults: Iterable[Fault] = (),
    ) -> None:
        self._startup_minutes = spec.workload.overheads.expected_startup_minutes
        self._rates = rates
        self._spent: dict[tuple[str, Identity | None], Spending] = {}
        self._of_node: dict[tuple[str, str | None], Spending] = {}
        for ended in logged:
            self.observed(ended)
        for fault in faults:
            self.lost(fault)

    @property
    def spent(self) -> list[Spending]:
        """Spending by GPU and offer."""
        return list(self._spent.values())

    def observed(self, ended: Logged) -> None:
        """Count a probe or profile that ended, and the time in which links were timed."""
        if ended.cell.simulated:
            return
        where = ended.environment
        node_id = None if where is None else where.node_id
        spending = self._spending(ended.cell.devices, node_id)
        spending.on(node_id, None if where is None else where.host)
        spending.probe_seconds += ended.seconds
        if isinstance(ended, LinkTimes):
            for one in ended.node_ids:
                spending.on(one)
            return
        if not isinstance(ended, Profiled) and ended.measurement is not None:
            for rank in ended.measurement.ranks:
                spending.on(rank.node_id)
        spending.probes += 1

    def lost(self, fault: Fault) -> None:
        """Count the work that a fault lost, which is paid for as well."""
        if not fault.lost_seconds:
            return
        spending = self._spending(fault.gpu, fault.node_id)
        spending.on(fault.node_id)
        spending.lost_seconds += fault.lost_seconds

    def _spending(self, gpu: str, node_id: str | None) -> Spending:
        spending = self._of_node.get((gpu, node_id))
        if spending is None:
            offer = self._rates.offer(gpu, node_id)
            start = startup_seconds(self._startup_minutes, offer)
            key = gpu, None if offer is None else offer.identity
            _, _, nodes_each = self._rates.gpu_and_counts(gpu)
            spending = self._spent.setdefault(key, Spending(gpu, offer, start, nodes_each))
            self._of_node[gpu, node_id] = spending
        return spending

    @property
    def usd(self) -> float | None:
        """Dollars spent so far; None where nothing that ran is paid for."""
        paid = [spending.usd for spending in self._spent.values() if spending.usd is not None]
        return sum(paid) if paid else None

    def reaches(self, budget_usd: float | None) -> bool:
        """Whether a budget is spent; without a budget, never."""
        return budget_usd is not None and (self.usd or 0.0) >= budget_usd

    def text(self) -> Iterator[str]:
        """Lines on the dollars spent and their assumptions; none where nothing is paid for."""
        if self.usd is None:
            return
        lost = sum(s.lost_seconds for s in self.spent if s.offer is not None)
        starts = sum(s.nodes for s in self.spent if s.start_seconds)
        listed = "probes"
        if lost:
            listed += f", {lost:.0f} s lost with trials that died"
        if starts:
            minutes = f"{self._startup_minutes:g} min, assumed"
            listed += f", {starts} start{'s' * (starts > 1)} of a node ({minutes})"
        yield f"spent: ${dollars(self.usd)}: {listed}"
        yield self._rates.text((s.gpu, s.offer) for s in self.spent)
