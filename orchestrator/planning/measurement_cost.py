"""How long measurements take, and what is left of a sweep will: hours and dollars. Pure."""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpu_catalog.offer import Offer
from orchestrator.markdown_table import table
from orchestrator.planning.cluster_resources import ClusterResources
from orchestrator.planning.node_pricing import NodePrices
from orchestrator.planning.plan import Plan
from orchestrator.planning.spending import startup_seconds
from orchestrator.spec.job import SECONDS_PER_HOUR, SECONDS_PER_MINUTE
from orchestrator.spec.sweep_spec import SweepSpec
from trials.batch_ladder import batch_ladder
from trials.records.cell import Cell
from trials.records.observation import Observation, by_cell, largest_batch

SEARCH_PROBES = 5  # of a cell whose largest batch is not known, where no trial tells
PROBE_SECONDS = 60.0  # a build and a search probe, or a timed batch, where none of a run tells


class MeasurementCost:
    """How long measurements take: by those of the run on the same GPU, else as assumed.

    Args:
        observations: of the run.
        startup_minutes: from renting a node to its first step.
        rates: what nodes are rented as, and which are one's own; absent where none is.
    """

    def __init__(
        self,
        observations: Sequence[Observation],
        startup_minutes: float,
        rates: NodePrices | None = None,
    ) -> None:
        self._startup_minutes = startup_minutes
        self._rates = rates
        self._searches: dict[str, list[float]] = defaultdict(list)
        self._visits: dict[str, list[float]] = defaultdict(list)
        searched: dict[Cell, float] = defaultdict(float)  # seconds
        for o in observations:
            if o.cell.simulated:
                continue
            if o.purpose == "ladder":
                self._visits[o.cell.device].append(o.seconds)
            else:
                searched[o.cell] += o.seconds
        for cell, seconds in searched.items():
            self._searches[cell.device].append(seconds)

    def is_up(self, device: str) -> bool:
        """Whether something was measured on that GPU: its node has started."""
        return device in self._visits or device in self._searches

    def start_seconds(self, device: str) -> float:
        """Of a node, where none has started yet."""
        if self.is_up(device):
            return 0.0
        if self._rates is None:
            return self._startup_minutes * SECONDS_PER_MINUTE
        return startup_seconds(self._startup_minutes, self._rates.offer(device))

    def visit_seconds(self, device: str) -> float:
        """Of one timed batch."""
        visits = self._visits.get(device)
        return statistics.median(visits) if visits else PROBE_SECONDS

    def search_seconds(self, device: str) -> float:
        """Of all the probes that find a cell's largest batch."""
        searches = self._searches.get(device)
        return statistics.median(searches) if searches else SEARCH_PROBES * PROBE_SECONDS


@dataclass(frozen=True, slots=True)
class RemainingWork:
    """What one GPU has left to measure.

    Attributes:
        gpu: key of the GPU that runs it.
        trials: that are left.
        at_a_time: trials that run at a time; one where the cluster has no such GPU yet.
        nodes: that are there, and that are to be started, in words.
        start_seconds: of a node, where none has started yet.
        probe_seconds: of all probes, one after the other; absent where that is not known: of a CPU,
            before its first probes, since what it can do is anything.
        offer: what its nodes are taken to be rented as; absent where none is paid, or known.
        is_assumed: whether nothing was measured there that tells how long a probe takes.
    """

    gpu: str
    trials: int
    at_a_time: int
    nodes: str
    start_seconds: float
    probe_seconds: float | None
    offer: Offer | None
    is_assumed: bool

    @property
    def hours(self) -> float | None:
        """Until the last of them has ended."""
        if self.probe_seconds is None:
            return None
        side_by_side = min(self.trials, self.at_a_time)
        return (self.start_seconds + self.probe_seconds / side_by_side) / SECONDS_PER_HOUR

    @property
    def usd(self) -> float | None:
        """Of the nodes, each from its start to its last probe."""
        if self.hours is None or self.offer is None:
            return None
        return self.hours * min(self.trials, self.at_a_time) * self.offer.usd_per_hour


def remaining_work(
    spec: SweepSpec,
    rates: NodePrices,
    cluster: ClusterResources,
    plan: Plan,
    observations: Sequence[Observation],
) -> list[RemainingWork]:
    """What each GPU has left to measure, in the order of the plan; nothing of what is simulated."""
    effort = MeasurementCost(observations, spec.workload.overheads.startup_minutes, rates)
    seen = by_cell(observations)
    cells: dict[str, list[Cell]] = defaultdict(list)
    for cell in plan.pending:
        if not cell.simulated:
            cells[cell.device].append(cell)
    found = []
    for device, pending in cells.items():
        gpu = rates.catalog.gpu(device)
        is_known = effort.is_up(device) or gpu.kind == "cuda"
        found.append(
            RemainingWork(
                gpu=device,
                trials=len(pending),
                at_a_time=max(cluster.at_a_time(gpu), 1),
                nodes=cluster.nodes_text(gpu),
                start_seconds=effort.start_seconds(device),
                probe_seconds=sum(_seconds(spec, c, seen[c], effort) for c in pending)
                if is_known
                else None,
                offer=rates.offer(device),
                is_assumed=not effort.is_up(device),
            )
        )
    return found


