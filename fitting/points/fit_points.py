"""Points that laws are fitted to, from observations that may be compared with each other."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from fitting.numerics.arrays import FloatArray, IntArray
from fitting.points.observation_columns import BASES, NOWHERE, Columns
from fitting.points.step_time_rows import StepTimes
from gpu_catalog.errors import UserError
from gpu_catalog.record import Record
from trials.recipes.fields import PositiveInt
from trials.recipes.parallel import Parallel
from trials.recipes.recipe import Recipe
from trials.records.cell import Weights
from trials.records.observation import MEMORY_MISSES, Basis, Outcome

GIB = 2**30


class FitGroup(Record):
    """Scope of one set of coefficients.

    Attributes:
        gpu: key of the GPU; None for a law across GPUs.
        weights: random or pretrained weights, which route differently.
        active_experts: active experts per token; None for a law across them, or without experts.
        seq_len: tokens per example; None for a law across lengths.
        parallel: layout of several GPUs; None for one GPU.
    """

    gpu: str | None = None
    model: str
    weights: Weights = "random"
    recipe: Recipe
    active_experts: PositiveInt | None = None
    seq_len: PositiveInt | None = None
    # Records of one GPU stay as they were before there were layouts.
    parallel: Annotated[Parallel | None, Field(exclude_if=lambda layout: layout is None)] = None

    @property
    def key(self) -> str:
        """Stable name, for example ``a40/mixtral-8x7b/qlora-r16-bf16/seq128``."""
        length = None if self.seq_len is None else f"seq{self.seq_len}"
        routing = None if self.active_experts is None else f"top{self.active_experts}"
        model = self.model if self.weights == "random" else f"{self.model}+{self.weights}"
        layout = None if self.parallel is None else self.parallel.key
        parts = (self.gpu, model, self.recipe.key, routing, length, layout)
        return "/".join(part for part in parts if part is not None)


@dataclass(frozen=True, slots=True)
class PointSource:
    """Origin of points; points of two sources are never fitted together.

    Attributes:
        stack: shared fingerprint; None when no observation has an environment.
        has_experts: whether the sparsity can be varied.
    """

    group: FitGroup
    basis: Basis
    stack: str | None
    has_experts: bool


@dataclass(frozen=True, slots=True)
class LadderTimings:
    """Step times on the batch ladder of one GPU, model, recipe and length, a row per timing."""

    source: PointSource
    batch_size: FloatArray
    sparsity: FloatArray
    step_seconds: FloatArray


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest batches of one model and recipe, a row per cell.

    ``gpus`` are the GPUs of the rows. ``cell_count`` also counts the cells without a row, whose
    largest batch is unknown, 0 or not limited by device memory.
    """

    source: PointSource
    gpus: tuple[str, ...]
    cell_count: int
    memory_gb: FloatArray
    model_memory_gb: FloatArray
    seq_len: FloatArray
    sparsity: FloatArray
    largest_batch: FloatArray


@dataclass(frozen=True, slots=True)
class Peaks:
    """Peak memory of one model, recipe and sparsity, a row per GPU, length and batch size.

    ``limits`` are the largest batches of the same cells.
    """

    source: PointSource
    limits: Limits
    seq_len: FloatArray
    tokens: FloatArray
    peak_gib: FloatArray


def timings(columns: Columns) -> Iterator[LadderTimings]:
    """Ladder timings by (GPU, model, recipe, length), basis and stack.

    Capped GPUs have no points, because their speed is that of a larger GPU.
    """
    stacks = _Names(environment.stack for environment in columns.environments)
    sparsity = np.array([cell.sparsity for cell in columns.cells], np.float64)[columns.cell]
    every, timed = np.stack([columns.batch_size, sparsity, columns.step_seconds]), columns.timed
    for source, members in _sources(columns, _uncapped(columns), ("gpu", "seq_len"), stacks):
        table = every[:, members[timed[members]]]
        yield LadderTimings(source, *table[:, np.lexsort(table[::-1])])


def ladders(columns: Columns) -> Iterator[tuple[PointSource, StepTimes]]:
    """Ladder timings by (model, recipe), basis and software, of all GPUs and lengths together.

    Capped GPUs have no points, as in ``timings``.
    """
    stacks = [environment.stack for environment in columns.environments]
    software, timed = _software(columns), columns.timed
    for source, members in _sources(columns, _uncapped(columns), (), software):
        yield source, _ladder(columns, members[timed[members]], stacks)


