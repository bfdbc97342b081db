"""Recipes side by side: memory and time of each against the plainest, as in 2406.02290."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.markdown_table import table
from trials.records.cell import Cell
from trials.records.observation import (
    MEMORY_MISSES,
    Basis,
    Observation,
    Outcome,
    by_cell,
    largest_batch,
    without_superseded,
)
from trials.records.recipe import Recipe

GIB, MIB = 2**30, 2**20
HEADERS = (
    "recipe",
    "peak memory",
    "against the default",
    "step",
    "against the default",
    "largest batch",
    "best examples/s",
    "against the default",
)


@dataclass(frozen=True, slots=True)
class RecipeRow:
    """One recipe on one GPU and model; absent is what was not measured.

    Attributes:
        recipe: which.
        peak_bytes: peak memory at the common batch size; None when not even one example fits.
        step_seconds: median step time there; None when it was not timed.
        largest: its largest batch; None while that is not known.
        examples_per_second: the best of any batch size; None when nothing was timed.
    """

    recipe: Recipe
    peak_bytes: int | None
    step_seconds: float | None
    largest: int | None
    examples_per_second: float | None


@dataclass(frozen=True, slots=True)
class RecipeComparison:
    """Recipes that ran on the same GPU, model, weights, routing, length, basis and stack.

    Attributes:
        cell: the default's.
        basis: measured or simulated.
        batch_size: where memory and time are compared.
        timed: whether every recipe that fits was timed there.
        rows: the default first, recipes of which nothing fits last.
    """

    cell: Cell
    basis: Basis
    batch_size: int
    timed: bool
    rows: tuple[RecipeRow, ...]


def plainness(recipe: Recipe) -> tuple[object, ...]:
    """Orders recipes by how little they do to save memory or time.

    Full weights before adapters before 4 bits, then by how many departures there are from the
    plainest of all: no checkpointing, PyTorch's attention and AdamW, state on the GPU, experts in
    one grouped product. Between equals eager attention comes first, then the recipe's name decides.
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
    """Every set of two recipes or more that can be compared, in the order observed.

    A capped GPU has no speed of its own and is not among them.
    """
    pools: defaultdict[tuple[object, ...], list[Observation]] = defaultdict(list)
    for o in without_superseded(observations):
        if o.basis is not Basis.CAPPED:
            cell = o.cell
            setting = (cell.gpu, cell.model, cell.weights, cell.active_experts, cell.seq_len)
            pools[*setting, o.basis].append(o)
    groups = [group for pool in pools.values() for group in _by_stack(pool)]
    return [found for group in groups if (found := _comparison(group)) is not None]


def _by_stack(pool: Sequence[Observation]) -> list[list[Observation]]:
    """Splits a pool by stack, in the order observed.

    A child that ran out of memory while it built the model does not say where it ran. That belongs
    to the only stack of its cell, else to the only one of the pool, else nobody knows to which.
    """
    stacks = _stacks(pool)
    if not stacks:
        return [list(pool)]
    only: dict[Cell, str | None] = {}
    for cell, seen in by_cell(pool).items():
        own = _stacks(seen) or stacks
        only[cell] = own[0] if len(own) == 1 else None
    return [
        [
            o
            for o in pool
            if stack == (only[o.cell] if o.environment is None else o.environment.stack)
        ]
        for stack in stacks
    ]


def _stacks(observations: Sequence[Observation]) -> list[str]:
    seen = (o.environment.stack for o in observations if o.environment is not None)
    return list(dict.fromkeys(seen))


def _comparison(group: Sequence[Observation]) -> RecipeComparison | None:
    cells = by_cell(group)
    fits = {cell: found for cell, seen in cells.items() if (found := _fits(seen))}
    hopeless = [cell for cell, seen in cells.items() if _nothing_fits(seen)]
    common = set.intersection(*map(set, fits.values())) if fits else set()
    if not common or len(fits) + len(hopeless) < 2:
        return None
    timed = {size for size in common if all(_median(of[size]) for of in fits.values())}
    batch_size = max(timed or common)
    ordered = sorted(fits, key=lambda cell: plainness(cell.recipe))
    rows = [_row(cell, cells[cell], fits[cell], batch_size) for cell in ordered]
    rows += [
        RecipeRow(cell.recipe, None, None, 0, None)
        for cell in sorted(hopeless, key=lambda cell: plainness(cell.recipe))
    ]
    return RecipeComparison(ordered[0], group[0].basis, batch_size, bool(timed), tuple(rows))


