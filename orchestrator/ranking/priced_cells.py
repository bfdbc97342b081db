"""Inputs of a ranking, and the job of each cell priced on the offers of its GPU."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from fitting.families.cell_step_time import Batch, StepTimeSource
from gpu_catalog.catalog import Catalog
from gpu_catalog.offer import Offer
from orchestrator.planning.plan import Plan
from orchestrator.pricing.host_memory import (
    TooLittleHostMemory,
    allowed_instances,
    by_host_memory,
)
from orchestrator.pricing.layout_offers import layout_offers
from orchestrator.pricing.offer_constraints import Constraints
from orchestrator.pricing.price_drift import PriceDrift, young_gpus
from orchestrator.ranking.epochs_needed import LearnedEpochs
from orchestrator.ranking.job_lengths import padding, unsuited
from orchestrator.ranking.priced_job import DRAWS, CellJob, PricedOffer, job_of_cell
from orchestrator.ranking.ranked_offer import comparable
from orchestrator.spec.job import Job
from orchestrator.spec.job_tokens import rows
from trials.recipes.host_bytes import least_host_bytes
from trials.recipes.parallel import Parallel
from trials.records.cell import Cell
from trials.records.observation import Observation, trainable_batch

NO_CONSTRAINTS = Constraints()
GIB = 2**30


@dataclass(frozen=True, slots=True)
class RankingInputs:
    """Inputs of a ranking.

    Attributes:
        catalog: GPUs and their offers.
        plan: cells to rank.
        step_times: observations of the cells, and the laws fitted to them.
        batch_wish: batch size to run at; None for that of the job, or the fastest.
        today: day to extrapolate prices to; None to take them as quoted.
        epochs: number of epochs of each cell, or why it is unknown; None for that of the job.
        run: folder of the run, for commands in the reasons of excluded cells.
    """

    job: Job
    catalog: Catalog
    plan: Plan
    step_times: StepTimeSource
    batch_wish: Batch | None = None
    constraints: Constraints = NO_CONSTRAINTS
    today: date | None = None
    epochs: Mapping[Cell, LearnedEpochs | str] | None = None
    seed: int = 0
    run: str = "RUN"

    @property
    def batch(self) -> Batch:
        """Batch size to run the job at."""
        return self.batch_wish or self.job.batch_size or "fastest"

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Cells of the plan, skipped ones included: another cluster may have measured them."""
        plan = self.plan
        return (*plan.complete, *plan.pending, *(skip.cell for skip in plan.skipped))

    @property
    def known_epochs(self) -> list[LearnedEpochs]:
        """Numbers of epochs that training curves gave, in the order of the cells."""
        return [e for e in (self.epochs or {}).values() if isinstance(e, LearnedEpochs)]


@dataclass(frozen=True, slots=True)
class PricedCell:
    """A cell with its job priced on every offer that the constraints allow.

    Attributes:
        offers: priced offers; empty without a step time or an allowed offer.
        offers_of_gpu: number of offers of its GPU, whatever the constraints.
        too_little_host_memory: instances that are left out because their host has less memory than
            the cell keeps there.
        has_step_time: whether a step time is known.
        reason: reason to exclude it that does not depend on prices.
    """

    cell: Cell
    offers: list[PricedOffer]
    offers_of_gpu: int
    has_step_time: bool
    reason: str | None
    too_little_host_memory: tuple[TooLittleHostMemory, ...] = ()


def priced_cells(inputs: RankingInputs) -> Iterator[PricedCell]:
    """Price the job of each cell on the offers that the constraints allow, group after group.

    A group has the comparable cells, whose prices are ranked together.

    Coefficients belong to a stack: a cell measured on two stacks is priced once for each, and so is
    a cell that was both measured and simulated.

    Unknowns are drawn `DRAWS` times: the error of each cell's step time, the error that all
    simulated step times share, and the change of each price since it was recorded.
    """
    young = young_gpus(inputs.catalog)
    drift = PriceDrift(inputs.job.overheads, inputs.today, inputs.seed, DRAWS, young=young)
    shared = np.random.default_rng(inputs.seed).standard_normal(DRAWS)
    skipped = {skip.cell: skip.reason for skip in inputs.plan.skipped}
    given_up = {row.cell: row.reason for row in inputs.plan.given_up}
    cells = inputs.cells
    groups: dict[tuple[object, ...], list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[comparable(cell)].append(cell)
    offers_for = cache(partial(_offers_for, inputs))
    for cell in itertools.chain.from_iterable(groups.values()):
        host_gib = _host_gib(cell, inputs.step_times.observations(cell))
        offers = offers_for(cell.gpu, cell.parallel, host_gib, cell.simulated)
        job, mismatch = _job_of_cell(inputs, cell)
        mismatch = unsuited(job, cell, cells) or mismatch
        jobs = [] if mismatch is not None else _jobs(inputs, job, cell, host_gib)
        yield PricedCell(
            cell=cell,
            offers=[p for cell_job in jobs for p in cell_job.on(offers.allowed, shared, drift)],
            offers_of_gpu=offers.of_gpu,
            has_step_time=bool(jobs),
            reason=skipped.get(cell) or mismatch or given_up.get(cell),
            too_little_host_memory=offers.too_little_host_memory,
        )


class _Offers(NamedTuple):
    """Fields of a ``PricedCell`` that follow from its GPU, layout and memory on the host."""

    of_gpu: int
    allowed: list[Offer]
    too_little_host_memory: tuple[TooLittleHostMemory, ...]


def _offers_for(
    inputs: RankingInputs,
    gpu: str,
    layout: Parallel | None,
    host_gib: float | None,
    is_simulated: bool,  # noqa: FBT001 - of a cached call
) -> _Offers:
    offers = layout_offers(inputs.catalog.offers(gpu), layout, is_simulated=is_simulated)
    enough, too_small = by_host_memory(offers, host_gib)
    allows = inputs.constraints.allows
    return _Offers(
        len(offers), [o for o in enough if allows(o)], allowed_instances(too_small, allows)
    )


def _host_gib(cell: Cell, observations: Sequence[Observation]) -> float | None:
    """Memory that a cell keeps on the host of each node: as simulated, else the least by its model.

    None where it keeps nothing there, or before a probe of it fits.
    """
    if cell.parallel is None or cell.parallel.offload is None:
        return None
    measurements = [o.measurement for o in observations if o.measurement is not None]
    held = [one.host_bytes for one in measurements if one.host_bytes is not None]
    counts = [one.built.parameters for one in measurements if one.built is not None]
    held += [least_host_bytes(cell.parallel, one.total, one.trainable) for one in counts]
    return max(held) / GIB if held else None


def _job_of_cell(inputs: RankingInputs, cell: Cell) -> tuple[Job, str | None]:
    """The job in the cell's batches, with its number of epochs, or why that is unknown."""
    job = job_of_cell(inputs.job, cell, inputs.step_times.observations(cell))
    epochs = None if inputs.epochs is None else inputs.epochs[cell]
    if isinstance(epochs, LearnedEpochs):
        return job.model_copy(update={"epochs": epochs.epochs}), None
    return job, epochs


def _jobs(inputs: RankingInputs, job: Job, cell: Cell, host_gib: float | None) -> list[CellJob]:
    """The job on each stack and basis that the cell has a step time of."""
    largest = trainable_batch(inputs.step_times.observations(cell))
    steps = inputs.step_times.at(cell, inputs.batch, rows(job), padding(job, cell))
    return [
        CellJob(job, cell, stack, basis, step, largest, inputs.seed, host_gib)
        for (stack, basis), step in steps.items()
    ]
