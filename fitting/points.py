"""The points a law is fitted to, drawn from observations that may be compared with each other."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fitting.laws import FloatArray
from fitting.step_times import StepTimes
from gpu_catalog.record import Record
from trials.observation import (
    MEMORY_MISSES,
    Basis,
    Environment,
    Observation,
    Outcome,
    largest_batch,
)
from trials.recipe import PositiveInt, Recipe
from trials.workload import Cell, Weights

GIB = 2**30


class FitGroup(Record):
    """What one set of coefficients speaks of.

    Attributes:
        gpu: key of the GPU; absent when the law holds across GPUs.
        model: name of the model.
        weights: random or pretrained; they route differently.
        recipe: how it is fine-tuned.
        active_experts: for each token; absent when the law holds across them, or without experts.
        seq_len: tokens per query; absent when the law holds across lengths.
    """

    gpu: str | None = None
    model: str
    weights: Weights = "random"
    recipe: Recipe
    active_experts: PositiveInt | None = None
    seq_len: PositiveInt | None = None

    @property
    def key(self) -> str:
        """A stable name, for example ``a40/mixtral-8x7b/qlora-r16-bf16/seq128``."""
        length = None if self.seq_len is None else f"seq{self.seq_len}"
        routing = None if self.active_experts is None else f"top{self.active_experts}"
        model = self.model if self.weights == "random" else f"{self.model}+{self.weights}"
        parts = (self.gpu, model, self.recipe.key, routing, length)
        return "/".join(part for part in parts if part is not None)


@dataclass(frozen=True, slots=True)
class Source:
    """Where points come from; two sources are never fitted together.

    Attributes:
        group: what their coefficients speak of.
        basis: measured, capped or simulated.
        stack: fingerprint of what they share; absent when no observation said where it ran.
        has_experts: whether sparsity can be varied.
    """

    group: FitGroup
    basis: Basis
    stack: str | None
    has_experts: bool


@dataclass(frozen=True, slots=True)
class Timings:
    """Step times on the batch ladder of one GPU, model, recipe and length: a row per visit."""

    source: Source
    batch_size: FloatArray
    sparsity: FloatArray
    step_seconds: FloatArray


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest batches of one model and recipe: one row per cell.

    ``gpus`` are those the rows come from. ``cells_seen`` counts the rows there would be if every
    largest batch were known, at least 1, and set by device memory.
    """

    source: Source
    gpus: tuple[str, ...]
    cells_seen: int
    memory_gb: FloatArray
    model_memory_gb: FloatArray
    seq_len: FloatArray
    sparsity: FloatArray
    largest_batch: FloatArray


@dataclass(frozen=True, slots=True)
class Peaks:
    """Peak memory of one model, recipe and sparsity: a row per GPU, length and batch size.

    ``limits`` are the largest batches that were found of the same.
    """

    source: Source
    limits: Limits
    seq_len: FloatArray
    tokens: FloatArray
    peak_gib: FloatArray


def timings(observations: Sequence[Observation]) -> list[Timings]:
    """The ladder, by (GPU, model, recipe, length), basis and stack: a point per observation.

    A capped GPU's speed is that of the larger one that stood in for it: none of its points is here.
    """
    own = [o for o in observations if o.basis is not Basis.CAPPED]
    return [_timings(source, members) for source, members in _sources(own, _group_of_times, _stack)]


def ladders(observations: Sequence[Observation]) -> list[tuple[Source, StepTimes]]:
    """The ladder, by (model, recipe), basis and software, all GPUs and lengths together.

    A row per observation, none of a capped GPU, as in ``timings``.
    """
    own = [o for o in observations if o.basis is not Basis.CAPPED]
    return [
        (source, _ladder(members)) for source, members in _sources(own, _group_of_limits, _software)
    ]


def gpu_name(gpu: str, stack: str) -> str:
    """What has a floor and slope of its own: a GPU, and all that it runs."""
    return f"{gpu}@{stack}"


def series_name(gpu: str, stack: str, seq_len: int) -> str:
    """What is one curve but for the sparsity."""
    return f"{gpu_name(gpu, stack)}/seq{seq_len}"


def limits(observations: Sequence[Observation]) -> list[Limits]:
    """Largest batches, by (model, recipe), basis and software.

    A stack names its device, so points across GPUs share only the rest of it: their fingerprint is
    that of the software alone, the driver left out.
    """
    return [
        _limits(source, members)
        for source, members in _sources(observations, _group_of_limits, _software)
    ]


def peaks(observations: Sequence[Observation]) -> list[Peaks]:
    """Peaks of what fits, by (model, recipe, active experts), basis and software, as ``limits``."""
    return [
        _peaks(source, members)
        for source, members in _sources(observations, _group_of_peaks, _software)
    ]


def _group_of_times(cell: Cell) -> FitGroup:
    return FitGroup(
        gpu=cell.gpu,
        model=cell.model,
        weights=cell.weights,
        recipe=cell.recipe,
        seq_len=cell.seq_len,
    )


def _group_of_limits(cell: Cell) -> FitGroup:
    return FitGroup(model=cell.model, weights=cell.weights, recipe=cell.recipe)


def _group_of_peaks(cell: Cell) -> FitGroup:
    return _group_of_limits(cell).model_copy(update={"active_experts": cell.active_experts})


