"""A run with all that is derived from it, the source of reports and notebooks."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from itertools import accumulate

from fitting.families.cell_step_time import StepTimeSource
from fitting.fit import Fits, fit_observations
from fitting.learning_curves import LearningCurve
from gpu_catalog.catalog import Catalog
from orchestrator.planning.faults import NO_FAULTS, Faults
from orchestrator.planning.node_pricing import NOT_SAID, NodePrices, NodeRentals
from orchestrator.planning.plan import Plan
from orchestrator.planning.spending import Meter
from orchestrator.pricing.price_history import PriceCourse
from orchestrator.ranking.priced_cells import RankingInputs
from orchestrator.ranking.ranked_offer import Ranking
from orchestrator.ranking.ranking import rank
from orchestrator.spec.sweep_spec import SweepSpec
from trials.records.cell import Cell, by_cell
from trials.records.observation import Observation
from trials.records.profile import Logged, Profiled


@dataclass(frozen=True)
class RunResults:
    """The contents of a run folder, with the laws and the ranking that follow from them.

    Attributes:
        notes: the user's own notes, as Markdown.
        price_courses: what the GPUs have cost, where the prices are from snapshots.
        today: date for the drift of prices; None for prices as recorded.
    """

    spec: SweepSpec
    catalog: Catalog
    plan: Plan
    observed: Sequence[Observation]
    profiled: Sequence[Profiled] = ()
    learned: Sequence[LearningCurve] = ()
    faults: Faults = NO_FAULTS
    rented: NodeRentals = NOT_SAID
    notes: str = ""
    price_courses: Sequence[PriceCourse] = ()
    today: date | None = None

    @cached_property
    def fits(self) -> Fits:
        """The fitted laws."""
        return fit_observations(self.observed)

    @cached_property
    def ranking(self) -> Ranking:
        """The offers for the specification's own job."""
        spec = self.spec
        return rank(
            RankingInputs(
                spec.workload,
                self.catalog,
                self.plan,
                self.step_times,
                today=self.today,
                seed=spec.seed,
            )
        )

    @cached_property
    def cells(self) -> list[Cell]:
        """Cells that were planned or observed, in the order of the specification."""
        planned = [*self.plan.complete, *self.plan.pending, *(s.cell for s in self.plan.skipped)]
        order = {cell: place for place, cell in enumerate(self.spec.all_cells())}
        cells = dict.fromkeys([*planned, *self._by_cell])
        return sorted(cells, key=lambda cell: order.get(cell, len(order)))

    @cached_property
    def step_times(self) -> StepTimeSource:
        """Step times of the cells, timed and by the laws."""
        return StepTimeSource(self.observed, self.fits.families)

    @property
    def logged(self) -> list[Logged]:
        """Observations, then profiles."""
        return [*self.observed, *self.profiled]

    @cached_property
    def meter(self) -> Meter:
        """Meter of the dollars that the run has cost."""
        rates = NodePrices(self.catalog, self.rented)
        return Meter(self.spec, rates, self.logged, self.faults.faults)

    def place(self, cell: Cell) -> int:
        """Index of a cell in ``cells``."""
        return self._places[cell]

    def observations_of(self, cell: Cell) -> Sequence[Observation]:
        """Observations of a cell."""
        return self._by_cell[cell]

    def abridged(self, most_cells: int) -> "RunResults":
        """These results, or those of the first models and recipes with about so many cells.

        All cells of a model and recipe are kept, since their laws are fitted together. The laws
        and the prices stay those of the whole run.
        """
        if len(self.cells) <= most_cells:
            return self
        groups: dict[tuple[str, str, str], list[Cell]] = defaultdict(list)
        for cell in self.cells:
            groups[cell.model, cell.weights, cell.recipe.key].append(cell)
        before = [0, *accumulate(map(len, groups.values()))]
        kept = {g for g, count in zip(groups, before, strict=False) if count < most_cells}
        are_shown = {cell for group in kept for cell in groups[group]}
        shown = [cell for cell in self.cells if cell in are_shown]
        part = replace(
            self,
            observed=[o for c in shown for o in self.observations_of(c)],
            profiled=[p for p in self.profiled if p.cell in are_shown],
        )
        laws = [(fit, fit.group) for fit in self.fits.fits]
        names = [(family, family.name) for family in self.fits.families]
        fits = Fits(
            fits=tuple(f for f, g in laws if (g.model, g.weights, g.recipe.key) in kept),
            families=tuple(f for f, n in names if (n.model, n.weights, n.recipe) in kept),
        )
        of_run = {name: getattr(self, name) for name in ("ranking", "meter", "step_times")}
        vars(part).update(of_run, cells=shown, fits=fits)
        return part

    @cached_property
    def _places(self) -> dict[Cell, int]:
        return {cell: place for place, cell in enumerate(self.cells)}

    @cached_property
    def _by_cell(self) -> defaultdict[Cell, list[Observation]]:
        return by_cell(self.observed)
