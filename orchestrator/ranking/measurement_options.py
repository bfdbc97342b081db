"""Run options of a GPU and batch size, and beliefs about their cost."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fitting.families.cell_step_time import CellStepTime, PaddedTokens, StepTimeSource
from gpu_catalog.gpu import Gpu
from gpu_catalog.offer import Offer
from orchestrator.planning.node_pricing import NodePrices
from orchestrator.pricing.layout_offers import layout_offers
from orchestrator.ranking.job_lengths import padding, unsuited
from orchestrator.ranking.priced_job import job_hours, job_of_cell, offer_usd
from orchestrator.spec.job import Job
from orchestrator.spec.job_tokens import rows
from orchestrator.spec.sweep_spec import SweepSpec
from trials.batch_ladder import LadderStep, batch_ladder
from trials.records.cell import Cell
from trials.records.observation import Basis, trainable_batch

# Standard deviations of the logarithm of a cost:
BY_SPECIFICATIONS = 0.4  # scaled from another GPU by peak rate and memory bandwidth
UNKNOWN = 0.7  # of a GPU without these specifications, or where nothing was measured
OTHER_BATCH = 0.1  # scaled from another batch size of the cell, where no law predicts it
# Fraction of the largest batch's time per example that does not depend on the batch size, where no
# law estimates it: an example costs that much more in a smaller batch.
FLOOR = 0.2
LEAST_SIGMA = 1e-3


@dataclass(frozen=True, slots=True)
class RunOption:
    """A cell's job at one batch size, on the cheapest offer of its GPU.

    Attributes:
        batch_size: examples per step; None while the largest batch is unknown.
        usd: expected cost of the job; None where nothing was measured on any GPU.
        log_usd: logarithm of the cost; without `usd`, up to a constant that all options share.
        sigma: standard deviation of its error, without the part that options share.
        known_by: origin of the cost, in words.
        is_measured: whether the cost follows from a measurement at this batch size.
        shared: standard deviation of the error that all simulated options share.
    """

    cell: Cell
    batch_size: int | None
    usd: float | None
    log_usd: float
    sigma: float
    known_by: str
    is_measured: bool
    shared: float = 0.0


class CostBeliefs:
    """Beliefs about the cost of a specification's job on cells."""

    def __init__(self, spec: SweepSpec, rates: NodePrices, step_times: StepTimeSource) -> None:
        self._job = spec.workload
        self._rates, self._catalog = rates, rates.catalog
        self._step_times = step_times

    def can_run(self, cell: Cell) -> bool:
        """Whether no observation rules out the job on this cell."""
        largest = self._largest(cell)
        fits = largest is None or largest >= (self._job.batch_size or 1)
        return bool(fits and self._offers(cell)) and unsuited(self._job_of(cell), cell, ()) is None

    def options(self, cells: Sequence[Cell]) -> list[RunOption]:
        """Every option to run the job on these cells, which must be comparable."""
        own = {cell: self._own_options(cell) for cell in cells}
        anchors = [
            min(options, key=lambda option: (not option.is_measured, option.log_usd))
            for options in own.values()
            if options
        ]
        return [
            option
            for cell in cells
            for option in own[cell] or [self._by_specifications(cell, anchors)]
        ]

    def node_usd_per_hour(self, cell: Cell) -> float:
        """Dollars per hour of the node that measures a cell; without one, of the cheapest offer."""
        offer = self._rates.offer(cell.devices)
        return self._lowest_price(cell) if offer is None else offer.usd_per_hour

    def is_searched(self, cell: Cell) -> bool:
        """Whether the largest batch of a cell is known."""
        return self._largest(cell) is not None

    def is_open(self, option: RunOption) -> bool:
        """Whether a visit of the option's batch size is still to be made."""
        if option.batch_size is None:
            return True
        visited = {
            (o.batch_size, o.repeat)
            for o in self._step_times.observations(option.cell)
            if o.purpose == "ladder" and o.measurement is not None
        }
        steps = _ladder(option.cell, self._largest(option.cell) or 0)
        planned = {(s.batch_size, s.repeat) for s in steps if s.batch_size == option.batch_size}
        return bool((planned or {(option.batch_size, 0)}) - visited)

    def _lowest_price(self, cell: Cell) -> float:
        return min(offer.usd_per_hour for offer in self._offers(cell))

    def _offers(self, cell: Cell) -> list[Offer]:
        """Offers of instances with as many GPUs as a cell takes."""
        offers = self._catalog.offers(cell.device)
        return layout_offers(offers, cell.parallel, is_simulated=cell.simulated)

    def _largest(self, cell: Cell) -> int | None:
        largest = trainable_batch(self._step_times.observations(cell))
        return None if largest is None else largest[0]

    def _padding(self, cell: Cell) -> PaddedTokens | None:
        return padding(self._job_of(cell), cell)

    def _job_of(self, cell: Cell) -> Job:
        probes = self._step_times.observations
        twin = cell.model_copy(update={"simulated": True})
        return job_of_cell(self._job, cell, [*probes(cell), *probes(twin)])

    def _sizes(self, cell: Cell, largest: int) -> list[int]:
        """Batch sizes to run the job at: its own, or those of the ladder up to its rows."""
        if self._job.batch_size is not None:
            return [self._job.batch_size]
        ladder = sorted({step.batch_size for step in _ladder(cell, largest)})
        most = rows(self._job_of(cell))
        return [size for size in ladder if size <= most] or ladder[:1]

    def _own_options(self, cell: Cell) -> list[RunOption]:
        """Options by the cell's own probes, its family's law or its simulation."""
        largest = self._largest(cell)
        wish = self._job.batch_size
        timed = {
            size: self._option(cell, step, "measured", is_measured=True)
            for steps in self._step_times.timed(cell, self._padding(cell)).values()
            for size, step in steps.items()
            if wish in (None, size)
        }
        if timed:
            others = () if largest is None else self._other_sizes(cell, largest, timed)
            return [*timed.values(), *others]
        by_law = None if largest is None else self._by_law(cell, self._sizes(cell, largest)[-1])
        option = by_law or self._by_simulation(cell)
        return [] if option is None else [option]

    def _other_sizes(
        self, cell: Cell, largest: int, timed: Mapping[int, RunOption]
    ) -> Iterator[RunOption]:
        """Options at the batch sizes that were not timed, each by a law or the nearest timed one.

        Without a law, an example in a batch of `b` costs `1 + FLOOR * (largest / b - 1)` times as
        much as in the largest batch.
        """

        def log_cost(size: int) -> float:
            return math.log1p(FLOOR * (largest / size - 1))

        for size in self._sizes(cell, largest):
            if size in timed:
                continue
            by_law = self._by_law(cell, size)
            if by_law is not None:
                yield by_law
                continue
            nearest = min(timed, key=lambda other: abs(math.log(other / size)))
            log_usd = timed[nearest].log_usd + log_cost(size) - log_cost(nearest)
            yield RunOption(
                cell=cell,
                batch_size=size,
                usd=math.exp(log_usd),
                log_usd=log_usd,
                sigma=math.hypot(timed[nearest].sigma, OTHER_BATCH),
                known_by=f"batch {nearest} there",
                is_measured=False,
            )

    def _by_law(self, cell: Cell, batch_size: int) -> RunOption | None:
        """Option by the law of measured steps, on the first stack that it covers."""
        predictions = self._step_times.by_law(cell, batch_size, self._padding(cell))
        stacks = sorted(stack for stack, basis in predictions if basis is Basis.MEASURED)
        if not stacks:
            return None
        step = predictions[stacks[0], Basis.MEASURED]
        return self._option(cell, step, f"law: {step.law}")

    def _by_simulation(self, cell: Cell) -> RunOption | None:
        """Option by the simulation of the cell, at the best simulated batch size."""
        wish = self._job.batch_size
        twin = cell.model_copy(update={"simulated": True})
        most = rows(self._job_of(cell))
        steps = self._step_times.at(twin, wish or "fastest", most, self._padding(cell))
        if not steps:
            return None
        option = self._option(cell, next(iter(steps.values())), "simulation")
        return replace(option, batch_size=wish or self._largest(cell))

    def _by_specifications(self, cell: Cell, anchors: Sequence[RunOption]) -> RunOption:
        """Option on a GPU without observations, by its price and specifications."""
        batch_size = self._job.batch_size or self._largest(cell)
        if not anchors:
            log_usd = self._log_relative_cost(cell, by_speed=True)
            return RunOption(cell, batch_size, None, log_usd, UNKNOWN, "nothing", is_measured=False)
        cells = [cell, *(anchor.cell for anchor in anchors)]
        by_speed = all(_log_speed(self._catalog.gpu(c.gpu)) is not None for c in cells)
        cost = self._log_relative_cost(cell, by_speed=by_speed)
        mean = statistics.fmean(
            anchor.log_usd + cost - self._log_relative_cost(anchor.cell, by_speed=by_speed)
            for anchor in anchors
        )
        gpus = ", ".join(sorted({anchor.cell.gpu for anchor in anchors}))
        own = BY_SPECIFICATIONS if by_speed else UNKNOWN
        return RunOption(
            cell=cell,
            batch_size=batch_size,
            usd=math.exp(mean),
            log_usd=mean,
            sigma=math.hypot(own, statistics.fmean(anchor.sigma for anchor in anchors)),
            known_by=f"{'specifications' if by_speed else 'price'} beside {gpus}",
            is_measured=False,
            shared=statistics.fmean(anchor.shared for anchor in anchors),
        )

    def _log_relative_cost(self, cell: Cell, *, by_speed: bool) -> float:
        """Logarithm of the lowest price of a GPU, over its speed where that is to count."""
        speed = _log_speed(self._catalog.gpu(cell.gpu)) if by_speed else None
        return math.log(self._lowest_price(cell)) - (speed or 0.0)

    def _option(
        self, cell: Cell, step: CellStepTime, known_by: str, *, is_measured: bool = False
    ) -> RunOption:
        batch_size = step.batch_size * cell.data_parallel_ranks
        job = self._job_of(cell)
        hours = np.array([job_hours(job, batch_size, step.seconds)])
        usd = min(offer_usd(job, hours, offer) for offer in self._offers(cell))
        return RunOption(
            cell=cell,
            batch_size=step.batch_size,
            usd=usd,
            log_usd=math.log(usd),
            sigma=max(step.uncertainty.alone, LEAST_SIGMA),
            known_by=known_by,
            is_measured=is_measured,
            shared=step.uncertainty.shared,
        )


def _log_speed(gpu: Gpu) -> float | None:
    """Logarithm of the geometric mean of peak rate and bandwidth; None where one is unknown."""
    rate = gpu.bf16_dense_tflops or gpu.fp16_dense_tflops
    bandwidth = gpu.memory_bandwidth_gb_per_second
    return None if rate is None or bandwidth is None else math.log(rate * bandwidth) / 2


def _ladder(cell: Cell, largest: int) -> list[LadderStep]:
    effective_batch = cell.rank_recipe.effective_batch
    return batch_ladder(largest, seed_text="", effective_batch=effective_batch)
