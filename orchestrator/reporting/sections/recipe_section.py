"""Section of recipes side by side: memory and time relative to the plainest (arXiv 2406.02290)."""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from gpu_catalog.number_text import short
from orchestrator.markdown_table import table
from orchestrator.reporting.sections.memory_section import memory_text
from orchestrator.reporting.sections.recommendation import job_title
from trials.recipes.fields import REENTRANT, Loss, Reference
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell, by_cell
from trials.records.observation import (
    MEMORY_MISSES,
    Basis,
    Measurement,
    Observation,
    Outcome,
    largest_batch,
    without_superseded,
)

HEADERS = (
    *("recipe", "peak memory", "vs. default", "step time", "vs. default"),
    *("largest batch", "best examples/s", "vs. default"),
)
CHECKPOINTING = {
    False: "no checkpointing",
    True: "checkpointing",
    REENTRANT: "reentrant checkpointing",
}
ATTENTION = {
    "eager": "eager attention",
    "sdpa": "SDPA attention",
    "flash_attention_2": "FlashAttention-2",
}
LOSSES: dict[Loss, str] = {
    "full-logits": "loss from all logits",
    "chunked": "loss in chunks by TRL",
    "liger": "loss by liger-kernel",
    "cce": "loss by cut-cross-entropy",
    "dft": "loss weighted by probabilities",
    "eaft": "loss weighted by entropies",
}
REFERENCES: dict[Reference, str] = {
    "adapter-off": "adapters off as reference",
    "separate": "a separate reference",
    "precomputed": "precomputed log-probabilities",
}


