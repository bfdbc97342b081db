"""Hours and dollars of measurements, and of the rest of a sweep. Pure."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from gpu_catalog.offer import Offer
from orchestrator.planning.cluster_resources import ClusterResources
from orchestrator.planning.node_pricing import NodePrices
from orchestrator.planning.plan import Plan
from orchestrator.planning.spending import startup_seconds
from orchestrator.spec.job import SECONDS_PER_HOUR, SECONDS_PER_MINUTE
from orchestrator.spec.sweep_spec import SweepSpec
from trials.batch_ladder import batch_ladder
from trials.records.cell import Cell, by_cell
from trials.records.observation import Observation, trainable_batch

# Assumed where nothing was measured:
SEARCH_PROBES = 5  # probes that find the largest batch of a cell
PROBE_SECONDS = 60.0  # a search probe with its model's build, or a timed batch


class MeasurementCost:
    """Durations of measurements: medians of the run on the same GPU, or else assumptions.

    Without ``rates`` every node is rented, and takes ``startup_minutes`` to its first step.
    """

    def __init__(
        self,
        observations: Sequence[Observation],
        startup_minutes: float,
        rates: NodePrices | None = None,
    ) -> None:
        self._startup_minutes = startup_minutes
        self._rates = rates
        visits: dict[str, list[float]] = defaultdict(list)
        searches: dict[str, list[float]] = defaultdict(list)
        for cell, of_cell in by_cell(observations).items():
            if cell.simulated:
                continue
            if timed := [o.seconds for o in of_cell if o.purpose == "ladder"]:
                visits[cell.devices] += timed
            if searched := [o.seconds for o in of_cell if o.purpose != "ladder"]:
                searches[cell.devices].append(sum(searched))
        self._visits = {device: statistics.median(seconds) for device, seconds in visits.items()}
        self._searches = {device: statistics.median(s) for device, s in searches.items()}

    def is_up(self, device: str) -> bool:
        """Whether something was measured on that GPU, so that its node is running."""
        return device in self._visits or device in self._searches

    def start_seconds(self, device: str) -> float:
        """Seconds to start a node; 0 where one is running."""
        if self.is_up(device):
            return 0.0
        if self._rates is None:
            return self._startup_minutes * SECONDS_PER_MINUTE
        return startup_seconds(self._startup_minutes, self._rates.offer(device))

    def visit_seconds(self, device: str) -> float:
        """Seconds of one timed batch."""
        return self._visits.get(device, PROBE_SECONDS)

    def search_seconds(self, device: str) -> float:
        """Seconds of all probes that find a cell's largest batch."""
        return self._searches.get(device, SEARCH_PROBES * PROBE_SECONDS)


@dataclass(frozen=True, slots=True)
class RemainingWork:
    """Measurements that one GPU, or several at once, have left.

    Attributes:
        gpu: ``Cell.devices`` of the trials.
        at_a_time: trials that run concurrently; 1 while the cluster has no such GPU.
        nodes: running nodes and nodes to be started, in words.
        start_seconds: seconds to start a node; 0 where one is running.
        probe_seconds: seconds of all probes in sequence; None for a CPU before its first probes,
            since the speed of a CPU is hard to guess.
        offer: offer that its nodes are priced by; None where they are free or have no known price.
        is_assumed: whether `probe_seconds` is an assumption, because nothing was measured there.
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
        """Hours until the last trial ends."""
        if self.probe_seconds is None:
            return None
        side_by_side = min(self.trials, self.at_a_time)
        return (self.start_seconds + self.probe_seconds / side_by_side) / SECONDS_PER_HOUR

    @property
    def usd(self) -> float | None:
        """Dollars of the nodes, each from its start to its last probe."""
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
    """Measurements that each GPU has left, in the order of the plan, without simulated cells."""
    cells: dict[str, list[Cell]] = defaultdict(list)
    for cell in plan.pending:
        if not cell.simulated:
            cells[cell.devices].append(cell)
    if not cells:
        return []
    cost = MeasurementCost(observations, spec.workload.overheads.expected_startup_minutes, rates)
    of_cell = by_cell(observations)
    remaining = []
    for device, pending in cells.items():
        first = pending[0]
        gpu, ranks = rates.catalog.gpu(first.device), first.ranks_per_node
        seconds = None
        if cost.is_up(device) or gpu.kind == "cuda":
            seconds = sum(_seconds(spec, c, of_cell[c], cost) for c in pending)
        remaining.append(
            RemainingWork(
                gpu=device,
                trials=len(pending),
                at_a_time=max(cluster.at_a_time(gpu, ranks, first.nodes), 1),
                nodes=cluster.nodes_text(gpu, ranks),
                start_seconds=cost.start_seconds(device),
                probe_seconds=seconds,
                offer=rates.offer(device),
                is_assumed=not cost.is_up(device),
            )
        )
    return remaining


def trial_seconds(spec: SweepSpec, device: str, cost: MeasurementCost) -> float:
    """Seconds of a whole trial of a cell without observations."""
    visits = len(batch_ladder(spec.max_batch_size, seed_text=""))
    return cost.search_seconds(device) + visits * cost.visit_seconds(device)


def _seconds(
    spec: SweepSpec, cell: Cell, observations: Sequence[Observation], cost: MeasurementCost
) -> float:
    """Seconds that the trial of a cell has left."""
    largest, is_capped = trainable_batch(observations), cell.capped_on is not None
    if largest is None and is_capped:
        return cost.search_seconds(cell.devices)
    if largest is None:
        return trial_seconds(spec, cell.devices, cost)
    timed = sum(o.purpose == "ladder" and o.measurement is not None for o in observations)
    effective_batch = cell.rank_recipe.effective_batch
    ladder = batch_ladder(largest[0], seed_text="", effective_batch=effective_batch)
    visits = 0 if is_capped else len(ladder)
    return max(visits - timed, 1) * cost.visit_seconds(cell.devices)


@dataclass(frozen=True, slots=True)
class Budget:
    """Money that a sweep may spend; the cost of ``profiles`` that follow is not estimated."""

    budget_usd: float | None = None
    spent_usd: float = 0.0
    profiles: bool = False