def trial_seconds(spec: SweepSpec, device: str, effort: MeasurementCost) -> float:
    """Of a whole trial of which nothing is known."""
    visits = len(batch_ladder(spec.max_batch_size, seed_text=""))
    return effort.search_seconds(device) + visits * effort.visit_seconds(device)


def _seconds(
    spec: SweepSpec, cell: Cell, seen: Sequence[Observation], effort: MeasurementCost
) -> float:
    """Of what a trial has left."""
    known = largest_batch(seen)
    if known is None:
        whole = trial_seconds(spec, cell.device, effort)
        return whole if cell.capped_on is None else effort.search_seconds(cell.device)
    made = sum(o.purpose == "ladder" and o.measurement is not None for o in seen)
    visits = 0 if cell.capped_on is not None else len(batch_ladder(known[0], seed_text=""))
    return max(visits - made, 1) * effort.visit_seconds(cell.device)


@dataclass(frozen=True, slots=True)
class Budget:
    """What a sweep may cost.

    Attributes:
        budget_usd: in all; absent for no limit.
        spent_usd: by now.
        profiles: whether profiles follow, which nobody has counted.
    """

    budget_usd: float | None = None
    spent_usd: float = 0.0
    profiles: bool = False


def expected(left: Sequence[RemainingWork], purse: Budget, rates: NodePrices) -> Iterator[str]:
    """A table of the GPUs, and lines on the whole; where no time is known, a line that says so."""
    if not left:
        return
    if all(each.hours is None for each in left):
        yield (
            f"expected: not known before the first probes of {', '.join(each.gpu for each in left)}"
        )
        return
    rows = [
        (
            each.gpu,
            each.trials,
            each.nodes,
            each.at_a_time,
            "not known yet" if each.hours is None else f"{each.hours:.2g}",
            "" if each.offer is None else f"{each.offer.usd_per_hour:.3g}",
            "" if each.usd is None else _dollars(each.usd),
        )
        for each in left
    ]
    yield table(("GPU", "trials", "nodes", "at a time", "hours", "$/h", "$"), rows)
    yield from expected_text(left, purse, rates)


def expected_text(left: Sequence[RemainingWork], purse: Budget, rates: NodePrices) -> Iterator[str]:
    """Lines on the whole: hours until the last GPU is done, dollars, and whether they are there.

    Args:
        left: to measure.
        purse: what it may cost.
        rates: by which it is priced, as a line says.
    """
    hours = [each.hours for each in left if each.hours is not None]
    usd = [each.usd for each in left if each.usd is not None]
    if not hours:
        return
    unknown = [each.gpu for each in left if each.hours is None]
    unknown += ["profiles"] if purse.profiles else []
    without = f", {', '.join(unknown)} not counted" if unknown else ""
    cost = f" and ${_dollars(sum(usd))}" if usd else ""
    yield f"expected: {max(hours):.2g} h{cost}{without}{_assumed(left)}"
    priced = rates.text((each.gpu, each.offer) for each in left if each.hours is not None)
    if priced:
        yield priced
    if purse.budget_usd is None:
        return
    if not usd:
        yield "nothing here is rented at a known price: the budget counts nothing"
    elif purse.spent_usd + sum(usd) > purse.budget_usd:
        spent = f", ${purse.spent_usd:,.2f} of it spent" if purse.spent_usd else ""
        yield (
            f"the budget is ${purse.budget_usd:g}{spent}: what comes first is measured until it "
            "is spent"
        )


def _dollars(usd: float) -> str:
    """To the cent, or as small as they are."""
    return f"{usd:,.2f}" if usd >= 1 or usd == 0 else f"{usd:.2g}"


def _assumed(left: Sequence[RemainingWork]) -> str:
    told = [each for each in left if each.hours is not None]
    if not any(each.is_assumed for each in told):
        return ", by what was measured so far"
    minutes = max(each.start_seconds for each in told) / 60
    start = f" and {minutes:g} min to start a node" if minutes else ""
    return f" (assumed: {PROBE_SECONDS:g} s a probe{start}; large models take longer)"
