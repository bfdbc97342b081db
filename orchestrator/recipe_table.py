"""Recipes side by side: memory and time of each against the plainest, as in 2406.02290."""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestrator.tables import table
from trials.observation import Basis, Observation, Outcome, largest_batch
from trials.recipe import Recipe
from trials.workload import Cell

GIB, MIB = 2**30, 2**20


@dataclass(frozen=True, slots=True)
class RecipeRow:
    """One recipe on one GPU and model, at a batch size all of them were measured at.

    Attributes:
        recipe: which.
        peak_bytes: peak memory at the common batch size.
        step_seconds: median step time there; None when it was not timed.
        largest: its largest batch; None while that is not known.
        queries_per_second: the best of any batch size; None when nothing was timed.
    """

    recipe: Recipe
    peak_bytes: int
    step_seconds: float | None
    largest: int | None
    queries_per_second: float | None


@dataclass(frozen=True, slots=True)
class RecipeComparison:
    """Recipes that ran on the same GPU, model, routing and length.

    Attributes:
        cell: one of their cells.
        batch_size: where memory and time are compared.
        rows: the plainest first.
    """

    cell: Cell
    batch_size: int
    rows: tuple[RecipeRow, ...]


def plainness(recipe: Recipe) -> tuple[object, ...]:
    """Orders recipes by how little they do to save memory: the smallest is the default.

    Full weights before adapters before 4 bits, then what it departs in from the plainest of all: no
    checkpointing, PyTorch's own attention and optimizer, state on the GPU.
    """
    departures = (
        recipe.gradient_checkpointing,
        recipe.attention == "flash_attention_2",
        recipe.optimizer != "adamw",
        recipe.offload_optimizer,
        recipe.experts == "looped",
    )
    methods = ("full", "lora", "qlora")
    return (methods.index(recipe.method), sum(departures), recipe.attention != "eager", recipe.key)


def compare_recipes(observations: Sequence[Observation]) -> list[RecipeComparison]:
    """Every set of two recipes or more that can be compared, in the order observed."""
    groups: defaultdict[tuple[object, ...], defaultdict[Cell, list[Observation]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for o in observations:
        if o.basis is not Basis.CAPPED:
            stack = None if o.environment is None else o.environment.device_name
            cell = o.cell
            routing = (cell.gpu, cell.model, cell.weights, cell.active_experts, cell.seq_len)
            groups[*routing, o.basis, stack][cell].append(o)
    return [found for cells in groups.values() for found in _comparison(cells)]


def _comparison(cells: dict[Cell, list[Observation]]) -> Iterator[RecipeComparison]:
    measured = {cell: sizes for cell, seen in cells.items() if (sizes := _fits(seen))}
    common = set.intersection(*(set(sizes) for sizes in measured.values())) if measured else set()
    if len(measured) < 2 or not common:
        return
    batch_size = max(common)
    rows = [_row(cell, cells[cell], sizes, batch_size) for cell, sizes in measured.items()]
    rows.sort(key=lambda row: plainness(row.recipe))
    yield RecipeComparison(next(iter(measured)), batch_size, tuple(rows))


def _fits(seen: Sequence[Observation]) -> dict[int, list[Observation]]:
    sizes: defaultdict[int, list[Observation]] = defaultdict(list)
    for o in seen:
        if o.outcome is Outcome.FITS:
            sizes[o.batch_size].append(o)
    return sizes


def _row(
    cell: Cell, seen: list[Observation], sizes: dict[int, list[Observation]], batch_size: int
) -> RecipeRow:
    there = [o.measurement for o in sizes[batch_size] if o.measurement is not None]
    known = largest_batch(seen)
    medians = {size: median for size, of in sizes.items() if (median := _median(of)) is not None}
    return RecipeRow(
        recipe=cell.recipe,
        peak_bytes=max(m.memory.peak_allocated_bytes for m in there),
        step_seconds=medians.get(batch_size),
        largest=None if known is None else known[0],
        queries_per_second=max((size / s for size, s in medians.items()), default=None),
    )


def _median(observations: Sequence[Observation]) -> float | None:
    steps = [
        s for o in observations if o.measurement is not None for s in o.measurement.step_seconds
    ]
    return statistics.median(steps) if steps else None


def recipes_section(observations: Sequence[Observation]) -> str:
    """A table for each set of recipes that can be compared."""
    parts = []
    for found in compare_recipes(observations):
        cell, default = found.cell, found.rows[0]
        routing = (
            "" if cell.experts is None else f", {cell.active_experts} of {cell.experts} experts"
        )
        parts.append(
            f"**{cell.model}** on {cell.gpu}{routing}, {cell.seq_len} tokens a query, at batch "
            f"size {found.batch_size} (the largest that all were measured at). Relative to "
            f"{default.recipe.key}:"
        )
        headers = ("recipe", "peak", "", "step", "", "largest batch", "best queries/s", "")
        parts.append(table(headers, [_cells(row, default) for row in found.rows]))
    return "\n\n".join(["## Recipes side by side", *parts]) if parts else ""


def _cells(row: RecipeRow, default: RecipeRow) -> tuple[object, ...]:
    unit, name = (GIB, "GiB") if row.peak_bytes >= GIB else (MIB, "MiB")
    return (
        row.recipe.key,
        f"{row.peak_bytes / unit:.2f} {name}",
        _change(row.peak_bytes, default.peak_bytes),
        "" if row.step_seconds is None else f"{row.step_seconds:.3g} s",
        _change(row.step_seconds, default.step_seconds),
        "" if row.largest is None else row.largest,
        "" if row.queries_per_second is None else f"{row.queries_per_second:.3g}",
        _change(row.queries_per_second, default.queries_per_second),
    )


def _change(value: float | None, default: float | None) -> str:
    if value is None or default is None:
        return ""
    return f"{value / default - 1:+.0%}"