# Words of the plainest step, left out where one recipe stands alone.
PLAIN = frozenset(
    {
        *("sft", "no checkpointing", "activations not offloaded", "SDPA attention", "adamw"),
        *("Mamba by reference", "not offloaded", "1 micro-batches a step", "no clipping"),
        *("not compiled", "transformers' layers", "loss from all logits", "not packed"),
        "no load-balancing loss",
    }
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
    the GPU, experts in one grouped product, the loss from all logits. Ties are broken by eager
    attention, then by name.
    """
    departures = (
        bool(recipe.gradient_checkpointing),
        recipe.attention == "flash_attention_2",
        recipe.optimizer != "adamw",
        recipe.offload_optimizer,
        recipe.activation_offloading,
        recipe.liger_kernels,
        recipe.compile is not None,
        recipe.experts == "looped",
        recipe.loss not in ("full-logits", None),
        recipe.packing,
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
            pools[_setting(o.cell), o.basis].append(o)
    groups = [group for pool in pools.values() for group in _by_stack(pool)]
    return [comparison for group in groups if (comparison := _comparison(group)) is not None]


@lru_cache(maxsize=4096)
def _setting(cell: Cell) -> tuple[object, ...]:
    """All of a cell but its recipe."""
    routing = cell.weights, cell.active_experts
    return cell.gpus, cell.model, *routing, cell.seq_len, cell.parallel


def _by_stack(pool: Sequence[Observation]) -> list[list[Observation]]:
    """Splits a pool by stack, in the order observed.

    A child that runs out of memory while it builds the model reports no stack. Its observation
    belongs to the only stack of its cell, else to the only one of the pool, else to none.
    """
    stacks = _stacks(pool)
    if len(stacks) <= 1:
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
    limits = {cell: (largest_batch(probes) or (None,))[0] for cell, probes in cells.items()}
    fits = {cell: sizes for cell, probes in cells.items() if (sizes := _fits(probes))}
    hopeless = [cell for cell, limit in limits.items() if limit == 0]
    common = set.intersection(*map(set, fits.values())) if fits else set()
    if not common or len(fits) + len(hopeless) < 2:
        return None
    medians = {cell: _medians(sizes) for cell, sizes in fits.items()}
    timed = {size for size in common if all(size in sizes for sizes in medians.values())}
    batch_size = max(timed or common)
    ordered = sorted(fits, key=lambda cell: plainness(cell.recipe))
    rows = [_row(c, limits[c], fits[c][batch_size], medians[c], batch_size) for c in ordered]
    rows += [
        RecipeRow(recipe, None, None, 0, None)
        for recipe in sorted((cell.recipe for cell in hopeless), key=plainness)
    ]
    return RecipeComparison(ordered[0], group[0].basis, batch_size, bool(timed), tuple(rows))


def _fits(probes: Sequence[Observation]) -> dict[int, list[Measurement]]:
    """Measurements by batch size, for the sizes below every miss: those safe to train at."""
    probes = [o for o in probes if not o.is_drawn]
    lowest_miss = min(
        (o.batch_size for o in probes if o.outcome in MEMORY_MISSES), default=math.inf
    )
    sizes: defaultdict[int, list[Measurement]] = defaultdict(list)
    for o in probes:
        if o.outcome is Outcome.FITS and o.measurement is not None and o.batch_size < lowest_miss:
            sizes[o.batch_size].append(o.measurement)
    return sizes


def _row(
    cell: Cell,
    largest: int | None,
    fits: Sequence[Measurement],
    medians: Mapping[int, float],
    batch_size: int,
) -> RecipeRow:
    micro_batches = cell.rank_recipe.micro_batches
    return RecipeRow(
        recipe=cell.recipe,
        peak_bytes=max((m.memory.peak_allocated_bytes for m in fits if m.memory), default=None),
        step_seconds=medians.get(batch_size),
        largest=largest,
        examples_per_second=max(
            (
                cell.data_parallel_ranks * size * micro_batches(size) / s
                for size, s in medians.items()
            ),
            default=None,
        ),
    )


def _medians(sizes: Mapping[int, Sequence[Measurement]]) -> dict[int, float]:
    """Median step by batch size, for the sizes that were timed."""
    steps = {size: [s for m in fits for s in m.step_seconds] for size, fits in sizes.items()}
    return {size: statistics.median(seconds) for size, seconds in steps.items() if seconds}


def recipes_section(observations: Sequence[Observation]) -> str:
    """Markdown: a table for each set of comparable recipes; empty without any."""
    parts = []
    for comparison in compare_recipes(observations):
        words = [_words(row.recipe) for row in comparison.rows]
        varies = [i for i, values in enumerate(zip(*words, strict=True)) if len(set(values)) > 1]
        names = [", ".join(part for i in varies if (part := axes[i])) for axes in words]
        shared = ", ".join(part for i, part in enumerate(words[0]) if part and i not in varies)
        parts.append(_caption(comparison, names[0], shared))
        named = zip(names, comparison.rows, strict=True)
        rows = [(name, *_numbers(row, comparison.rows[0])) for name, row in named]
        parts.append(table(HEADERS, rows))
    return "\n\n".join(["## Recipes side by side", *parts]) if parts else ""


def _caption(comparison: RecipeComparison, default: str, shared: str) -> str:
    cell = comparison.cell
    return (
        f"**{job_title(cell)}** on {cell.gpus}, {comparison.basis}"
        f"{'; the same for all: ' + shared if shared else ''}.\n"
        f"Memory and step time are at batch size {comparison.batch_size}, the largest that was "
        f"{'timed' if comparison.timed else 'probed'} for every recipe that fits. The default is "
        f"the plainest recipe that fits: {default}."
    )


def recipe_text(recipe: Recipe) -> str:
    """A recipe in words: its method, its precision and what departs from the plainest step."""
    return ", ".join(word for word in _words(recipe) if word is not None and word not in PLAIN)


def _words(recipe: Recipe) -> tuple[str | None, ...]:
    """Each axis of a recipe in words; None if the model has no such axis.

    Recipes that differ have different words.
    """
    return (
        _method(recipe),
        _task(recipe),
        recipe.precision,
        CHECKPOINTING[recipe.gradient_checkpointing],
        "activations on the host" if recipe.activation_offloading else "activations not offloaded",
        None if recipe.attention is None else ATTENTION[recipe.attention],
        None if recipe.experts is None else f"{recipe.experts} experts",
        None if recipe.mamba is None else f"Mamba by {recipe.mamba}",
        recipe.optimizer,
        "offloaded" if recipe.offload_optimizer else "not offloaded",
        f"{recipe.gradient_accumulation} micro-batches a step",
        "no clipping" if recipe.max_grad_norm is None else f"clipped to {recipe.max_grad_norm:g}",
        "not compiled" if recipe.compile is None else f"compiled {recipe.compile}",
        "Liger's layers" if recipe.liger_kernels else "transformers' layers",
        None if recipe.loss is None else LOSSES[recipe.loss],
        "load-balancing loss" if recipe.router_loss else "no load-balancing loss",
        f"{recipe.examples_per_row} packed examples a row" if recipe.packing else "not packed",
    )


def _task(recipe: Recipe) -> str:
    reference = "" if recipe.reference is None else f" with {REFERENCES[recipe.reference]}"
    share = recipe.generation_share
    vllm = "" if share is None else f", {short(share)} of the memory left to vLLM"
    return f"{recipe.task}{reference}{vllm}"


def _method(recipe: Recipe) -> str:
    if recipe.method == "full":
        if recipe.trained_layers is None:
            return "full weights"
        return f"{recipe.trained_layers} {'spread ' if recipe.spread_layers else ''}layers"
    has_usual_alpha = recipe.lora_alpha in (None, 2 * (recipe.lora_rank or 0))
    size = f"LoRA rank {recipe.lora_rank}"
    if recipe.oft_block_size is not None:
        size = f"OFT in blocks of {recipe.oft_block_size}"
    return (
        ("" if recipe.method == "lora" else "Q")
        + size
        + ("" if has_usual_alpha else f" alpha {recipe.lora_alpha}")
        + (f" dropout {recipe.lora_dropout:g}" if recipe.lora_dropout else "")
        + (f" on {'+'.join(recipe.lora_targets)}" if recipe.lora_targets else "")
        + (" with DoRA" if recipe.dora else "")
        + (f" with {'+'.join(recipe.modules_to_save)} in full" if recipe.modules_to_save else "")
        + (f" in {recipe.adapter_dtype}" if recipe.has_own_adapter_dtype else "")
        + (f" in {recipe.quantisation}" if recipe.quantisation in {"fp4", "int8"} else "")
        + (" with constants not quantised" if recipe.double_quantisation is False else "")
        + (" with norms and head in fp32" if recipe.kbit_preparation else "")
        + (" with quantised experts" if recipe.quantised_experts else "")
    )


def _numbers(row: RecipeRow, default: RecipeRow) -> tuple[object, ...]:
    memory = "" if row.peak_bytes is None else memory_text(row.peak_bytes)
    return (
        "does not fit" if row.largest == 0 else memory,
        _change(row.peak_bytes, default.peak_bytes),
        "" if row.step_seconds is None else f"{short(row.step_seconds)} s",
        _change(row.step_seconds, default.step_seconds),
        "" if row.largest is None else row.largest,
        "" if row.examples_per_second is None else short(row.examples_per_second),
        _change(row.examples_per_second, default.examples_per_second),
    )


def _change(value: float | None, default: float | None) -> str:
    return "" if value is None or default is None else f"{value / default - 1:+.0%}"