def _stack(environment: Environment) -> str:
    return environment.stack


def _software(environment: Environment) -> str:
    # What fits does not depend on the driver, and no two clouds have the same one.
    return environment.software


def _sources(
    observations: Sequence[Observation],
    group_of: Callable[[Cell], FitGroup],
    stack_of: Callable[[Environment], str],
) -> Iterator[tuple[Source, list[Observation]]]:
    """Splits what must not be mixed, in an order that does not depend on that of the log."""
    pools: defaultdict[tuple[FitGroup, Basis], list[Observation]] = defaultdict(list)
    for o in observations:
        pools[group_of(o.cell), o.basis].append(o)
    for (group, basis), pool in sorted(
        pools.items(), key=lambda item: (item[0][0].key, item[0][1])
    ):
        has_experts = any(o.cell.experts is not None for o in pool)
        for stack, members in _by_stack(pool, stack_of):
            yield Source(group, basis, stack, has_experts), members


def _by_stack(
    pool: Sequence[Observation], stack_of: Callable[[Environment], str]
) -> list[tuple[str | None, list[Observation]]]:
    """Splits a pool by stack.

    A child killed by the host does not say where it ran. Such a probe belongs to the pool's only
    stack; where there are several, nobody knows to which, and it is left out.
    """
    by_stack: defaultdict[str, list[Observation]] = defaultdict(list)
    for o in pool:
        if o.environment is not None:
            by_stack[stack_of(o.environment)].append(o)
    if len(by_stack) > 1:
        return sorted(by_stack.items())
    return [(next(iter(by_stack), None), list(pool))]


def _timed(members: Sequence[Observation]) -> Iterator[tuple[Cell, str, int, float]]:
    """Cell, stack, batch size and median step of each timed probe of the ladder."""
    for o in members:
        if o.purpose != "ladder" or o.outcome is not Outcome.FITS or o.environment is None:
            continue
        if o.measurement is not None and o.measurement.step_seconds:
            seconds = statistics.median(o.measurement.step_seconds)
            yield o.cell, o.environment.stack, o.batch_size, seconds


def _timings(source: Source, members: Sequence[Observation]) -> Timings:
    rows = [(size, cell.sparsity, seconds) for cell, _, size, seconds in _timed(members)]
    table = np.array(sorted(rows), dtype=float).reshape(-1, 3)
    return Timings(source, *table.T)


def _ladder(members: Sequence[Observation]) -> StepTimes:
    timed = list(_timed(members))
    numbers = [(size, size * cell.seq_len, cell.sparsity, t) for cell, _, size, t in timed]
    table = np.array(numbers, dtype=float).reshape(-1, 4)
    batch_size, tokens, sparsity, seconds = table.T
    return StepTimes(
        gpu=np.array([gpu_name(cell.gpu, stack) for cell, stack, *_ in timed], np.str_),
        series=np.array(
            [series_name(cell.gpu, stack, cell.seq_len) for cell, stack, *_ in timed], np.str_
        ),
        batch_size=batch_size,
        tokens=tokens,
        sparsity=sparsity,
        seconds=seconds,
    )


def _peaks(source: Source, members: Sequence[Observation]) -> Peaks:
    """What several visits say of one batch size differs a little: the most counts."""
    most: defaultdict[tuple[str, int, int], int] = defaultdict(int)
    for o in members:
        if o.outcome is Outcome.FITS and o.measurement is not None:
            at = (o.cell.gpu, o.cell.seq_len, o.batch_size)
            most[at] = max(most[at], o.measurement.memory.peak_allocated_bytes)
    rows = [(length, length * size, peak / GIB) for (_, length, size), peak in most.items()]
    table = np.array(sorted(rows), dtype=float).reshape(-1, 3)
    return Peaks(source, _limits(source, members), *table.T)


def _limits(source: Source, members: Sequence[Observation]) -> Limits:
    cells: defaultdict[Cell, list[Observation]] = defaultdict(list)
    for o in members:
        cells[o.cell].append(o)
    known = {cell: row for cell, of in cells.items() if (row := _limit(cell, of)) is not None}
    table = np.array(sorted(known.values()), dtype=float).reshape(-1, 5)
    gpus = tuple(sorted({cell.gpu for cell in known}))
    return Limits(source, gpus, len(cells), *table.T)


def _limit(cell: Cell, observations: list[Observation]) -> tuple[float, ...] | None:
    """One cell's row of Limits, or None when device memory did not show its limit.

    What a GPU has to give differs a little from process to process: the least counts.
    """
    found = largest_batch(observations)
    if found is None:
        return None
    largest, miss = found
    if largest < 1 or miss is None or miss.outcome not in MEMORY_MISSES:
        return None
    measured = [o for o in observations if o.measurement is not None]
    memory_limit_bytes = min(o.memory_limit_bytes for o in measured)
    model_bytes = max(o.measurement.model_memory_bytes for o in measured if o.measurement)
    if model_bytes >= memory_limit_bytes:
        raise ValueError(
            f"{cell.key}: {largest} queries are said to fit in {memory_limit_bytes} bytes, yet the "
            f"model alone takes {model_bytes}: remove these observations and measure them again"
        )
    return memory_limit_bytes / 1e9, model_bytes / 1e9, cell.seq_len, cell.sparsity, largest
