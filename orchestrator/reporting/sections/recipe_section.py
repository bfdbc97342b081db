"""Section of recipes side by side: memory and time relative to the plainest (arXiv 2406.02290)."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.markdown_table import table
from orchestrator.reporting.sections.memory_section import memory_text
from orchestrator.reporting.sections.recommendation import job_title
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

HEADERS = (
    "recipe",
    "peak memory",
    "vs. default",
    "step time",
    "vs. default",
    "largest batch",
    "best examples/s",
    "vs. default",
)


@dataclass(frozen=True, slots=True)
class RecipeRow:
    """One recipe on one GPU and model; None stands for a value that was not measured.

    Attributes:
        peak_bytes: peak memory at the common batch size; None if not even one example fits.
        step_seconds: median step time at the common batch size; None if it was not timed.
        largest: largest batch; None while the search has not found it.
        examples_per_second: best throughput at any batch size; None if nothing was timed.
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
        cell: cell of the default recipe.
        basis: measured or simulated.
        batch_size: common batch size, at which memory and step time are compared.
        timed: whether every recipe that fits was timed at the common batch size.
        rows: the default first, recipes that do not fit at all last.
    """

    cell: Cell
    basis: Basis
    batch_size: int
    timed: bool
    rows: tuple[RecipeRow, ...]


def plainness(recipe: Recipe) -> tuple[object, ...]:
    """Sort key of recipes: those with the fewest measures to save memory or time come first.

    Full weights precede adapters, and adapters precede 4 bits. Then counts the number of departures
    from the plainest recipe: no checkpointing, PyTorch's attention and AdamW, optimizer state on
    the GPU, experts in one grouped product. Ties are broken by eager attention, then by name.
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
    """Every set of at least two comparable recipes, in the order observed.

    Capped GPUs are excluded: they have no speed of their own.
    """
    pools: defaultdict[tuple[object, ...], list[Observation]] = defaultdict(list)
    for o in without_superseded(observations):
        if o.basis is not Basis.CAPPED:
            cell = o.cell
            setting = (cell.gpu, cell.model, cell.weights, cell.active_experts, cell.seq_len)
            pools[*setting, o.basis].append(o)
    groups = [group for pool in pools.values() for group in _by_stack(pool)]
    return [comparison for group in groups if (comparison := _comparison(group)) is not None]


def _by_stack(pool: Sequence[Observation]) -> list[list[Observation]]:
    """Splits a pool by stack, in the order observed.

    A child that runs out of memory while it builds the model reports no stack. Its observation
    belongs to the only stack of its cell, else to the only one of the pool, else to none.
    """
    stacks = _stacks(pool)
    if not stacks:
        return [list(pool)]
    only: dict[Cell, str | None] = {}
    for cell, observations in by_cell(pool).items():
        candidates = _stacks(observations) or stacks
        only[cell] = candidates[0] if len(candidates) == 1 else None
    return [
        [
            o
            for o in pool
            if stack == (only[o.cell] if o.environment is None else o.environment.stack)
        ]
        for stack in stacks
    ]


def _stacks(observations: Sequence[Observation]) -> list[str]:
    stacks = (o.environment.stack for o in observations if o.environment is not None)
    return list(dict.fromkeys(stacks))


def _comparison(group: Sequence[Observation]) -> RecipeComparison | None:
    cells = by_cell(group)
    fits = {cell: sizes for cell, probes in cells.items() if (sizes := _fits(probes))}
    hopeless = [cell for cell, probes in cells.items() if _nothing_fits(probes)]
    common = set.intersection(*map(set, fits.values())) if fits else set()
    if not common or len(fits) + len(hopeless) < 2:
        return None
    timed = {size for size in common if all(_median(sizes[size]) for sizes in fits.values())}
    batch_size = max(timed or common)
    ordered = sorted(fits, key=lambda cell: plainness(cell.recipe))
    rows = [_row(cell, cells[cell], fits[cell], batch_size) for cell in ordered]
    rows += [
        RecipeRow(cell.recipe, None, None, 0, None)
        for cell in sorted(hopeless, key=lambda cell: plainness(cell.recipe))
    ]
    return RecipeComparison(ordered[0], group[0].basis, batch_size, bool(timed), tuple(rows))


