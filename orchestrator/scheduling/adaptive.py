"""A sweep that measures what helps most to decide, and stops when it is decided or paid out."""

from collections.abc import Sequence

from fitting.families.fit_family import fit_families
from orchestrator.console import remark
from orchestrator.planning.node_pricing import NodePrices
from orchestrator.planning.plan import Plan
from orchestrator.ranking.next_measurement import (
    CandidateMeasurement,
    GpuChoice,
    choices,
    measured_cells,
)
from orchestrator.scheduling.strategy import MeasurementRequest, to_measure
from orchestrator.spec.sweep_spec import SweepSpec
from trials.records.cell import Cell
from trials.records.observation import Observation


class AdaptiveStrategy:
    """In each round, on each GPU, the measurement that is worth most for its price.

    Args:
        spec: of the sweep.
        rates: what nodes cost, by its GPUs and offers.
        budget_usd: what the run may cost, as ``spending.Meter`` counts it; absent for no limit. No
            probe begins when it is spent: it is passed by one probe on each GPU at most.
    """

    def __init__(self, spec: SweepSpec, rates: NodePrices, budget_usd: float | None) -> None:
        self._spec = spec
        self._rates = rates
        self.budget_usd = budget_usd
        self._gone: set[tuple[Cell, int | None]] = set()

    def wanted(
        self, plan: Plan, observations: Sequence[Observation], spent_usd: float
    ) -> dict[Cell, MeasurementRequest]:
        """The next round; empty when every choice is decided, or the budget is spent."""
        families = fit_families(observations)
        found = choices(self._spec, self._rates, measured_cells(plan), observations, families)
        open_to = set(to_measure(plan))
        useful = sorted(
            (
                candidate
                for choice in found
                if choice.is_open
                for candidate in choice.candidates
                if candidate.way.cell in open_to and self._key(candidate) not in self._gone
            ),
            key=lambda c: (-c.worth, c.usd),
        )
        round_: dict[str, CandidateMeasurement] = {}
        planned, dear = spent_usd, 0
        for candidate in useful:
            if candidate.way.cell.device in round_:
                continue
            if self.budget_usd is not None and planned + candidate.usd > self.budget_usd:
                dear += 1
                continue
            planned += candidate.usd
            round_[candidate.way.cell.device] = candidate
        # Once is enough: what it was to tell is known then, or cannot be.
        self._gone |= {self._key(candidate) for candidate in round_.values()}
        self._tell(found, spent_usd, dear=dear, is_over=not round_)
        # What is left is shared by what each is thought to take: none may take more than its part,
        # of which the start of a node is paid first.
        least = sum(candidate.usd for candidate in round_.values())
        part = None if self.budget_usd is None else (self.budget_usd - spent_usd) / max(least, 1e-9)
        return {
            c.way.cell: MeasurementRequest(
                timed=self._sizes(c),
                most_seconds=None if part is None else c.seconds * part - c.start_seconds,
            )
            for c in round_.values()
        }

    def _sizes(self, candidate: CandidateMeasurement) -> tuple[int, ...]:
        """Its batch size; the largest where none is timed yet, unless one is wished for."""
        wish = self._spec.workload.batch_size
        if wish is not None:
            return (wish,)
        size = candidate.way.batch_size
        return () if size is None or not candidate.is_anchored else (size,)

    @staticmethod
    def _key(candidate: CandidateMeasurement) -> tuple[Cell, int | None]:
        return candidate.way.cell, candidate.way.batch_size if candidate.is_anchored else None

    def _tell(self, found: Sequence[GpuChoice], spent: float, *, dear: int, is_over: bool) -> None:
        decided = sum(choice.is_decided for choice in found)
        said = f"{decided} of {len(found)} choices decided, ${spent:.3g} spent"
        if self.budget_usd is not None:
            said += f" of ${self.budget_usd:g}"
        if is_over and dear:
            said += ": the rest would cost more than is left"
        elif is_over and decided < len(found):
            said += ": no measurement that could decide the others is left"
        remark(said)