def gpu_name(gpu: str, stack: str) -> str:
    """Name of a GPU with its stack, which together have one floor and one slope."""
    return f"{gpu}@{stack}"


def series_name(gpu: str, stack: str, seq_len: int) -> str:
    """Name of a series: a GPU with its stack, at one length."""
    return f"{gpu_name(gpu, stack)}/seq{seq_len}"


def limits(columns: Columns) -> Iterator[Limits]:
    """Largest batches, by (model, recipe), basis and software.

    A stack includes its device, so points across GPUs share only the fingerprint of the software,
    without the driver.
    """
    every = np.arange(len(columns.cell))
    for source, members in _sources(columns, every, (), _software(columns)):
        yield _limits(columns, source, members)


def peaks(columns: Columns) -> Iterator[Peaks]:
    """Peak memory of the probes that fit, by (model, recipe, active experts), basis and software.

    The fingerprint is that of ``limits``.
    """
    every = np.arange(len(columns.cell))
    for source, members in _sources(columns, every, ("active_experts",), _software(columns)):
        yield _peaks(columns, source, members)


class _Names:
    """Distinct names of items, sorted, and the index of each item's name."""

    def __init__(self, items: Iterable[str]) -> None:
        every = list(items)
        self.names = sorted(set(every))
        places = {name: place for place, name in enumerate(self.names)}
        self.index: IntArray = np.array([*(places[name] for name in every), NOWHERE], np.int64)
        """(items + 1,) place of each item's name; the last entry serves the item ``NOWHERE``."""


def _software(columns: Columns) -> _Names:
    # Memory does not depend on the driver, and clouds differ in their drivers.
    return _Names(environment.software for environment in columns.environments)


def _uncapped(columns: Columns) -> IntArray:
    """Rows of GPUs that ran their own probes."""
    return np.flatnonzero(columns.basis != BASES.index(Basis.CAPPED))


def _sources(
    columns: Columns, rows: IntArray, own: Sequence[str], stacks: _Names
) -> Iterator[tuple[PointSource, IntArray]]:
    """Split rows by source, in an order that does not depend on that of the log.

    A group shares the model, the recipe, the layout of several GPUs, and the fields ``own`` of its
    cells.
    """
    names = ("model", "weights", "recipe", "parallel", *own)
    of_cells = (tuple(getattr(cell, name) for name in names) for cell in columns.cells)
    numbers: dict[tuple[object, ...], int] = {}
    number = np.array([numbers.setdefault(values, len(numbers)) for values in of_cells], np.int64)
    groups = [FitGroup(**dict(zip(names, values, strict=True))) for values in numbers]
    keys = [group.key for group in groups]
    has_experts = np.array([cell.experts is not None for cell in columns.cells], bool)
    pools = [
        (*divmod(code, len(BASES)), rows[pool])
        for code, pool in _split(number[columns.cell[rows]] * len(BASES) + columns.basis[rows])
    ]
    for place, basis, pool in sorted(pools, key=lambda p: (keys[p[0]], p[1])):
        with_experts = bool(has_experts[columns.cell[pool]].any())
        for stack, members in _by_stack(columns, pool, stacks):
            yield PointSource(groups[place], BASES[basis], stack, with_experts), members


def _by_stack(
    columns: Columns, pool: IntArray, stacks: _Names
) -> list[tuple[str | None, IntArray]]:
    """Split a pool by stack.

    A child killed by the host reports no environment. Such a probe belongs to the pool's only
    stack; in a pool of several stacks it is left out.
    """
    places = stacks.index[columns.environment[pool]]
    by_stack = [(place, rows) for place, rows in _split(places) if place != NOWHERE]
    if len(by_stack) > 1:
        return [(stacks.names[place], pool[rows]) for place, rows in by_stack]
    return [(stacks.names[by_stack[0][0]] if by_stack else None, pool)]


def _split(numbers: IntArray) -> list[tuple[int, IntArray]]:
    """Distinct numbers, ascending, each with its places, ascending."""
    order = np.argsort(numbers, kind="stable")
    distinct, starts = np.unique(numbers[order], return_index=True)
    places = np.split(order, starts)[1:]
    return list(zip(distinct.tolist(), places, strict=True))


