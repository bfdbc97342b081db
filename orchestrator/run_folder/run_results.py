"""A run with all that is derived from it, the source of reports and notebooks."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from itertools import accumulate, chain

from fitting.families.cell_step_time import StepTimeSource
from fitting.families.records import FamilyFit
from fitting.fit import Fits, fit_observations
from fitting.learning_curves import LearningCurve, curves
from gpu_catalog.catalog import Catalog
from orchestrator.planning.faults import NO_FAULTS, Faults
from orchestrator.planning.node_pricing import NOT_SAID, NodePrices, NodeRentals
from orchestrator.planning.plan import Plan
from orchestrator.planning.slow_links import SlowLink, slow_links
from orchestrator.planning.slow_nodes import SlowNode, slow_nodes
from orchestrator.planning.spending import Meter
from orchestrator.pricing.price_history import PriceCourse
from orchestrator.ranking.priced_cells import RankingInputs
from orchestrator.ranking.ranked_offer import Ranking
from orchestrator.ranking.ranking import rank
from orchestrator.run_folder.learning_log import learned_in
from orchestrator.run_folder.plan_and_prices import plan_of
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.spec.sweep_spec import SweepSpec
from trials.records.cell import Cell, by_cell
from trials.records.log_reader import LineReader
from trials.records.observation import Basis, Observation
from trials.records.profile import LinkTimes, Logged, Profiled, links_of, observations_of

MOST_CELLS = 300
"""Cells of a large run that its reports show: each takes some 13 kB of the page, which is to have
less than 5 MB."""


@dataclass(frozen=True, slots=True)
class WholeRun:
    """Facts of all cells that reports of some of them state.

    Attributes:
        cells: number of cells.
        bases: number of observations by basis.
        slow_nodes, slow_links: as of the functions of these names.
    """

    cells: int
    bases: Counter[Basis]
    slow_nodes: Sequence[SlowNode]
    slow_links: Sequence[SlowLink]


@dataclass(frozen=True)
class RunResults:
    """The contents of a run folder, with the laws and the ranking that follow from them.

    Attributes:
        notes: the user's own notes, as Markdown.
        price_courses: what the GPUs have cost, where the prices are from snapshots.
        today: date for the drift of prices; None for prices as recorded.
        folder: path of the run folder.
    """

    spec: SweepSpec
    catalog: Catalog
    plan: Plan
    observed: Sequence[Observation]
    profiled: Sequence[Profiled] = ()
    links: Sequence[LinkTimes] = ()
    learned: Sequence[LearningCurve] = ()
    faults: Faults = NO_FAULTS
    rented: NodeRentals = NOT_SAID
    notes: str = ""
    price_courses: Sequence[PriceCourse] = ()
    today: date | None = None
    folder: str = "RUN"

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
                # Kept, it would refer back to the results, whose memory reports are to free.
                self._step_times(),
                today=self.today,
                seed=spec.seed,
                run=self.folder,
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
        return self._step_times()

    def _step_times(self) -> StepTimeSource:
        return StepTimeSource(self.observed, self._families())

    def _families(self) -> Iterator[FamilyFit]:
        yield from self.fits.families

    @property
    def logged(self) -> list[Logged]:
        """Observations, then profiles and links."""
        return [*self.observed, *self.profiled, *self.links]

    @cached_property
    def meter(self) -> Meter:
        """Meter of the dollars that the run has cost."""
        rates = NodePrices(self.catalog, self.rented)
        return Meter(self.spec, rates, self.logged, self.faults.faults)

    @cached_property
    def whole(self) -> WholeRun:
        """Facts of the whole run."""
        links = slow_links(links_of(self.logged), self.spec.merged_catalog())
        bases = Counter(o.basis for o in self.observed)
        return WholeRun(len(self.cells), bases, slow_nodes(self.observed), links)

    def place(self, cell: Cell) -> int:
        """Index of a cell in ``cells``."""
        return self._places[cell]

    def observations_of(self, cell: Cell) -> Sequence[Observation]:
        """Observations of a cell."""
        return self._by_cell[cell]

    @cached_property
    def shown(self) -> "RunResults":
        """These results, or those of the cells that reports show, whose own it is."""
        return self.abridged(MOST_CELLS)

    def abridged(self, most_cells: int) -> "RunResults":
        """These results, or those of ``first_cells``; ranking and costs stay those of the run."""
        if len(self.cells) <= most_cells:
            return self
        first = {*first_cells(self.cells, most_cells)}
        shown = [cell for cell in self.cells if cell in first]
        # Records among those of other cells would keep their memory: the part's are made anew.
        copied = LineReader(cells=shown).observation
        observed = (o for cell in shown for o in self.observations_of(cell))
        part = replace(
            self,
            observed=[copied(o.model_dump_json().encode()) for o in observed],
            profiled=[p for p in self.profiled if p.cell in first],
        )
        # The ranking comes last: it takes the memory that the others have freed.
        of_run = {name: getattr(self, name) for name in ("whole", "meter", "ranking")}
        vars(part).update(of_run, cells=shown, shown=part)
        return part

    @cached_property
    def _places(self) -> dict[Cell, int]:
        return {cell: place for place, cell in enumerate(self.cells)}

    @cached_property
    def _by_cell(self) -> defaultdict[Cell, list[Observation]]:
        return by_cell(self.observed)


def results_of(  # noqa: PLR0913 - a run by its parts, and two options
    folder: RunFolder,
    spec: SweepSpec,
    catalog: Catalog,
    today: date,
    plan: Plan | None = None,
    *,
    in_full: bool = False,
) -> RunResults:
    """Results of a run, by its files.

    Args:
        folder: the run.
        spec: its specification.
        catalog: GPUs and prices to rank by.
        today: date for the drift of prices.
        plan: plan that a driver has left; None for the plan by the files.
        in_full: whether to keep what only reports show also of cells that they do not show.
    """
    cells = spec.all_cells()
    brief = () if in_full else {*cells}.difference(first_cells(cells))
    logged = folder.logged(LineReader(brief=brief, cells=cells))
    observations = observations_of(logged)
    return RunResults(
        spec,
        catalog,
        plan or plan_of(folder, spec, observations),
        observations,
        profiled=[record for record in logged if isinstance(record, Profiled)],
        links=[record for record in logged if isinstance(record, LinkTimes)],
        learned=curves(learned_in(folder)),
        faults=folder.faults(),
        rented=folder.rented(),
        notes=folder.notes(),
        today=today,
        folder=str(folder.path),
    )


def first_cells(cells: Sequence[Cell], most: int = MOST_CELLS) -> list[Cell]:
    """Cells of the first models and recipes, about ``most`` of them.

    All cells of a model and recipe are among them, since their laws are fitted together.
    """
    groups: dict[tuple[str, str, str], list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[cell.model, cell.weights, cell.recipe.key].append(cell)
    before = accumulate(map(len, groups.values()), initial=0)
    kept = (group for group, count in zip(groups.values(), before, strict=False) if count < most)
    return list(chain.from_iterable(kept))
