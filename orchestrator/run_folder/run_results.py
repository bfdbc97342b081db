"""A run with all that is derived from it: what reports and notebooks are made from."""

from collections import defaultdict
from collections.abc import Sequence
from datetime import date
from functools import cached_property

from fitting.families.cell_step_time import StepTimeSource
from fitting.fit import Fits, fit_observations
from fitting.learning_curves import LearningCurve
from gpu_catalog.catalog import Catalog
from orchestrator.planning.faults import NO_FAULTS, Faults
from orchestrator.planning.node_pricing import NOT_SAID, NodePrices, NodeRentals
from orchestrator.planning.plan import Plan
from orchestrator.planning.spending import Meter
from orchestrator.ranking.priced_cells import RankingInputs
from orchestrator.ranking.ranked_offer import Ranking
from orchestrator.ranking.ranking import rank
from orchestrator.spec.sweep_spec import SweepSpec
from trials.records.cell import Cell
from trials.records.observation import Observation, by_cell
from trials.records.profile import Logged, Profiled


def derived(  # noqa: PLR0913 - all there is of a run
    spec: SweepSpec,
    catalog: Catalog,
    plan: Plan,
    observed: Sequence[Observation],
    *,
    today: date | None = None,
    profiled: Sequence[Profiled] = (),
    learned: Sequence[LearningCurve] = (),
    faults: Faults = NO_FAULTS,
    rented: NodeRentals = NOT_SAID,
) -> "RunResults":
    """The results of a specification's own job, from what was observed.

    Args:
        spec: the specification.
        catalog: the GPUs and prices to rank by.
        plan: what became of its cells.
        observed: every observation.
        today: for what prices may have done since; absent for as they were.
        profiled: every profile.
        learned: every curve.
        faults: what went wrong on the way.
        rented: what nodes were rented as.
    """
    fits = fit_observations(observed)
    step_times = StepTimeSource(observed, fits.families)
    inputs = RankingInputs(spec.workload, catalog, plan, step_times, today=today, seed=spec.seed)
    return RunResults(
        spec, catalog, plan, observed, fits, rank(inputs), profiled, learned, faults, rented
    )


class RunResults:
    """A run as it stands.

    Args:
        spec: its specification.
        catalog: the GPUs and prices that it was ranked by.
        plan: what became of its cells.
        observed: every observation.
        fits: the laws.
        ranking: of its job.
        profiled: every profile.
        learned: every curve of learning.
        faults: what went wrong on the way.
        rented: what nodes were rented as.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - all there is of a run
        self,
        spec: SweepSpec,
        catalog: Catalog,
        plan: Plan,
        observed: Sequence[Observation],
        fits: Fits,
        ranking: Ranking,
        profiled: Sequence[Profiled] = (),
        learned: Sequence[LearningCurve] = (),
        faults: Faults = NO_FAULTS,
        rented: NodeRentals = NOT_SAID,
    ) -> None:
        self.spec = spec
        self.catalog = catalog
        self.plan = plan
        self.observed = observed
        self.fits = fits
        self.ranking = ranking
        self.profiled = profiled
        self.learned = learned
        self.faults = faults
        self.rented = rented

    @cached_property
    def cells(self) -> list[Cell]:
        """Every cell that was planned or observed, each once."""
        planned = [*self.plan.complete, *self.plan.pending, *(s.cell for s in self.plan.skipped)]
        order = {cell: place for place, cell in enumerate(self.spec.all_cells())}
        known = dict.fromkeys([*planned, *(o.cell for o in self.observed)])
        return sorted(known, key=lambda cell: order.get(cell, len(order)))

    @cached_property
    def step_times(self) -> StepTimeSource:
        """Step times of the cells, timed and by the laws."""
        return StepTimeSource(self.observed, self.fits.families)

    @property
    def logged(self) -> list[Logged]:
        """Every observation, then every profile."""
        return [*self.observed, *self.profiled]

    @cached_property
    def meter(self) -> Meter:
        """What it has cost."""
        rates = NodePrices(self.catalog, self.rented)
        return Meter(self.spec, rates, self.logged, self.faults.faults)

    def place(self, cell: Cell) -> int:
        """Which of ``cells`` it is."""
        return self._places[cell]

    def seen(self, cell: Cell) -> Sequence[Observation]:
        """The observations of one cell."""
        return self._by_cell[cell]

    @cached_property
    def _places(self) -> dict[Cell, int]:
        return {cell: place for place, cell in enumerate(self.cells)}

    @cached_property
    def _by_cell(self) -> defaultdict[Cell, list[Observation]]:
        return by_cell(self.observed)
