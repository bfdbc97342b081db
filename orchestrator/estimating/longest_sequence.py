"""Longest sequence of which a batch fits each GPU, and lengths whose traces determine others."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from gpu_catalog.gpu import Gpu
from orchestrator.estimating.question import EstimateError, Question
from orchestrator.request import BatchOption
from orchestrator.spec.job import Job
from orchestrator.spec.job_tokens import longest_example, longest_tokens
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell
from trials.records.model import Model
from trials.simulation.length_traces import TraceSource
from trials.simulation.simulated_cell import SimulatedCell
from trials.simulation.simulated_prober import usable_bytes

# Kernels pad rows to 128, so that only at its multiples traces follow exactly from others.
MULTIPLE = 128
COARSE = 8 * MULTIPLE
ASSUMED_TOKENS = 1024  # that TRL cuts examples to (trl/trainer/sft_config.py)
MOST_TOKENS = 2**20  # tried for a model that states no longest sequence


def most_tokens(model: Model) -> int:
    """Longest sequence to try: the longest that the model was made for, where it is stated."""
    return model.positions or MOST_TOKENS


def lengths_up_to(tokens: int) -> tuple[int, ...]:
    """Lengths whose traces determine all others; fewer than three determine no other."""
    quarter = tokens // (4 * MULTIPLE) * MULTIPLE
    return (4 * quarter, 2 * quarter, quarter) if quarter else (tokens,)


def lengths_among(lengths: Sequence[int]) -> tuple[int, ...]:
    """At most three lengths whose traces determine all."""
    ascending = sorted(lengths)
    return tuple(dict.fromkeys(ascending[n * (len(ascending) - 1) // 2] for n in range(3)))


def check_longest(job: Job, recipe: Recipe | None, batch_size: BatchOption | None) -> None:
    """Check that nothing but memory decides on the longest sequence.

    Raises:
        EstimateError: the data, packing or the batch size does.
    """
    tokens = longest_example(job)
    if tokens is not None:
        raise EstimateError(
            f"--seq-len max: the examples have up to {tokens} tokens: leave --seq-len out, or "
            "estimate without the data"
        )
    if recipe is not None and recipe.packing:
        raise EstimateError("--seq-len max: --packing needs the tokens of a row: give a number")
    if not isinstance(batch_size, int):
        raise EstimateError(
            f"--seq-len max needs a batch size: give --batch-size a number, not {batch_size}, or "
            "leave it out for 1"
        )


def at_longest(
    jobs: Sequence[tuple[Question, Gpu]], traces: TraceSource
) -> list[tuple[Question, Gpu]]:
    """Jobs with the longest sequence of which a batch fits their GPU; the shortest if none does.

    It is a multiple of ``MULTIPLE``, or the longest to try, and the next ones do not fit.

    Raises:
        TraceError: the model cannot be traced under a recipe.
    """
    cells: dict[Cell, SimulatedCell] = {}  # GPUs share them

    def simulated(question: Question, gpu: Gpu) -> SimulatedCell:
        cell = question.cell(gpu).model_copy(update={"gpu": "any"})
        if cell not in cells:
            expandable = question.expandable_segments
            cells[cell] = SimulatedCell(
                cell, question.model, traces, expandable_segments=expandable
            )
        return cells[cell]

    def longest(question: Question, gpu: Gpu) -> Question:
        assert isinstance(question.batch, int)  # the request sees to it
        batch_size, limit = question.batch, usable_bytes(gpu, question.recipe)

        def misses(tokens: int) -> bool:
            cell = simulated(replace(question, seq_len=tokens), gpu)
            return cell.without_limit(batch_size, gpu).peak_reserved_bytes > limit

        return replace(question, seq_len=longest_that_fits(misses, question.seq_len))

    requests = [
        request
        for question, gpu in jobs
        for request in simulated(question, gpu).requests(alone=question.batch == 1)
    ]
    traces.prepare(requests)
    return [(longest(question, gpu), gpu) for question, gpu in jobs]


def longest_that_fits(misses: Callable[[int], bool], most: int) -> int:
    """Longest sequence up to ``most`` that does not miss; the shortest tried if all do.

    The allocator's segments are of 2 MiB, so that of two neighbours the longer one may reserve
    less. Multiples of ``COARSE`` are in order; between two of them all are tried.
    """
    coarse = [*range(COARSE, most, COARSE), most]
    count = bisect_left(coarse, True, key=misses)  # noqa: FBT003 - the value of the key
    if count == len(coarse):
        return most
    fits, miss = coarse[count - 1] if count else 0, coarse[count]
    between = range((miss - 1) // MULTIPLE * MULTIPLE, fits, -MULTIPLE)
    return next((n for n in between if not misses(n)), fits or min(MULTIPLE, most))


def row_tokens(seq_len: int | None, job: Job, recipe: Recipe | None) -> int | None:
    """Tokens of the longest row: as given, or as the data has them; None where neither says.

    Raises:
        EstimateError: they are fewer than an example has, or unknown to GRPO, which cuts none.
    """
    if recipe is not None and recipe.packing:
        return _row_length(seq_len, job)
    longest = longest_example(job)
    if longest is None:
        if seq_len is None and recipe is not None and recipe.task == "grpo":
            raise EstimateError("--seq-len is missing: give the tokens of prompt and completion")
        return seq_len
    if seq_len is not None and seq_len < longest:
        raise EstimateError(
            f"--seq-len {seq_len}: examples have up to {longest} tokens: add "
            f"--cutoff {seq_len}, or leave --seq-len out"
        )
    return seq_len or longest_tokens(job, longest)


def _row_length(seq_len: int | None, job: Job) -> int | None:
    if job.padding == "grouped":
        raise EstimateError("--packing and --group-by-length exclude each other: give one")
    return seq_len or job.cutoff
