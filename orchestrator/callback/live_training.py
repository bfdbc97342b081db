"""A running training in the project's terms: GPU, model, recipe, lengths and job."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow.compute as pc
import torch
from pydantic import ValidationError

from gpu_catalog.catalog import load_catalog
from gpu_catalog.gpu import Gpu
from orchestrator.callback.live_recipe import LiveRecipeError, live_recipe
from orchestrator.model_names import preset_of
from orchestrator.request import validation_lines
from orchestrator.spec.job import Job
from trials.recipes.fields import FEWEST_PACKED
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell
from trials.records.compatibility import fused_experts, with_defaults
from trials.records.model import Model, wrong_senses

ROWS_AT_ONCE = 10_000  # of a data set whose lengths are read


@dataclass(frozen=True, slots=True)
class LiveTraining:
    """A running training.

    Attributes:
        recipe: its recipe, with every field that applies filled in.
        batch_size: examples, or packed rows, of a micro-batch.
        longest: tokens of its longest row, padding included.
        job: examples of an epoch and epochs, or those of all steps where their number is given.
    """

    gpu: Gpu
    model: Model
    recipe: Recipe
    batch_size: int
    longest: int
    job: Job

    def cell(self, seq_len: int) -> Cell:
        """Its cell, at a length."""
        return Cell(
            gpu=self.gpu.key,
            model=self.model.name,
            weights="random" if self.model.weights is None else "pretrained",
            recipe=self.recipe,
            experts=self.model.experts,
            active_experts=self.model.active_experts,
            seq_len=seq_len,
        )


def live_training(args: Any, model: Any, dataloader: Any, gpu_key: str | None) -> LiveTraining:
    """Describe a training.

    Args:
        args: the trainer's arguments.
        model: the model, with its adapters.
        dataloader: loader of the training examples.
        gpu_key: key of the GPU in the catalog; None to identify it by its name.

    Raises:
        UserError: the training is none that can be forecast, or its GPU is unknown.
    """
    gpu, facts = _gpu(model, gpu_key), _model(model)
    dataset = getattr(dataloader, "dataset", None)
    packs = bool(getattr(args, "packing", False))
    per_row = _examples_per_row(dataset) if packs else None
    experts = None if facts.experts is None else fused_experts(facts)
    stated = live_recipe(args, model, experts=experts, examples_per_row=per_row)
    recipe = with_defaults(stated, facts, gpu)
    batch_size = int(args.per_device_train_batch_size)
    rows = None if dataset is None or not hasattr(dataset, "__len__") else len(dataset)
    if args.max_steps > 0 or rows is None:
        examples, epochs = max(args.max_steps, 1) * recipe.micro_batches(1) * batch_size, 1
    else:
        examples, epochs = rows, max(1, math.ceil(args.num_train_epochs))
    return LiveTraining(
        gpu=gpu,
        model=facts,
        recipe=recipe,
        batch_size=batch_size,
        longest=_longest(args, dataset),
        job=Job(examples=examples * (per_row or 1), epochs=epochs),
    )


def _gpu(model: Any, key: str | None) -> Gpu:
    device = next(model.parameters()).device
    catalog = load_catalog()
    if key is not None:
        return catalog.gpu(key)
    if device.type == "cpu":
        return catalog.gpu("cpu")
    if device.type != "cuda":
        raise LiveRecipeError(f"device {device.type}: only NVIDIA GPUs and the CPU are modelled")
    return catalog.gpu_by_device_name(torch.cuda.get_device_name(device))


def _model(model: Any) -> Model:
    """Configuration of the model, by the name of a preset of its architecture where there is one.

    Raises:
        LiveRecipeError: it is no language model.
    """
    config = json.loads(model.config.to_json_string(use_diff=False))
    config.pop("quantization_config", None)  # the recipe has it
    path = str(getattr(model.config, "_name_or_path", "") or "")
    name = path or str(config.get("model_type"))
    try:
        made = Model(
            name=preset_of(name) or name,
            source="a running training",
            weights=path or None,
            config=config,
        )
    except ValidationError as error:
        raise LiveRecipeError(f"{name}: {validation_lines(error)}") from None
    if (reason := wrong_senses(made, reads_images=False)) is not None:
        raise LiveRecipeError(f"{name}: {reason}")
    return made


def _longest(args: Any, dataset: Any) -> int:
    """Tokens of the longest row, padding included."""
    limit = getattr(args, "max_length", None)
    lengths = [] if getattr(args, "packing", False) else list(_most(dataset, "input_ids"))
    longest = max(lengths, default=None)
    if longest is None:
        longest = limit
    elif limit is not None:
        longest = min(longest, limit)
    if longest is None:
        raise LiveRecipeError("lengths are unknown: set max_length, or give tokenized examples")
    multiple = getattr(args, "pad_to_multiple_of", None) or 1
    return int(-(-longest // multiple) * multiple)


def _most(dataset: Any, column: str) -> Iterator[int]:
    """Largest number of items in a column of lists, for each of several parts of a data set."""
    if not _has_lists(dataset, column):
        return
    for part in dataset.select_columns(column).with_format("arrow").iter(ROWS_AT_ONCE):
        yield pc.max(pc.list_value_length(part[column])).as_py()


def _examples_per_row(dataset: Any) -> int:
    """Mean number of examples in a packed row, by TRL's column of their lengths."""
    column = "seq_lengths"
    if not _has_lists(dataset, column) or not len(dataset):
        return FEWEST_PACKED
    parts = dataset.select_columns(column).with_format("arrow").iter(ROWS_AT_ONCE)
    examples = sum(pc.sum(pc.list_value_length(part[column])).as_py() for part in parts)
    return max(FEWEST_PACKED, round(int(examples) / len(dataset)))


def _has_lists(dataset: Any, column: str) -> bool:
    is_table = hasattr(dataset, "with_format") and hasattr(dataset, "__len__")
    return bool(is_table and column in dataset.column_names)