def _ladder(columns: Columns, rows: IntArray, stacks: Sequence[str]) -> StepTimes:
    places = np.stack([columns.cell[rows], columns.environment[rows]], axis=1)
    kinds, kind = np.unique(places, axis=0, return_inverse=True)
    kind = kind.ravel()
    pairs = [(columns.cells[cell], stacks[environment]) for cell, environment in kinds.tolist()]
    gpus = [gpu_name(cell.gpu, stack) for cell, stack in pairs]
    series = [series_name(cell.gpu, stack, cell.seq_len) for cell, stack in pairs]
    batch_size = columns.batch_size[rows]
    return StepTimes(
        gpu=np.array(gpus, np.str_)[kind],
        series=np.array(series, np.str_)[kind],
        batch_size=batch_size,
        tokens=batch_size * np.array([float(cell.seq_len) for cell, _ in pairs])[kind],
        sparsity=np.array([cell.sparsity for cell, _ in pairs], np.float64)[kind],
        seconds=columns.step_seconds[rows],
    )


def _peaks(columns: Columns, source: PointSource, members: IntArray) -> Peaks:
    """Largest peak of each GPU, length and batch size: repeated probes differ a little."""
    has_peak = columns.ended(members, Outcome.FITS) & np.isfinite(columns.peak_bytes[members])
    rows = members[has_peak]
    places, cell = np.unique(columns.cell[rows], return_inverse=True)
    cells = [columns.cells[place] for place in places]
    gpu = _Names(c.gpu for c in cells).index[cell]
    seq_len = np.array([c.seq_len for c in cells], np.float64)[cell]
    size, peak = columns.batch_size[rows], columns.peak_bytes[rows]
    order = np.lexsort((-peak, size, seq_len, gpu))
    point = np.stack([gpu, seq_len, size])[:, order]
    is_first = np.any(np.diff(point, axis=1, prepend=np.nan) != 0, axis=0)
    _, length, batch = point[:, is_first]
    table = np.stack([length, length * batch, peak[order][is_first] / GIB])
    limits_of_cells = _limits(columns, source, members)
    return Peaks(source, limits_of_cells, *table[:, np.lexsort(table[::-1])])


def _limits(columns: Columns, source: PointSource, members: IntArray) -> Limits:
    """Largest batches of the cells that device memory limits.

    ``trials.records.observation.largest_batch`` defines the largest batch. A GPU's usable memory
    differs a little between processes: the least counts.
    """
    places, cell = np.unique(columns.cell[members], return_inverse=True)
    size = columns.batch_size[members]
    fits, missed = columns.ended(members, Outcome.FITS), columns.ended(members, *MEMORY_MISSES)
    lowest_miss = np.full(len(places), np.inf)
    np.minimum.at(lowest_miss, cell[missed], size[missed])
    largest = np.zeros(len(places))
    below = fits & (size < lowest_miss[cell])
    np.maximum.at(largest, cell[below], size[below])
    measured = np.isfinite(columns.model_bytes[members])
    memory_limit, model = np.full(len(places), np.inf), np.zeros(len(places))
    np.minimum.at(memory_limit, cell[measured], columns.memory_limit_bytes[members][measured])
    np.maximum.at(model, cell[measured], columns.model_bytes[members][measured])
    limited = np.flatnonzero((largest >= 1) & (lowest_miss == largest + 1))
    cells = [columns.cells[place] for place in places[limited]]
    for place, limited_cell in zip(limited, cells, strict=True):
        if model[place] >= memory_limit[place]:
            raise UserError(
                f"{limited_cell.key}: {largest[place]:.0f} examples fit in "
                f"{memory_limit[place]:.0f} bytes, yet the model alone takes {model[place]:.0f}: "
                "remove these observations and measure them again"
            )
    rows = [
        memory_limit[limited] / 1e9,
        model[limited] / 1e9,
        np.array([c.seq_len for c in cells], np.float64),
        np.array([c.sparsity for c in cells], np.float64),
        largest[limited],
    ]
    table = np.stack(rows)[:, np.lexsort(rows[::-1])]
    gpus = tuple(sorted({c.gpu for c in cells}))
    return Limits(source, gpus, len(places), *table)
