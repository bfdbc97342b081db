"""Run options of a GPU and batch size, and beliefs about their cost."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fitting.families.cell_step_time import (
    CellStepTime,
    Spread,
    at_length,
    by_law,
    step_times,
    timed_steps,
)
from fitting.families.records import FamilyFit
from orchestrator.planning.node_pricing import NodePrices
from orchestrator.ranking.exclusions import padding, too_long
from orchestrator.ranking.priced_job import job_hours, offer_usd
from orchestrator.spec.job_tokens import rows
from orchestrator.spec.sweep_spec import SweepSpec
from trials.batch_ladder import batch_ladder
from trials.records.cell import Cell
from trials.records.observation import Basis, Observation, largest_batch

# Standard deviations of the logarithm of a cost:
BY_SPECIFICATIONS = 0.4  # told from another GPU's by rate and bandwidth
UNKNOWN = 0.7  # of a job that nothing is known of
OTHER_BATCH = 0.1  # told from another batch size of the cell, where no law speaks
# Part of the largest batch's time per example that does not depend on the batch, where no law gives
# it: a smaller batch costs so much more for each example.
FLOOR = 0.2
LEAST_SIGMA = 1e-3


@dataclass(frozen=True, slots=True)
class RunOption:
    """A cell's job at one batch size, on the cheapest offer of its GPU.

    Attributes:
        cell: what runs.
        batch_size: examples per step; absent while the largest batch is not known.
        usd: what the job is expected to cost; absent where nothing is known of any GPU.
        log_usd: its logarithm; where it is absent, up to what all ways of the choice share.
        sigma: standard deviation of that, of what is its own.
        shared: that of what all simulated ones have in common.
        known_by: what it is known by, in words.
        is_measured: whether that is a measurement.
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
    """What is known of the cost of cells."""

    def __init__(
        self,
        spec: SweepSpec,
        rates: NodePrices,
        seen: Mapping[Cell, Sequence[Observation]],
        families: Sequence[FamilyFit],
        spread: Spread,
    ) -> None:
        self._spec = spec
        self._rates, self._catalog = rates, rates.catalog
        self._seen = seen
        self._families = families
        self._spread = spread

    def can_do_it(self, cell: Cell) -> bool:
        """Whether the job can be run as this cell, as far as is known."""
        largest = self._largest(cell)
        least = self._spec.workload.batch_size or 1
        fits = largest is None or largest >= least
        return fits and too_long(self._spec.workload, cell, ()) is None

    def ways(self, cells: Sequence[Cell]) -> list[RunOption]:
        """Every way to do the job on these."""
        own = {cell: self._own_ways(cell) for cell in cells}
        anchors = [
            min(ways, key=lambda way: (not way.is_measured, way.log_usd))
            for ways in own.values()
            if ways
        ]
        found = []
        for cell in cells:
            found += own[cell] or [self._unseen(cell, anchors)]
        return found

    def price(self, cell: Cell) -> float:
        """Dollars an hour of the cheapest offer."""
        return min(offer.usd_per_hour for offer in self._catalog.offers(cell.device))

    def rate(self, cell: Cell) -> float:
        """Dollars an hour of the node that measures it; of what stands in for it, where none is."""
        offer = self._rates.offer(cell.device)
        return self.price(cell) if offer is None else offer.usd_per_hour

    def is_searched(self, cell: Cell) -> bool:
        """Whether its largest batch is known."""
        return largest_batch(self._seen.get(cell, ())) is not None

    def is_to_do(self, way: RunOption) -> bool:
        """Whether a visit of it is still to be made."""
        if way.batch_size is None:
            return True
        climbed = {
            (o.batch_size, o.repeat)
            for o in self._seen.get(way.cell, ())
            if o.purpose == "ladder" and o.measurement is not None
        }
        steps = batch_ladder(self._largest(way.cell) or 0, seed_text="")
        mine = {(s.batch_size, s.repeat) for s in steps if s.batch_size == way.batch_size}
        return bool((mine or {(way.batch_size, 0)}) - climbed)

    def _largest(self, cell: Cell) -> int | None:
        known = largest_batch(self._seen.get(cell, ()))
        return None if known is None else known[0]

    def _sizes(self, largest: int) -> list[int]:
        """Batch sizes to run the job at: the one wished for, else the ladder's up to its rows."""
        wish = self._spec.workload.batch_size
        if wish is not None:
            return [wish]
        ladder = sorted({step.batch_size for step in batch_ladder(largest, seed_text="")})
        most = rows(self._spec.workload)
        return [size for size in ladder if size <= most] or ladder[:1]

    def _own_ways(self, cell: Cell) -> list[RunOption]:
        """What its own probes, its family's law or its simulation tell of it; empty if nothing."""
        largest = self._largest(cell)
        wish = self._spec.workload.batch_size
        timed = self._timed(cell)
        if wish is not None:
            timed = {size: way for size, way in timed.items() if size == wish}
        if timed:
            return [*timed.values(), *self._other_sizes(cell, largest, timed)]
        told = None if largest is None else self._by_law(cell, self._sizes(largest)[-1])
        return [way for way in (told or self._by_simulation(cell, wish),) if way is not None]

    def _timed(self, cell: Cell) -> dict[int, RunOption]:
        found: dict[int, RunOption] = {}
        for of, by_batch in timed_steps(self._seen.get(cell, ()), self._spread).items():
            for batch_size, step in by_batch.items():
                at = self._at_length(step, cell, *of)
                found[batch_size] = self._way(cell, at, "measured", is_measured=True)
        return found

    def _at_length(self, step: CellStepTime, cell: Cell, stack: str, basis: Basis) -> CellStepTime:
        tokens = padding(self._spec.workload, cell)
        if tokens is None:
            return step
        padded = tokens(step.batch_size)
        return at_length(step, cell, stack, basis, padded, self._families) or step

    def _other_sizes(
        self, cell: Cell, largest: int | None, timed: Mapping[int, RunOption]
    ) -> Iterator[RunOption]:
        """The rest of those that the job could be run at."""
        if largest is None:
            return
        for size in self._sizes(largest):
            if size in timed:
                continue
            told = self._by_law(cell, size)
            if told is not None:
                yield told
                continue
            near = min(timed, key=lambda other: abs(math.log(other / size)))
            ratio = math.log1p(FLOOR * (largest / size - 1))
            there = math.log1p(FLOOR * (largest / near - 1))
            log_usd = timed[near].log_usd + ratio - there
            yield RunOption(
                cell=cell,
                batch_size=size,
                usd=math.exp(log_usd),
                log_usd=log_usd,
                sigma=math.hypot(timed[near].sigma, OTHER_BATCH),
                known_by=f"batch {near} there",
                is_measured=False,
            )

    def _by_law(self, cell: Cell, batch_size: int) -> RunOption | None:
        """By the law of its family, on any stack that it was seen with."""
        seen = self._seen.get(cell, ())
        stacks = {o.environment.stack for o in seen if o.environment is not None}
        for stack in sorted(stacks):
            told = by_law(batch_size, cell, stack, Basis.MEASURED, seen, self._families)
            if told is not None:
                at = self._at_length(told, cell, stack, Basis.MEASURED)
                return self._way(cell, at, f"law: {told.law}")
        return None

    def _by_simulation(self, cell: Cell, wish: int | None) -> RunOption | None:
        """As it was simulated, at the batch that is best for the job."""
        twin = cell.model_copy(update={"simulated": True})
        told = step_times(
            wish or "fastest",
            twin,
            self._seen.get(twin, ()),
            self._families,
            self._spread,
            rows(self._spec.workload),
            padding(self._spec.workload, cell),
        )
        if not told:
            return None
        way = self._way(cell, next(iter(told.values())), "simulation")
        return replace(way, batch_size=wish or self._largest(cell))

    def _unseen(self, cell: Cell, anchors: Sequence[RunOption]) -> RunOption:
        """Of a GPU that nothing is known of for this job: by its price and specifications."""
        batch_size = self._spec.workload.batch_size or self._largest(cell)
        if not anchors:
            log_usd = math.log(self.price(cell)) - (self._log_speed(cell) or 0.0)
            return RunOption(cell, batch_size, None, log_usd, UNKNOWN, "nothing", is_measured=False)
        is_known = all(self._log_speed(each) is not None for each in (cell, *_cells(anchors)))
        mean = statistics.fmean(a.log_usd + self._apart(cell, a.cell, is_known) for a in anchors)
        beside = ", ".join(sorted({a.cell.gpu for a in anchors}))
        own = BY_SPECIFICATIONS if is_known else UNKNOWN
        return RunOption(
            cell=cell,
            batch_size=batch_size,
            usd=math.exp(mean),
            log_usd=mean,
            sigma=math.hypot(own, statistics.fmean(a.sigma for a in anchors)),
            known_by=f"{'specifications' if is_known else 'price'} beside {beside}",
            is_measured=False,
            shared=statistics.fmean(a.shared for a in anchors),
        )

    def _apart(self, cell: Cell, other: Cell, is_known: bool) -> float:  # noqa: FBT001 - a pair
        """Logarithm of what a job costs on one over another: by price, and speed where known."""
        price = math.log(self.price(cell) / self.price(other))
        if not is_known:
            return price
        return price - (self._log_speed(cell) or 0.0) + (self._log_speed(other) or 0.0)

    def _log_speed(self, cell: Cell) -> float | None:
        """Logarithm of the geometric mean of rate and bandwidth; None where one is not known."""
        gpu = self._catalog.gpu(cell.gpu)
        rate = gpu.bf16_dense_tflops or gpu.fp16_dense_tflops
        bandwidth = gpu.memory_bandwidth_gb_per_second
        return None if rate is None or bandwidth is None else math.log(rate * bandwidth) / 2

    def _way(
        self, cell: Cell, step: CellStepTime, known_by: str, *, is_measured: bool = False
    ) -> RunOption:
        workload = self._spec.workload
        hours = np.array([job_hours(workload, step.batch_size, step.seconds)])
        usd = min(offer_usd(workload, hours, offer) for offer in self._catalog.offers(cell.gpu))
        return RunOption(
            cell=cell,
            batch_size=step.batch_size,
            usd=usd,
            log_usd=math.log(usd),
            sigma=max(step.doubt.alone, LEAST_SIGMA),
            known_by=known_by,
            is_measured=is_measured,
            shared=step.doubt.shared,
        )


def _cells(ways: Sequence[RunOption]) -> list[Cell]:
    return [way.cell for way in ways]