def _fits(seen: Sequence[Observation]) -> dict[int, list[Observation]]:
    """What fitted, by batch size, of sizes that one can train at: below every miss."""
    lowest_miss = min((o.batch_size for o in seen if o.outcome in MEMORY_MISSES), default=None)
    sizes: defaultdict[int, list[Observation]] = defaultdict(list)
    for o in seen:
        if (
            o.outcome is Outcome.FITS
            and o.measurement is not None
            and (lowest_miss is None or o.batch_size < lowest_miss)
        ):
            sizes[o.batch_size].append(o)
    return sizes


def _nothing_fits(seen: Sequence[Observation]) -> bool:
    known = largest_batch(seen)
    return known is not None and known[0] == 0


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
        examples_per_second=max((size / s for size, s in medians.items()), default=None),
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
        words = [_words(row.recipe) for row in found.rows]
        varies = [i for i, values in enumerate(zip(*words, strict=True)) if len(set(values)) > 1]
        names = [", ".join(part for i in varies if (part := said[i])) for said in words]
        shared = ", ".join(
            part for i, part in enumerate(words[0]) if part is not None and i not in varies
        )
        parts.append(_caption(found, names[0], shared))
        default = found.rows[0]
        rows = [
            (name, *_numbers(row, default)) for name, row in zip(names, found.rows, strict=True)
        ]
        parts.append(table(HEADERS, rows))
    return "\n\n".join(["## Recipes side by side", *parts]) if parts else ""


def _caption(found: RecipeComparison, default: str, shared: str) -> str:
    cell = found.cell
    routing = "" if cell.experts is None else f", {cell.active_experts} of {cell.experts} experts"
    weights = "" if cell.weights == "random" else f", {cell.weights} weights"
    which = "timed" if found.timed else "measured"
    return (
        f"**{cell.model}**{weights} on {cell.gpu}{routing}, {cell.seq_len} tokens an example"
        f"{'; alike in all: ' + shared if shared else ''}; {found.basis}.\n"
        f"Memory and step at batch size {found.batch_size}, the largest at which all that fit were "
        f"{which}. The default, the plainest that fits: {default}."
    )


def _words(recipe: Recipe) -> tuple[str | None, ...]:
    """What each axis is, in words; None where the model has nothing for it.

    Two recipes that differ, differ in their words.
    """
    return (
        _method(recipe),
        recipe.precision,
        "checkpointing" if recipe.gradient_checkpointing else "no checkpointing",
        {
            "eager": "eager attention",
            "sdpa": "SDPA attention",
            "flash_attention_2": "FlashAttention-2",
            None: None,
        }[recipe.attention],
        None if recipe.experts is None else f"{recipe.experts} experts",
        None if recipe.mamba is None else f"Mamba by {recipe.mamba}",
        recipe.optimizer,
        "offloaded" if recipe.offload_optimizer else "not offloaded",
    )


def _method(recipe: Recipe) -> str:
    if recipe.method == "full":
        return "full weights"
    quantised = " with constants not quantised" if recipe.double_quantisation is False else ""
    return (
        f"{'LoRA' if recipe.method == 'lora' else 'QLoRA'} rank {recipe.lora_rank}"
        + (
            f" alpha {recipe.lora_alpha}"
            if recipe.lora_alpha != 2 * (recipe.lora_rank or 0)
            else ""
        )
        + (f" dropout {recipe.lora_dropout:g}" if recipe.lora_dropout else "")
        + (f" on {'+'.join(recipe.lora_targets)}" if recipe.lora_targets else "")
        + quantised
    )


def _numbers(row: RecipeRow, default: RecipeRow) -> tuple[object, ...]:
    return (
        "does not fit" if row.largest == 0 else _size(row.peak_bytes),
        _change(row.peak_bytes, default.peak_bytes),
        "" if row.step_seconds is None else f"{row.step_seconds:.3g} s",
        _change(row.step_seconds, default.step_seconds),
        "" if row.largest is None else row.largest,
        "" if row.examples_per_second is None else f"{row.examples_per_second:.3g}",
        _change(row.examples_per_second, default.examples_per_second),
    )


def _size(peak_bytes: int | None) -> str:
    if peak_bytes is None:
        return ""
    unit, name = (GIB, "GiB") if peak_bytes >= GIB else (MIB, "MiB")
    return f"{peak_bytes / unit:.2f} {name}"


def _change(value: float | None, default: float | None) -> str:
    if value is None or default is None:
        return ""
    return f"{value / default - 1:+.0%}"
