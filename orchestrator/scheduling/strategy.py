"""Strategies of a sweep: which cells to measure next, at which batch sizes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from orchestrator.planning.measurement_cost import Budget, MeasurementCost
from orchestrator.planning.node_pricing import NodePrices
from orchestrator.planning.plan import Plan
from orchestrator.spec.job import SECONDS_PER_HOUR
from orchestrator.spec.sweep_spec import SweepSpec
from trials.records.cell import Cell
from trials.records.observation import Observation


@dataclass(frozen=True, slots=True)
class MeasurementRequest:
    """What of a cell is to be measured.

    Attributes:
        timed: batch sizes; None for all of the ladder's, empty for the largest alone.
        most_seconds: no probe begins later than this after the trial did; absent for no limit.
    """

    timed: tuple[int, ...] | None = None
    most_seconds: float | None = None


class Strategy(Protocol):
    """Says what to measure.

    Attributes:
        budget_usd: no probe begins once the run has cost so much (``spending.Meter``); absent for
            no limit. It is passed by one probe on each node at most.
    """

    budget_usd: float | None

    def wanted(
        self, plan: Plan, observations: Sequence[Observation], spent_usd: float
    ) -> dict[Cell, MeasurementRequest]:
        """What to measure next, in this order; empty when that was all.

        What was wanted before has been tried as often as it may be.

        Args:
            plan: what is pending.
            observations: what is known.
            spent_usd: what the run has cost by now.
        """


class ExhaustiveStrategy:
    """Every cell, whole.

    Args:
        spec: of the sweep.
        rates: what nodes cost.
        budget_usd: what the run may cost, as ``spending.Meter`` counts it; absent for no limit. A
            GPU is left out when the start of its node alone would spend the rest.
    """

    def __init__(self, spec: SweepSpec, rates: NodePrices, budget_usd: float | None = None) -> None:
        self._spec = spec
        self._rates = rates
        self.budget_usd = budget_usd
        self._tried: set[Cell] = set()

    def wanted(
        self, plan: Plan, observations: Sequence[Observation], spent_usd: float
    ) -> dict[Cell, MeasurementRequest]:
        """What is pending."""
        cells = [cell for cell in to_measure(plan) if cell not in self._tried]
        payable = payable_gpus(
            self._spec, self._rates, cells, observations, Budget(self.budget_usd, spent_usd)
        )
        wanted = {cell: MeasurementRequest() for cell in cells if cell.device in payable}
        self._tried |= wanted.keys()
        return wanted


def payable_gpus(
    spec: SweepSpec,
    rates: NodePrices,
    cells: Iterable[Cell],
    observations: Sequence[Observation],
    purse: Budget,
) -> set[str]:
    """The GPUs of cells, in their order, that a budget has something left for when they are up."""
    devices = list(dict.fromkeys(cell.device for cell in cells))
    if purse.budget_usd is None:
        return set(devices)
    effort = MeasurementCost(observations, spec.workload.overheads.startup_minutes, rates)
    planned = purse.spent_usd
    found = set()
    for device in devices:
        offer = rates.offer(device)
        rate = 0.0 if offer is None else offer.usd_per_hour / SECONDS_PER_HOUR
        start = effort.start_seconds(device) * rate
        if offer is None or planned + start < purse.budget_usd:
            planned += start
            found.add(device)
    return found


def to_measure(plan: Plan) -> tuple[Cell, ...]:
    """The pending cells that a device must run."""
    return tuple(cell for cell in plan.pending if not cell.simulated)
