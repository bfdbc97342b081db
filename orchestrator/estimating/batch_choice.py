"""Simulations of estimates, and the batch size that each prices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpu_catalog.gpu import Gpu
from orchestrator.estimating.question import EstimatedJob, Question
from orchestrator.estimating.varying_memory import varying_lengths
from orchestrator.ranking.priced_job import job_hours
from orchestrator.spec.job_tokens import padded_tokens, rows, waited_tokens
from trials.drawn_lengths import sizes_to_try
from trials.records.cell import Cell
from trials.simulation.length_traces import TraceSource
from trials.simulation.simulated_cell import SimulatedCell, like
from trials.simulation.simulated_prober import usable_bytes
from trials.simulation.timing_model import EfficiencyConstants, NoSpeedError
from trials.simulation.trace_request import Routing, TraceRequest
from trials.simulation.varying_lengths import VaryingLengths

SMALLER = 8  # powers of two to try below the largest; smaller batches underuse a GPU
DRAWN_SIGMA = 0.2  # standard deviation of the logarithm of experts' shares, by published runs
AtLengths = Mapping[tuple[SimulatedCell, int], SimulatedCell]
SimulationKey = tuple[Cell, bool, bool]


@dataclass(frozen=True, slots=True)
class SimulatedCells:
    """Simulations of a cell, which GPUs share.

    Attributes:
        own: the cell, with the longest examples.
        routed: the same with drawn shares of the experts.
        varying: runs on examples of varying length; None where all batches are of one length.
    """

    own: SimulatedCell
    routed: Sequence[SimulatedCell]
    varying: VaryingLengths | None

    def requests(self, *, alone: bool) -> list[TraceRequest]:
        """Traces that the simulations need; with ``alone``, also those of one example."""
        requests = [r for cell in (self.own, *self.routed) for r in cell.requests(alone=alone)]
        return requests if self.varying is None else requests + self.varying.requests(alone=alone)

    def timed(self, cell: SimulatedCell, batch_size: int) -> SimulatedCell:
        """Cell of any length whose steps take the time of most batches of this size."""
        return cell if self.varying is None else self.varying.timed(cell, batch_size)


@dataclass(frozen=True, slots=True)
class BatchCandidates:
    """A cell on a GPU with the batch sizes that may be priced.

    Attributes:
        question: the job and the recipe.
        largest: largest batch that fits; 0 when not even one example fits.
        surviving: largest batch that survives varying lengths, among those tried; None where all
            batches are of one length.
        sizes: ascending.
    """

    question: Question
    gpu: Gpu
    cells: SimulatedCells
    largest: int
    surviving: int | None
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChosenBatch:
    """Batch that is priced.

    Attributes:
        tokens: mean tokens per example, padding included.
        timed: simulated cell at that length.
        hours: hours of the job's steps by candidate batch size; empty for a single candidate.
    """

    size: int
    tokens: float
    timed: SimulatedCell
    hours: Mapping[int, float]


def simulations(
    jobs: Sequence[EstimatedJob], traces: TraceSource
) -> dict[SimulationKey, SimulatedCells]:
    """Simulations that estimates of jobs need, with their traces made at once."""
    shared: dict[SimulationKey, SimulatedCells] = {}  # a trace does not depend on the GPU
    for question, gpu in jobs:
        key = simulation_key(question, gpu)
        if key not in shared:
            shared[key] = _simulated(question, question.cell(gpu), traces)
    # What may be needed is traced at once, for a tracing process takes longer to start.
    # Of several GPUs some hold a batch of one at most, whose trace is another.
    alone = len({gpu.key for _, gpu in jobs}) > 1 or any(
        question.changes or question.batch in {1, "fastest"} for question, _ in jobs
    )
    traces.prepare([r for cells in shared.values() for r in cells.requests(alone=alone)])
    return shared


def simulation_key(question: Question, gpu: Gpu) -> SimulationKey:
    """Everything that a simulation depends on, beside the job and the GPU."""
    cell = question.cell(gpu).model_copy(update={"gpu": "any"})
    return cell, question.expandable_segments, question.draws_lengths


def _simulated(question: Question, cell: Cell, traces: TraceSource) -> SimulatedCells:
    own = SimulatedCell(
        cell, question.model, traces, expandable_segments=question.expandable_segments
    )
    routings = (Routing(sigma=DRAWN_SIGMA, seed=n + 1) for n in range(question.routing_draws))
    routed = [SimulatedCell(cell, question.model, traces, routing) for routing in routings]
    varying = varying_lengths(question.workload, own) if question.draws_lengths else None
    return SimulatedCells(own, routed, varying)


def batch_candidates(question: Question, gpu: Gpu, cells: SimulatedCells) -> BatchCandidates:
    """Find the largest batches of a GPU, and the sizes that may be priced."""
    limit = usable_bytes(gpu, cells.own.recipe)
    largest = cells.own.largest_batch(gpu, limit, question.batch_limit)
    surviving = None
    if cells.varying is not None:
        surviving = cells.varying.largest(gpu, limit, sizes_to_try(question.rank_recipe, largest))
    most = largest if surviving is None else surviving
    if isinstance(question.batch, int):
        return BatchCandidates(question, gpu, cells, largest, surviving, (question.batch,))
    useful = max(min(most, rows(question.workload)), 1)
    effective_batch = question.rank_recipe.effective_batch
    if effective_batch is not None:
        sizes = _micro_batches(question, gpu, cells.own, most, useful)
        return BatchCandidates(
            question, gpu, cells, largest, surviving, tuple(sizes[-SMALLER - 1 :])
        )
    smaller: list[int] = []
    if question.batch == "fastest":
        smaller = [2**power for power in range((useful - 1).bit_length())][-SMALLER:]
    return BatchCandidates(question, gpu, cells, largest, surviving, (*smaller, useful))


def _micro_batches(
    question: Question, gpu: Gpu, cell: SimulatedCell, largest: int, useful: int
) -> list[int]:
    """Micro-batches that fit and add up to the effective batch, ascending; 1 where none fits."""
    effective_batch = question.rank_recipe.effective_batch
    assert effective_batch is not None  # the caller checks it
    if question.batch == "largest" and largest == useful == effective_batch:
        return [largest]
    accumulated = largest
    if largest == effective_batch:  # smaller ones may need more memory
        accumulated = cell.largest_batch(gpu, usable_bytes(gpu, cell.recipe), effective_batch - 1)
    sizes = [
        size
        for size in range(1, useful + 1)
        if effective_batch % size == 0 and (size <= accumulated or size == largest)
    ] or [1]
    return sizes if question.batch == "fastest" else sizes[-1:]


def at_lengths(candidates: Sequence[BatchCandidates], traces: TraceSource) -> AtLengths:
    """Cells at the mean padded length of each batch size, with all traces they need."""
    cells: dict[tuple[SimulatedCell, int], SimulatedCell] = {}
    requests = {}
    for row in candidates:
        cell = row.cells.own
        for size in row.sizes if row.largest else ():
            tokens = timed_length(row.question, size)
            key = (cell, tokens)
            if key not in cells:
                cells[key] = cell if tokens == row.question.seq_len else like(cell, tokens=tokens)
            timed = row.cells.timed(cells[key], size)
            requests[timed, size == 1] = timed.request_of(size)
    traces.prepare(list(requests.values()))
    return cells


def choose_batch(
    candidates: BatchCandidates, cells: AtLengths, constants: EfficiencyConstants
) -> ChosenBatch:
    """Choose the batch size with the shortest job; the largest where the speed is unknown."""
    question, hours = candidates.question, {}
    if len(candidates.sizes) > 1:
        try:
            for size in candidates.sizes:
                cell = cells[candidates.cells.own, timed_length(question, size)]
                timed = candidates.cells.timed(cell, size)
                step = timed.step_time(size, candidates.gpu, constants)
                seconds = step.seconds / question.rank_recipe.micro_batches(size)
                hours[size] = job_hours(question.workload, size, seconds)
        except NoSpeedError:
            hours = {}
    size = min(hours, key=hours.__getitem__, default=candidates.sizes[-1])
    cell = cells.get((candidates.cells.own, timed_length(question, size)), candidates.cells.own)
    timed = candidates.cells.timed(cell, size)
    return ChosenBatch(size, tokens_of(question, size), timed, hours)


def tokens_of(question: Question, batch_size: int) -> float:
    """Mean tokens per example of a batch, padding included."""
    padded = padded_tokens(question.workload, batch_size, question.seq_len)
    return min(padded, float(question.seq_len))


def timed_length(question: Question, batch_size: int) -> int:
    """Mean padded length, rounded, at which a step of this batch size is traced.

    Of several ranks it is that of the batch which the others wait for.
    """
    micro_batches = question.rank_recipe.micro_batches(batch_size)
    layout, most = question.parallel, question.seq_len
    tokens = waited_tokens(question.workload, batch_size, most, layout, micro_batches)
    return max(round(min(tokens, float(most))), 1)
