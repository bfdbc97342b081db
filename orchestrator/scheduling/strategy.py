"""Strategies of a sweep: which cells to measure next, at which batch sizes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from orchestrator.planning.measurement_cost import MeasurementCost
from orchestrator.planning.node_pricing import NodePrices
from orchestrator.planning.plan import Plan
from orchestrator.ranking.next_measurement import GpuChoice
from orchestrator.spec.job import SECONDS_PER_HOUR
from orchestrator.spec.sweep_spec import SweepSpec
from trials.records.cell import Cell
from trials.records.observation import Observation


@dataclass(frozen=True, slots=True)
class MeasurementRequest:
    """Measurements to make of one cell.

    Attributes:
        timed: batch sizes; None for all of the ladder's, empty for the largest alone.
        most_seconds: no probe begins later than this after the trial did; None for no limit.
    """

    timed: tuple[int, ...] | None = None
    most_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Conclusion:
    """The result of a strategy, once nothing is left that it wants.

    Attributes:
        failure: why the sweep did not reach its aim; None when it did.
        unpaid: cells that the budget did not allow.
        choices: GPUs that were chosen between, where the strategy chooses.
    """

    failure: str | None
    unpaid: tuple[Cell, ...] = ()
    choices: tuple[GpuChoice, ...] = ()


class Strategy(Protocol):
    """Order of the measurements, and their end.

    Attributes:
        simulates_first: whether it needs the simulated cells before it measures.
        makes_profiles: whether it profiles cells, where the specification asks for profiles.
        budget_usd: no probe begins once the run has cost this much (``spending.Meter``); None for
            no limit. The cost may exceed it by one probe per node.
    """

    simulates_first: ClassVar[bool]
    makes_profiles: ClassVar[bool]
    budget_usd: float | None

    def wanted(
        self, plan: Plan, observations: Sequence[Observation], spent_usd: float
    ) -> dict[Cell, MeasurementRequest]:
        """Measurements to make next, in order; empty at the end.

        The cells of an earlier call have been tried as often as allowed.
        """

    def start_again(self) -> None:
        """Forget the earlier calls: Ray has ended, and what was tried with it did not fail."""

    def conclusion(
        self, plan: Plan, observations: Sequence[Observation], spent_usd: float
    ) -> Conclusion:
        """Judge the run after the last measurement; arguments as of ``wanted``."""


class ExhaustiveStrategy:
    """Measure every cell completely.

    Args:
        spec: specification.
        rates: prices of nodes.
        budget_usd: most that the run may cost, by ``spending.Meter``; None for no limit. A GPU is
            not used when the start of its node alone would exceed the rest.
    """

    simulates_first: ClassVar[bool] = False
    makes_profiles: ClassVar[bool] = True

    def __init__(self, spec: SweepSpec, rates: NodePrices, budget_usd: float | None = None) -> None:
        self._spec = spec
        self._rates = rates
        self.budget_usd = budget_usd
        self._tried: set[Cell] = set()

    def wanted(
        self, plan: Plan, observations: Sequence[Observation], spent_usd: float
    ) -> dict[Cell, MeasurementRequest]:
        """All pending cells that the budget allows, once."""
        cells = [cell for cell in to_measure(plan) if cell not in self._tried]
        payable = self._payable_gpus(cells, observations, spent_usd)
        wanted = {cell: MeasurementRequest() for cell in cells if cell.devices in payable}
        self._tried |= wanted.keys()
        return wanted

    def start_again(self) -> None:
        """As the protocol says."""
        self._tried.clear()

    def conclusion(
        self, plan: Plan, observations: Sequence[Observation], spent_usd: float
    ) -> Conclusion:
        """Failure when a cell is pending for another reason than the budget, or none was had."""
        payable = self._payable_gpus(to_measure(plan), observations, spent_usd)
        if self.budget_usd is not None and spent_usd >= self.budget_usd:
            payable = set()
        given_up = {skip.cell for skip in plan.given_up}
        unpaid = tuple(
            cell
            for cell in to_measure(plan)
            if cell.devices not in payable and cell not in given_up
        )
        unfinished = [cell.key for cell in plan.pending if cell not in unpaid]
        failure = None
        if unfinished:
            failure = (
                f"{len(unfinished)} trials did not finish: {', '.join(unfinished)}: the report "
                "gives the reasons under Excluded"
            )
        elif not plan.complete and not plan.pending:
            failure = "nothing was measured: every trial was skipped, for the reasons above"
        return Conclusion(failure, unpaid)

    def _payable_gpus(
        self, cells: Iterable[Cell], observations: Sequence[Observation], spent_usd: float
    ) -> set[str]:
        """GPUs of cells, in their order, that the budget pays for beyond the start of a node."""
        devices = list(dict.fromkeys(cell.devices for cell in cells))
        if self.budget_usd is None:
            return set(devices)
        startup_minutes = self._spec.workload.overheads.expected_startup_minutes
        costs = MeasurementCost(observations, startup_minutes, self._rates)
        planned_usd = spent_usd
        payable = set()
        for device in devices:
            offer = self._rates.offer(device)
            usd_per_second = 0.0 if offer is None else offer.usd_per_hour / SECONDS_PER_HOUR
            start_usd = costs.start_seconds(device) * usd_per_second
            if offer is None or planned_usd + start_usd < self.budget_usd:
                planned_usd += start_usd
                payable.add(device)
        return payable


def to_measure(plan: Plan) -> tuple[Cell, ...]:
    """Pending cells that a device must run."""
    return tuple(cell for cell in plan.pending if not cell.simulated)
