"""Next measurement: the timed batch that helps most to choose a GPU, relative to its cost."""

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

DECIDED = 0.95  # probability that the choice is right from which it counts as decided


@dataclass(frozen=True, slots=True)
class CandidateMeasurement:
    """A measurement that could be made.

    Attributes:
        is_anchored: whether a batch of its cell was timed. If not, the largest batch is timed
            first: most jobs run at it, and it anchors the law where it matters.
        saving: fraction of a job's cost that the measurement is expected to save; infinite for the
            likely winner until something of it was measured.
        saving_usd: `saving` in dollars; None where the cost of the job is unknown.
        seconds: duration of the measurement, the start of its node included.
        start_seconds: duration of that start; 0 where a node is running.
        usd: cost of the measurement at the price of the sweep's nodes.
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
        """Expected saving per dollar."""
        return self.saving / max(self.usd, 1e-9)


@dataclass(frozen=True, slots=True)
class GpuChoice:
    """A GPU to be chosen for one model, recipe, sparsity and length.

    Attributes:
        leader: option of the likely winner.
        probability: probability that no other GPU is cheaper by more than 1 %.
        candidates: possible measurements, the one with the most saving per dollar first.
    """

    leader: RunOption
    probability: float
    candidates: tuple[CandidateMeasurement, ...]

    @property
    def is_decided(self) -> bool:
        """Whether the leader is measured and likely enough to be right."""
        return self.leader.is_measured and self.probability >= DECIDED

    @property
    def is_open(self) -> bool:
        """Whether a measurement could still decide it."""
        return bool(self.candidates) and not self.is_decided


def measured_cells(plan: Plan) -> list[Cell]:
    """Cells of a plan that are measured or will be, without simulated and capped ones."""
    return [
        cell
        for cell in (*plan.complete, *plan.pending)
        if not cell.simulated and cell.capped_on is None
    ]


def measurable(spec: SweepSpec, catalog: Catalog) -> list[Cell]:
    """Cells that the GPUs of a specification can run if they are rented, simulated ones too."""
    cells: dict[Cell, None] = {}
    for cell in spec.all_cells():
        own = cell.model_copy(update={"simulated": False})
        gpu = catalog.gpu(cell.gpu)
        if (
            cell.capped_on is None
            and incompatibility(cell.recipe, spec.model(cell.model), gpu) is None
        ):
            cells[own] = None
    return list(cells)


def choices(
    spec: SweepSpec,
    rates: NodePrices,
    cells: Sequence[Cell],
    observations: Sequence[Observation],
    families: Sequence[FamilyFit],
) -> list[GpuChoice]:
    """Choices between GPUs, in the order of the specification.

    GPUs without an offer are excluded, and those on which not even one example fits, or not the
    requested batch. Simulated step times are a cell's expectation until it is measured.
    """
    groups: dict[tuple[object, ...], list[Cell]] = defaultdict(list)
    beliefs = CostBeliefs(spec, rates, StepTimeSource(observations, families))
    for cell in cells:
        if rates.catalog.offers(cell.gpu) and beliefs.can_run(cell):
            groups[comparable(cell)].append(cell)
    cost = MeasurementCost(observations, spec.workload.overheads.expected_startup_minutes, rates)
    order = list(dict.fromkeys(map(comparable, spec.all_cells())))
    return [
        _choice(beliefs.options(groups[key]), beliefs, cost, spec.seed)
        for key in sorted(groups, key=order.index)
    ]


def _choice(
    options: Sequence[RunOption], beliefs: CostBeliefs, cost: MeasurementCost, seed: int
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
        device = option.cell.devices
        start = cost.start_seconds(device)
        search = 0.0 if beliefs.is_searched(option.cell) else cost.search_seconds(device)
        seconds = start + search + cost.visit_seconds(device)
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
