"""The points a law is fitted to, drawn from observations that may be compared with each other."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fitting.numerics.arrays import FloatArray, IntArray
from fitting.points.observation_columns import BASES, NOWHERE, Columns
from fitting.points.step_time_rows import StepTimes
from gpu_catalog.record import Record
from trials.records.cell import Cell, Weights
from trials.records.observation import MEMORY_MISSES, Basis, Outcome
from trials.records.recipe import PositiveInt, Recipe

GIB = 2**30


class FitGroup(Record):
    """What one set of coefficients speaks of.

    Attributes:
        gpu: key of the GPU; absent when the law holds across GPUs.
        model: name of the model.
        weights: random or pretrained; they route differently.
        recipe: how it is fine-tuned.
        active_experts: for each token; absent when the law holds across them, or without experts.
        seq_len: tokens per example; absent when the law holds across lengths.
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
class PointSource:
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
class LadderTimings:
    """Step times on the batch ladder of one GPU, model, recipe and length: a row per visit."""

    source: PointSource
    batch_size: FloatArray
    sparsity: FloatArray
    step_seconds: FloatArray


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest batches of one model and recipe: one row per cell.

    ``gpus`` are those the rows come from. ``cells_seen`` counts the rows there would be if every
    largest batch were known, at least 1, and set by device memory.
    """

    source: PointSource
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

    source: PointSource
    limits: Limits
    seq_len: FloatArray
    tokens: FloatArray
    peak_gib: FloatArray


def timings(columns: Columns) -> Iterator[LadderTimings]:
    """The ladder, by (GPU, model, recipe, length), basis and stack: a point per observation.

    A capped GPU's speed is that of the larger one that stood in for it: none of its points is here.
    """
    stacks = _Names(environment.stack for environment in columns.environments)
    sparsity = np.array([cell.sparsity for cell in columns.cells], np.float64)[columns.cell]
    every, timed = np.stack([columns.batch_size, sparsity, columns.step_seconds]), columns.timed
    for source, members in _sources(columns, _own(columns), _group_of_times, stacks):
        table = every[:, members[timed[members]]]
        yield LadderTimings(source, *table[:, np.lexsort(table[::-1])])


def ladders(columns: Columns) -> Iterator[tuple[PointSource, StepTimes]]:
    """The ladder, by (model, recipe), basis and software, all GPUs and lengths together.

    A row per observation, none of a capped GPU, as in ``timings``.
    """
    stacks = [environment.stack for environment in columns.environments]
    software, timed = _software(columns), columns.timed
    for source, members in _sources(columns, _own(columns), _group_of_limits, software):
        yield source, _ladder(columns, members[timed[members]], stacks)


def gpu_name(gpu: str, stack: str) -> str:
    """What has a floor and slope of its own: a GPU, and all that it runs."""
    return f"{gpu}@{stack}"


def series_name(gpu: str, stack: str, seq_len: int) -> str:
    """What is one curve but for the sparsity."""
    return f"{gpu_name(gpu, stack)}/seq{seq_len}"


def limits(columns: Columns) -> Iterator[Limits]:
    """Largest batches, by (model, recipe), basis and software.

    A stack names its device, so points across GPUs share only the rest of it: their fingerprint is
    that of the software alone, the driver left out.
    """
    every = np.arange(len(columns.cell))
    for source, members in _sources(columns, every, _group_of_limits, _software(columns)):
        yield _limits(columns, source, members)


def peaks(columns: Columns) -> Iterator[Peaks]:
    """Peaks of what fits, by (model, recipe, active experts), basis and software, as ``limits``."""
    every = np.arange(len(columns.cell))
    for source, members in _sources(columns, every, _group_of_peaks, _software(columns)):
        yield _peaks(columns, source, members)


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


class _Names:
    """Names of what there is several of, each but once.

    Args:
        told: the name of each.
    """

    def __init__(self, told: Iterable[str]) -> None:
        every = list(told)
        self.names = sorted(set(every))
        places = {name: place for place, name in enumerate(self.names)}
        self.of: IntArray = np.array([*(places[name] for name in every), NOWHERE], np.int64)
        """Which of the names each has; the last one is of what is ``NOWHERE``."""


def _software(columns: Columns) -> _Names:
    # What fits does not depend on the driver, and no two clouds have the same one.
    return _Names(environment.software for environment in columns.environments)


def _own(columns: Columns) -> IntArray:
    """The rows of GPUs that ran themselves."""
    return np.flatnonzero(columns.basis != BASES.index(Basis.CAPPED))


def _sources(
    columns: Columns, rows: IntArray, group_of: Callable[[Cell], FitGroup], stacks: _Names
) -> Iterator[tuple[PointSource, IntArray]]:
    """Splits what must not be mixed, in an order that does not depend on that of the log."""
    groups: dict[FitGroup, int] = {}
    group = np.array([groups.setdefault(group_of(c), len(groups)) for c in columns.cells], np.int64)
    named, keys = tuple(groups), [each.key for each in groups]
    has_experts = np.array([cell.experts is not None for cell in columns.cells], bool)
    pools = [
        (keys[number // len(BASES)], named[number // len(BASES)], BASES[number % len(BASES)], pool)
        for number, pool in _split(group[columns.cell[rows]] * len(BASES) + columns.basis[rows])
    ]
    for _, of, basis, pool in sorted(pools, key=lambda each: (each[0], each[2])):
        several = bool(has_experts[columns.cell[rows[pool]]].any())
        for stack, members in _by_stack(columns, rows[pool], stacks):
            yield PointSource(of, basis, stack, several), members


def _by_stack(
    columns: Columns, pool: IntArray, stacks: _Names
) -> list[tuple[str | None, IntArray]]:
    """Splits a pool by stack.

    A child killed by the host does not say where it ran. Such a probe belongs to the pool's only
    stack; where there are several, nobody knows to which, and it is left out.
    """
    told = stacks.of[columns.environment[pool]]
    by_stack = [(place, of) for place, of in _split(told) if place != NOWHERE]
    if len(by_stack) > 1:
        return [(stacks.names[place], pool[of]) for place, of in by_stack]
    return [(stacks.names[by_stack[0][0]] if by_stack else None, pool)]


def _split(numbers: IntArray) -> list[tuple[int, IntArray]]:
    """Each number, ascending, and the places where it stands, ascending."""
    order = np.argsort(numbers, kind="stable")
    found, starts = np.unique(numbers[order], return_index=True)
    return list(zip(found.tolist(), np.split(order, starts[1:]), strict=True)) if len(found) else []


def _ladder(columns: Columns, rows: IntArray, stacks: Sequence[str]) -> StepTimes:
    places = np.stack([columns.cell[rows], columns.environment[rows]], axis=1)
    kinds, kind = np.unique(places, axis=0, return_inverse=True)
    kind = kind.ravel()
    told = [(columns.cells[cell], stacks[environment]) for cell, environment in kinds.tolist()]
    batch_size = columns.batch_size[rows]
    return StepTimes(
        gpu=np.array([gpu_name(c.gpu, stack) for c, stack in told], np.str_)[kind],
        series=np.array([series_name(c.gpu, stack, c.seq_len) for c, stack in told], np.str_)[kind],
        batch_size=batch_size,
        tokens=batch_size * np.array([float(cell.seq_len) for cell, _ in told])[kind],
        sparsity=np.array([cell.sparsity for cell, _ in told], np.float64)[kind],
        seconds=columns.step_seconds[rows],
    )


def _peaks(columns: Columns, source: PointSource, members: IntArray) -> Peaks:
    """What several visits say of one batch size differs a little: the most counts."""
    known = _limits(columns, source, members)
    is_told = columns.ended(members, Outcome.FITS) & np.isfinite(columns.peak_bytes[members])
    rows = members[is_told]
    cells, cell = np.unique(columns.cell[rows], return_inverse=True)
    named = [columns.cells[place] for place in cells]
    gpu = _Names(each.gpu for each in named).of[cell]
    seq_len = np.array([each.seq_len for each in named], np.float64)[cell]
    size, peak = columns.batch_size[rows], columns.peak_bytes[rows]
    order = np.lexsort((-peak, size, seq_len, gpu))
    point = np.stack([gpu, seq_len, size])[:, order]
    is_first = np.any(np.diff(point, axis=1, prepend=np.nan) != 0, axis=0)
    _, length, batch = point[:, is_first]
    table = np.stack([length, length * batch, peak[order][is_first] / GIB])
    return Peaks(source, known, *table[:, np.lexsort(table[::-1])])


def _limits(columns: Columns, source: PointSource, members: IntArray) -> Limits:
    """A row for each cell of which device memory showed the limit.

    ``trials.records.observation.largest_batch`` defines the largest batch. A GPU's usable memory
    differs a little from process to process: the least counts.
    """
    cells, cell = np.unique(columns.cell[members], return_inverse=True)
    size = columns.batch_size[members]
    fits, missed = columns.ended(members, Outcome.FITS), columns.ended(members, *MEMORY_MISSES)
    lowest_miss = np.full(len(cells), np.inf)
    np.minimum.at(lowest_miss, cell[missed], size[missed])
    largest = np.zeros(len(cells))
    below = fits & (size < lowest_miss[cell])
    np.maximum.at(largest, cell[below], size[below])
    measured = np.isfinite(columns.model_bytes[members])
    memory_limit, model = np.full(len(cells), np.inf), np.zeros(len(cells))
    np.minimum.at(memory_limit, cell[measured], columns.memory_limit_bytes[members][measured])
    np.maximum.at(model, cell[measured], columns.model_bytes[members][measured])
    known = np.flatnonzero((largest >= 1) & (lowest_miss == largest + 1))
    named = [columns.cells[place] for place in cells[known]]
    for place, one in zip(known, named, strict=True):
        if model[place] >= memory_limit[place]:
            raise ValueError(
                f"{one.key}: {largest[place]:.0f} examples are said to fit in "
                f"{memory_limit[place]:.0f} bytes, yet the model alone takes {model[place]:.0f}: "
                "remove these observations and measure them again"
            )
    rows = [
        memory_limit[known] / 1e9,
        model[known] / 1e9,
        np.array([each.seq_len for each in named], np.float64),
        np.array([each.sparsity for each in named], np.float64),
        largest[known],
    ]
    table = np.stack(rows)[:, np.lexsort(rows[::-1])]
    gpus = tuple(sorted({each.gpu for each in named}))
    return Limits(source, gpus, len(cells), *table)
