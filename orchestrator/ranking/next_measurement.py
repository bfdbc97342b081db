"""What to measure next: which timed batch would most help to decide on a GPU, and at what price."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fitting.families.cell_step_time import VISIT, StepTimeSource
from fitting.families.records import FamilyFit
from fitting.numerics.value_of_information import (
    OptionCosts,
    expected_value_of_measurement,
    probability_cheapest,
)
from gpu_catalog.catalog import Catalog
from orchestrator.planning.measurement_cost import MeasurementCost
from orchestrator.planning.node_pricing import NodePrices
from orchestrator.planning.plan import Plan
from orchestrator.ranking.measurement_options import CostBeliefs, RunOption
from orchestrator.ranking.ranked_offer import comparable
from orchestrator.spec.job import SECONDS_PER_HOUR
from orchestrator.spec.sweep_spec import SweepSpec
from trials.records.cell import Cell
from trials.records.compatibility import incompatibility
from trials.records.observation import Observation

DECIDED = 0.95  # how likely the choice must be right


@dataclass(frozen=True, slots=True)
class CandidateMeasurement:
    """A measurement that could be made.

    Attributes:
        option: option to measure.
        is_anchored: whether a batch of its cell was timed. If not, its largest is, first: it is the
            one that most jobs are run at, and it bounds the law where it matters.
        saving: what it is expected to save of a job's cost, as a part; infinite where nothing of
            the choice's likely winner is measured yet.
        saving_usd: in dollars; absent where the job's cost is not known at all.
        seconds: what it takes, the start of its node included.
        start_seconds: of that start; 0 where something was measured on that GPU before.
        usd: what that costs, on what the sweep's nodes are rented as.
    """

    option: RunOption
    is_anchored: bool
    saving: float
    saving_usd: float | None
    seconds: float
    start_seconds: float
    usd: float

    @property
    def worth(self) -> float:
        """What it saves over what it costs."""
        return self.saving / max(self.usd, 1e-9)


@dataclass(frozen=True, slots=True)
class GpuChoice:
    """A GPU to be chosen for one model, recipe, sparsity and length.

    Attributes:
        leader: the likely winner.
        probability: that it is the cheapest, or dearer by 1 % at most.
        candidates: what could be measured, the worthiest first.
    """

    leader: RunOption
    probability: float
    candidates: tuple[CandidateMeasurement, ...]

    @property
    def is_decided(self) -> bool:
        """Whether it is known well enough."""
        return self.leader.is_measured and self.probability >= DECIDED

    @property
    def is_open(self) -> bool:
        """Whether a measurement could still decide it."""
        return bool(self.candidates) and not self.is_decided


def measured_cells(plan: Plan) -> list[Cell]:
    """What of a plan is measured, or to be."""
    return [
        cell
        for cell in (*plan.complete, *plan.pending)
        if not cell.simulated and cell.capped_on is None
    ]


def measurable(spec: SweepSpec, catalog: Catalog) -> list[Cell]:
    """What a specification's GPUs could run, wherever they are to be had; simulated ones, too."""
    found: dict[Cell, None] = {}
    for cell in spec.all_cells():
        own = cell.model_copy(update={"simulated": False})
        gpu = catalog.gpu(cell.gpu)
        if (
            cell.capped_on is None
            and incompatibility(cell.recipe, spec.model(cell.model), gpu) is None
        ):
            found[own] = None
    return list(found)


def choices(
    spec: SweepSpec,
    rates: NodePrices,
    cells: Sequence[Cell],
    observations: Sequence[Observation],
    families: Sequence[FamilyFit],
) -> list[GpuChoice]:
    """What is to be chosen, in the order of the specification.

    GPUs without an offer have no part in it, nor those that one example, or the wished batch, does
    not fit on. The simulated times of a cell are its expectation.

    Args:
        spec: the job, and the order.
        rates: GPUs and offers, and what measuring costs.
        cells: those that can be measured.
        observations: what is known.
        families: the laws fitted to it.
    """
    groups: dict[tuple[object, ...], list[Cell]] = defaultdict(list)
    beliefs = CostBeliefs(spec, rates, StepTimeSource(observations, families))
    for cell in cells:
        if rates.catalog.offers(cell.gpu) and beliefs.can_run(cell):
            groups[comparable(cell)].append(cell)
    effort = MeasurementCost(observations, spec.workload.overheads.startup_minutes, rates)
    order = list(dict.fromkeys(map(comparable, spec.all_cells())))
    return [
        _choice(beliefs.options(groups[key]), beliefs, effort, spec.seed)
        for key in sorted(groups, key=order.index)
    ]


def _choice(
    options: Sequence[RunOption], beliefs: CostBeliefs, effort: MeasurementCost, seed: int
) -> GpuChoice:
    cells = list(dict.fromkeys(option.cell for option in options))
    costs = OptionCosts(
        mean=np.array([option.log_usd for option in options]),
        sigma=np.array([option.sigma for option in options]),
        shared=np.array([option.shared for option in options]),
        group=np.array([cells.index(option.cell) for option in options]),
    )
    right = probability_cheapest(costs, seed)
    best = int(right.argmax())
    leader = min(
        (option for option in options if option.cell == cells[best]),
        key=lambda option: (option.log_usd, option.sigma),
    )
    candidates = []
    savings = expected_value_of_measurement(costs, np.full(len(options), VISIT))
    for option, part in zip(options, savings, strict=True):
        if not beliefs.is_open(option):
            continue
        must = option.cell == leader.cell and not leader.is_measured
        device = option.cell.device
        start = effort.start_seconds(device)
        search = 0.0 if beliefs.is_searched(option.cell) else effort.search_seconds(device)
        seconds = start + search + effort.visit_seconds(device)
        candidates.append(
            CandidateMeasurement(
                option=option,
                is_anchored=any(o.is_measured for o in options if o.cell == option.cell),
                saving=math.inf if must else float(part),
                saving_usd=None if must or leader.usd is None else float(part) * leader.usd,
                seconds=seconds,
                start_seconds=start,
                usd=seconds / SECONDS_PER_HOUR * beliefs.node_usd_per_hour(option.cell),
            )
        )
    candidates.sort(key=lambda c: (-c.worth, c.usd, c.option.cell.key, c.option.batch_size or 0))
    return GpuChoice(leader=leader, probability=float(right[best]), candidates=tuple(candidates))
