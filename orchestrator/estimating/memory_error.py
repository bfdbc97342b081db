"""Error of simulated memory, by single-GPU runs that others published."""

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Literal

from fitting.laws.fit_result import Interval
from gpu_catalog.record import Record
from trials.recipes.fields import Method
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell

LengthKind = Literal["constant", "varying"]
AXES = (
    "task",
    "loss",
    "precision",
    "optimizer",
    "attention",
    "experts",
    "mamba",
    "quantisation",
    "kbit_preparation",
    "quantised_experts",
    "dora",
    "trained_layers",
    "oft_block_size",
    "packing",
    "gradient_checkpointing",
    "activation_offloading",
    "liger_kernels",
    "offload_optimizer",
)
"""Axes of a recipe that change the memory of a step by code of their own."""
SEVERAL_GPUS = "several GPUs"
"""Part of a cell, beside those axes, that no run behind the intervals has."""


class MemoryError90(Record):
    """90 % interval of the memory of runs of one kind, relative to the prediction.

    Attributes:
        lengths: whether the lengths of the batches vary.
        pooled: description of the published runs that it is computed from.
        runs: number of these runs.
        sources: number of their sources.
        low, high: published / predicted memory at the ends. The interval includes 1.
    """

    method: Method
    lengths: LengthKind
    pooled: str
    runs: int
    sources: int
    low: float
    high: float

    def around(self, predicted: float) -> Interval:
        """Interval of the memory that is predicted to be so much."""
        return Interval(low=predicted * self.low, high=predicted * self.high)

    def limits(self, limit: float) -> Interval:
        """Predicted memory at which the real one reaches a limit, at either end."""
        return Interval(low=limit / self.high, high=limit / self.low)


class PublishedErrors(Record):
    """Errors of simulated memory, written by ``tests/benchmarks/published_runs.py``.

    Attributes:
        runs: number of published runs.
        covered: share of them within an interval that was computed without their source.
        intervals: one of each method and kind of lengths.
        compared: values of the axes of a recipe that a published run has.
    """

    runs: int
    covered: float
    intervals: tuple[MemoryError90, ...]
    compared: Mapping[str, tuple[str, ...]]

    def interval(self, method: Method, lengths: LengthKind) -> MemoryError90:
        """Interval of a method and kind of lengths."""
        key = (method, lengths)
        return next(one for one in self.intervals if (one.method, one.lengths) == key)

    def not_compared(self, recipe: Recipe) -> tuple[str, ...]:
        """Axes of a recipe with a value that no published run has, such as ``task dpo``."""
        values = axis_values(recipe)
        return tuple(
            name if value == "True" else f"{name} {value}"
            for name, value in values.items()
            if value not in self.compared.get(name, ())
        )


def axis_values(recipe: Recipe) -> dict[str, str]:
    """Values of the axes that apply to a recipe; a switch only where it is on."""
    values = {name: getattr(recipe, name) for name in AXES}
    values["gradient_checkpointing"] = bool(recipe.gradient_checkpointing)
    return {name: str(value) for name, value in values.items() if value not in (None, False)}


@cache
def published_errors() -> PublishedErrors:
    """Errors that ship with the package."""
    file = resources.files("orchestrator.estimating") / "data" / "memory_errors.json"
    return PublishedErrors.model_validate_json(file.read_text(encoding="utf-8"))


def not_compared(cell: Cell) -> tuple[str, ...]:
    """Parts of a cell that no published run of known memory has."""
    axes = published_errors().not_compared(cell.recipe)
    layout = cell.parallel
    further = {
        SEVERAL_GPUS: layout is not None and layout.gpus > 1,
        "DeepSpeed": layout is not None and layout.zero_stage is not None,
        "images": cell.image_tokens is not None,
    }
    return (*axes, *(axis for axis, applies in further.items() if applies))
