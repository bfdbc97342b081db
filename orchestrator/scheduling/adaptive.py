"""A strategy that measures what helps most to decide between GPUs, until that is decided."""

import logging
from collections.abc import Iterable, Sequence
from typing import ClassVar

from fitting.families.fit_family import fit_families
from gpu_catalog.number_text import dollars, given
from orchestrator.planning.node_pricing import NodePrices
from orchestrator.planning.plan import Plan
from orchestrator.ranking.next_measurement import (
    CandidateMeasurement,
    GpuChoice,
    choices,
    measured_cells,
)
from orchestrator.scheduling.strategy import Conclusion, MeasurementRequest, to_measure
from orchestrator.spec.sweep_spec import SweepSpec
from trials.records.cell import Cell
from trials.records.observation import Observation

logger = logging.getLogger(__name__)


class AdaptiveStrategy:
    """Make, in each round and on each GPU, the measurement of the highest value per dollar.

    Args:
        spec: specification.
        rates: prices of nodes.
        budget_usd: most that the run may cost, by ``spending.Meter``; None for no limit. No probe
            begins once it is spent: the cost may exceed it by one probe per GPU.
    """

    simulates_first: ClassVar[bool] = True  # a simulated time is the prior of a measurement
    makes_profiles: ClassVar[bool] = False

    def __init__(self, spec: SweepSpec, rates: NodePrices, budget_usd: float | None) -> None:
        self._spec = spec
        self._rates = rates
        self.budget_usd = budget_usd
        self._tried: set[tuple[Cell, int | None]] = set()

    def wanted(
        self, plan: Plan, observations: Sequence[Observation], spent_usd: float
    ) -> dict[Cell, MeasurementRequest]:
        """The next round; empty when every choice is decided, or the budget is spent."""
        gpu_choices = self._choices(plan, observations)
        useful = self._useful(gpu_choices, frozenset(to_measure(plan)))
        selected = self._affordable(useful, spent_usd)
        # One try is enough: it has answered its question, or cannot.
        self._tried |= {_key(candidate) for candidate in selected}
        self._log_progress(gpu_choices, spent_usd, useful, is_over=not selected)
        # Each measurement gets its share of the budget, in proportion to its expected cost. The
        # start of its node is paid first.
        expected_usd = sum(candidate.usd for candidate in selected)
        share = (
            None
            if self.budget_usd is None
            else (self.budget_usd - spent_usd) / max(expected_usd, 1e-9)
        )
        return {
            c.option.cell: MeasurementRequest(
                timed=self._batch_sizes(c),
                most_seconds=None if share is None else c.seconds * share - c.start_seconds,
            )
            for c in selected
        }

    def start_again(self) -> None:
        """As the protocol says."""
        self._tried.clear()

    def conclusion(
        self, plan: Plan, observations: Sequence[Observation], spent_usd: float
    ) -> Conclusion:
        """Failure when nothing was measured of any likely winner."""
        del spent_usd
        gpu_choices = tuple(self._choices(plan, observations))
        if not any(choice.leader.is_measured for choice in gpu_choices):
            return Conclusion(
                "no choice has a measured leader: the report gives the reasons under Excluded"
            )
        return Conclusion(None, choices=gpu_choices)

    def _choices(self, plan: Plan, observations: Sequence[Observation]) -> list[GpuChoice]:
        cells, families = measured_cells(plan), fit_families(observations)
        return choices(self._spec, self._rates, cells, observations, families)

    def _useful(
        self, gpu_choices: Iterable[GpuChoice], pending: frozenset[Cell]
    ) -> list[CandidateMeasurement]:
        """Untried measurements of open choices, by falling value per dollar."""
        return sorted(
            (
                candidate
                for choice in gpu_choices
                if choice.is_open
                for candidate in choice.candidates
                if candidate.option.cell in pending and _key(candidate) not in self._tried
            ),
            key=lambda c: (-c.worth, c.usd),
        )

    def _affordable(
        self, useful: Iterable[CandidateMeasurement], spent_usd: float
    ) -> list[CandidateMeasurement]:
        """The first measurement on each GPU that the rest of the budget allows."""
        selected: dict[str, CandidateMeasurement] = {}
        planned_usd = spent_usd
        for candidate in useful:
            if candidate.option.cell.devices in selected:
                continue
            if self.budget_usd is None or planned_usd + candidate.usd <= self.budget_usd:
                planned_usd += candidate.usd
                selected[candidate.option.cell.devices] = candidate
        return list(selected.values())

    def _batch_sizes(self, candidate: CandidateMeasurement) -> tuple[int, ...]:
        """Batch sizes to time: the job's own, else the candidate's; empty for the largest."""
        if self._spec.workload.batch_size is not None:
            return (self._spec.workload.batch_size,)
        size = candidate.option.batch_size
        return () if size is None or not candidate.is_anchored else (size,)

    def _log_progress(
        self,
        gpu_choices: Sequence[GpuChoice],
        spent_usd: float,
        useful: Sequence[CandidateMeasurement],
        *,
        is_over: bool,
    ) -> None:
        decided = sum(choice.is_decided for choice in gpu_choices)
        text = f"{decided} of {len(gpu_choices)} choices decided, ${dollars(spent_usd)} spent"
        if self.budget_usd is not None:
            text += f" of ${given(self.budget_usd)}"
        if is_over and useful:
            text += ": the rest would cost more than is left"
        elif is_over and decided < len(gpu_choices):
            text += ": no measurement that could decide the others is left"
        logger.info(text)


def _key(candidate: CandidateMeasurement) -> tuple[Cell, int | None]:
    return candidate.option.cell, candidate.option.batch_size if candidate.is_anchored else None
