"""Which batch size an estimate prices: as asked, the largest, or the fastest of several."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gpu_catalog.gpu import Gpu
from orchestrator.estimating.question import Question
from orchestrator.ranking.priced_job import job_hours
from orchestrator.spec.job_tokens import padded_tokens, rows
from trials.simulation.simulated_cell import SimulatedCell
from trials.simulation.simulated_prober import usable_bytes
from trials.simulation.timing_model import EfficiencyConstants, NoSpeedError
from trials.simulation.trace_cache import Traces

SMALLER = 8  # powers of two that are tried below the largest; still smaller ones leave GPUs idle
AtLengths = Mapping[tuple[SimulatedCell, int], SimulatedCell]


@dataclass(frozen=True, slots=True)
class BatchCandidates:
    """A cell on a GPU, and the batch sizes that may be priced.

    Attributes:
        gpu, cell, routed: what was replayed, and with drawn shares of the experts.
        largest: batch that fits; 0 when not even one example does.
        sizes: of the batches, ascending.
    """

    gpu: Gpu
    cell: SimulatedCell
    routed: Sequence[SimulatedCell]
    largest: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChosenBatch:
    """The batch that is priced, and what was tried.

    Attributes:
        size: examples per step.
        tokens: of each, padding included.
        timed: the cell at that length.
        hours: of the job's steps at each size that was tried; empty where one alone was.
    """

    size: int
    tokens: float
    timed: SimulatedCell
    hours: Mapping[int, float]


def sized(
    question: Question, gpu: Gpu, cell: SimulatedCell, routed: Sequence[SimulatedCell]
) -> BatchCandidates:
    """What fits, and of that what may be priced."""
    largest = cell.largest_batch(gpu, usable_bytes(gpu), question.batch_limit)
    if isinstance(question.batch, int):
        return BatchCandidates(gpu, cell, routed, largest, (question.batch,))
    useful = max(min(largest, rows(question.workload)), 1)
    smaller: list[int] = []
    if question.batch == "fastest":
        smaller = [2**power for power in range((useful - 1).bit_length())][-SMALLER:]
    return BatchCandidates(gpu, cell, routed, largest, (*smaller, useful))


def at_lengths(question: Question, found: Sequence[BatchCandidates], traces: Traces) -> AtLengths:
    """The cells at the lengths that steps of each size have on average, traced all at once."""
    cells: dict[tuple[SimulatedCell, int], SimulatedCell] = {}
    requests = {}
    for each in found:
        for size in each.sizes if each.largest else ():
            tokens = _length(question, size)
            key = (each.cell, tokens)
            if key not in cells:
                shorter = replace(question, seq_len=tokens)
                cells[key] = (
                    each.cell
                    if tokens == question.seq_len
                    else SimulatedCell(shorter.cell(each.gpu), question.model, traces)
                )
            requests[key, size == 1] = cells[key].request_of(size)
    traces.prepare(list(requests.values()))
    return cells


def taken(
    question: Question, each: BatchCandidates, cells: AtLengths, constants: EfficiencyConstants
) -> ChosenBatch:
    """The size that the job takes least time at; the largest where the GPU's speed is not known.

    Args:
        question: with the job.
        each: the sizes there are.
        cells: at their lengths.
        constants: of the clock.
    """
    hours = {}
    if len(each.sizes) > 1:
        try:
            for size in each.sizes:
                cell = cells[each.cell, _length(question, size)]
                step = cell.step_time(size, each.gpu, constants)
                hours[size] = job_hours(question.workload, size, step.seconds)
        except NoSpeedError:
            hours = {}
    size = min(hours, key=hours.__getitem__, default=each.sizes[-1])
    timed = cells.get((each.cell, _length(question, size)), each.cell)
    return ChosenBatch(size, tokens_of(question, size), timed, hours)


def tokens_of(question: Question, batch_size: int) -> float:
    """Of each example of a batch, on average, padding included."""
    padded = padded_tokens(question.workload, batch_size, question.seq_len)
    return min(padded, float(question.seq_len))


def _length(question: Question, batch_size: int) -> int:
    """That steps of such batches are traced at."""
    return max(round(tokens_of(question, batch_size)), 1)