def _fits(probes: Sequence[Observation]) -> dict[int, list[Observation]]:
    """Probes that fit, by batch size, for the sizes below every miss: those safe to train at."""
    lowest_miss = min((o.batch_size for o in probes if o.outcome in MEMORY_MISSES), default=None)
    sizes: defaultdict[int, list[Observation]] = defaultdict(list)
    for o in probes:
        if (
            o.outcome is Outcome.FITS
            and o.measurement is not None
            and (lowest_miss is None or o.batch_size < lowest_miss)
        ):
            sizes[o.batch_size].append(o)
    return sizes


def _nothing_fits(probes: Sequence[Observation]) -> bool:
    limit = largest_batch(probes)
    return limit is not None and limit[0] == 0


def _row(
    cell: Cell, probes: list[Observation], sizes: dict[int, list[Observation]], batch_size: int
) -> RecipeRow:
    measurements = [o.measurement for o in sizes[batch_size] if o.measurement is not None]
    limit = largest_batch(probes)
    medians = {
        size: median for size, fits in sizes.items() if (median := _median(fits)) is not None
    }
    return RecipeRow(
        recipe=cell.recipe,
        peak_bytes=max(m.memory.peak_allocated_bytes for m in measurements),
        step_seconds=medians.get(batch_size),
        largest=None if limit is None else limit[0],
        examples_per_second=max((size / s for size, s in medians.items()), default=None),
    )


def _median(observations: Sequence[Observation]) -> float | None:
    steps = [
        s for o in observations if o.measurement is not None for s in o.measurement.step_seconds
    ]
    return statistics.median(steps) if steps else None


def recipes_section(observations: Sequence[Observation]) -> str:
    """Markdown: a table for each set of comparable recipes; empty without any."""
    parts = []
    for comparison in compare_recipes(observations):
        words = [_words(row.recipe) for row in comparison.rows]
        varies = [i for i, values in enumerate(zip(*words, strict=True)) if len(set(values)) > 1]
        names = [", ".join(part for i in varies if (part := axes[i])) for axes in words]
        shared = ", ".join(
            part for i, part in enumerate(words[0]) if part is not None and i not in varies
        )
        parts.append(_caption(comparison, names[0], shared))
        default = comparison.rows[0]
        rows = [
            (name, *_numbers(row, default))
            for name, row in zip(names, comparison.rows, strict=True)
        ]
        parts.append(table(HEADERS, rows))
    return "\n\n".join(["## Recipes side by side", *parts]) if parts else ""


def _caption(comparison: RecipeComparison, default: str, shared: str) -> str:
    cell = comparison.cell
    return (
        f"**{job_title(cell)}** on {cell.gpu}, {comparison.basis}"
        f"{'; the same for all: ' + shared if shared else ''}.\n"
        f"Memory and step time are at batch size {comparison.batch_size}, the largest that was "
        f"{'timed' if comparison.timed else 'measured'} for every recipe that fits. The default is "
        f"the plainest recipe that fits: {default}."
    )


def _words(recipe: Recipe) -> tuple[str | None, ...]:
    """Each axis of a recipe in words; None if the model has no such axis.

    Recipes that differ have different words.
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
        "does not fit" if row.largest == 0 else _memory(row.peak_bytes),
        _change(row.peak_bytes, default.peak_bytes),
        "" if row.step_seconds is None else f"{row.step_seconds:.3g} s",
        _change(row.step_seconds, default.step_seconds),
        "" if row.largest is None else row.largest,
        "" if row.examples_per_second is None else f"{row.examples_per_second:.3g}",
        _change(row.examples_per_second, default.examples_per_second),
    )


def _memory(peak_bytes: int | None) -> str:
    return "" if peak_bytes is None else memory_text(peak_bytes)


def _change(value: float | None, default: float | None) -> str:
    if value is None or default is None:
        return ""
    return f"{value / default - 1:+.0%}"
