"""Checks of a specification across fields."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gpu_catalog.catalog import Catalog
from orchestrator.spec.recipe_options import is_auto, written_out
from orchestrator.spec.sweep_spec import Models, can_stand_in
from orchestrator.spec.trainer_defaults import with_trl_defaults
from orchestrator.spec.validation_messages import dotted, problem_at, shown
from orchestrator.spec.yaml_lines import LocatedYaml, Location, Problem
from trials.recipes.parallel import Parallel
from trials.recipes.recipe import Recipe, hidden_contradictions
from trials.records.compatibility import adds_router_loss, impossible_on_model
from trials.records.model import Model

AXES = ("models", "recipes", "active_experts", "seq_lens", "parallel")
MOST_CELLS = 100_000
"""Most cells of a sweep; each takes memory, and a trial at least a second."""


def excess_cells(located: LocatedYaml) -> Iterator[Problem]:
    """Block whose axes make more cells than a sweep may have, with those before it."""
    data, count = located.data, 0
    for index, block in enumerate(items(data, "cells")):
        axes = [items(block, name) for name in AXES]
        hosts = [items(data, "gpus"), items(block, "simulated_on")]
        count += math.prod(len(values) or 1 for values in (*axes, *hosts))
        if count > MOST_CELLS:
            text = f"{count:,} cells up to here: a sweep has at most {MOST_CELLS:,}"
            yield problem_at(("cells", index), text, located)
            return


def missing_gpus(located: LocatedYaml) -> Iterator[Problem]:
    """No GPUs to measure on, where a block of cells is not simulated."""
    data = located.data
    if not isinstance(data, dict) or "gpus" in data:
        return
    blocks = items(data, "cells")
    if not blocks or any(not items(block, "simulated_on") for block in blocks):
        text = "is missing: add it, or simulated_on to each block of cells"
        yield problem_at(("gpus",), text, located)


def own_keys(data: object) -> set[str]:
    """Keys of the file's own GPUs, whether or not their rows are valid."""
    rows = items(data.get("catalog") if isinstance(data, dict) else None, "gpus")
    keys = (row.get("key") for row in rows if isinstance(row, dict))
    return {key for key in keys if isinstance(key, str)}


def with_recipe_defaults(located: LocatedYaml) -> LocatedYaml:
    """File with TRL's defaults in its written-out recipes, where it asks for them."""
    if not isinstance(located.data, dict) or located.data.get("recipe_defaults") != "trl":
        return located
    blocks = located.data.get("cells")
    if not isinstance(blocks, list):
        return located
    data = located.data | {"cells": [_with_defaults(block) for block in blocks]}
    return dataclasses.replace(located, data=data)


def _with_defaults(block: object) -> object:
    recipes = items(block, "recipes")
    if not isinstance(block, dict) or not recipes:
        return block
    is_complete = [not isinstance(raw, dict) or "named" in raw for raw in recipes]
    return block | {
        "recipes": [
            raw if complete else with_trl_defaults(raw)
            for raw, complete in zip(recipes, is_complete, strict=True)
        ]
    }


def repetitions(located: LocatedYaml) -> Iterator[Problem]:
    """Values that an axis lists twice."""
    for axis, values in _axes(located.data):
        earlier: set[object] = set()
        for index, raw in enumerate(values):
            value = READERS[axis[-1]](raw) if axis[-1] in READERS else raw
            if type(value) not in {str, int, Recipe, Parallel}:
                continue  # SweepSpec reports it
            if value in earlier:
                text = f"{shown(raw)} is listed twice: keep one"
                yield problem_at((*axis, index), text, located)
            earlier.add(value)


def _axes(data: object) -> Iterator[tuple[Location, list[Any]]]:
    yield ("gpus",), items(data, "gpus")
    yield ("as_if",), items(data, "as_if")
    for index, block in enumerate(items(data, "cells")):
        for name in AXES:
            yield ("cells", index, name), items(block, name)


def _recipe(raw: object) -> Recipe | None:
    try:
        return Recipe.model_validate(written_out(raw))
    except ValueError:
        return None  # SweepSpec reports it


def _layout(raw: object) -> Parallel | None:
    try:
        return Parallel.model_validate(raw)
    except ValueError:
        return None  # SweepSpec reports it


READERS: Mapping[object, Callable[[object], object]] = {"recipes": _recipe, "parallel": _layout}
"""Readers of the values of axes that are written out."""


def layout_problems(located: LocatedYaml) -> Iterator[Problem]:
    """Layouts of several GPUs that a recipe of their block cannot have."""
    draws = isinstance(located.data, dict) and located.data.get("lengths") == "drawn"
    for index, block in enumerate(items(located.data, "cells")):
        for number, raw in enumerate(items(block, "parallel")):
            layout = _layout(raw)
            if layout is None:
                continue
            where: Location = ("cells", index, "parallel", number)
            if draws and not items(block, "simulated_on"):
                text = "lengths: drawn is not measured on several GPUs: use constant"
                yield problem_at(where, text, located)
            for recipe in items(block, "recipes"):
                if is_auto(recipe):
                    text = "auto chooses a recipe for one GPU: write the recipe out"
                    yield problem_at(where, text, located)
            for _, recipe in _recipes_of(block):
                whole = recipe.effective_batch
                if whole is not None and whole % layout.data_parallel_ranks:
                    text = (
                        f"effective_batch {whole} cannot be shared by {layout.sharers}: use a "
                        "multiple"
                    )
                    yield problem_at(where, text, located)


def _hidden_contradictions(raw: object) -> list[str]:
    try:
        fields = written_out(raw)
    except ValueError:
        return []  # SweepSpec reports it
    return hidden_contradictions(fields) if isinstance(fields, dict) else []


def as_if_problems(located: LocatedYaml, catalog: Catalog) -> Iterator[Problem]:
    """GPUs that none of the sweep's GPUs can stand in for."""
    keys = {gpu.key: gpu for gpu in catalog.gpus}
    named = [key for key in items(located.data, "gpus") if isinstance(key, str)]
    hosts = [keys[key] for key in named if key in keys]
    for index, key in enumerate(items(located.data, "as_if")):
        small = keys.get(key) if isinstance(key, str) else None
        if small is not None and hosts and not any(can_stand_in(host, small) for host in hosts):
            names = ", ".join(host.key for host in hosts)
            text = f"{key} has no less memory than any of gpus ({names}): remove it"
            yield problem_at(("as_if", index), text, located)


def auto_problems(located: LocatedYaml, catalog: Catalog) -> Iterator[Problem]:
    """Recipes to choose on GPUs that are not simulated."""
    of_sweep = [*items(located.data, "gpus"), *items(located.data, "as_if")]
    for index, block in enumerate(items(located.data, "cells")):
        named = items(block, "simulated_on") or of_sweep
        others = [g.key for g in catalog.gpus if g.kind != "cuda" and g.key in named]
        for number, raw in enumerate(items(block, "recipes")):
            if others and is_auto(raw):
                text = (
                    "auto chooses by simulation, and only CUDA GPUs are simulated, not "
                    f"{', '.join(others)}: write out the recipe"
                )
                yield problem_at(("cells", index, "recipes", number), text, located)


def cell_problems(located: LocatedYaml, models: Models) -> list[Problem]:
    """Mistakes across fields: contradictions, too many experts, repeated cells and the like.

    The raw data is checked, so that a mistake elsewhere in the file hides none of these.
    """
    problems: list[Problem] = []
    first_block: dict[tuple[object, ...], Location] = {}
    blocks = items(located.data, "cells")
    for index, block in enumerate(blocks):
        where: Location = ("cells", index)
        for number, raw in enumerate(items(block, "recipes")):
            lines = _hidden_contradictions(raw)
            problems += [problem_at((*where, "recipes", number), line, located) for line in lines]
        for model in models_of(block, models):
            problems += _model_problems(located, where, block, model)
            for signature in _signatures(model, block):
                other = first_block.setdefault(signature, where)
                if other != where:
                    text = (
                        f"{model.name} with the same recipe, active_experts and seq_len "
                        f"{signature[-1]} is in cells[{other[1]}] already: remove one"
                    )
                    problems.append(problem_at(where, text, located))
    return problems


def items(mapping: object, key: str) -> list[Any]:
    """List under a key; empty where there is none."""
    value = mapping.get(key) if isinstance(mapping, dict) else None
    return value if isinstance(value, list) else []


def models_of(block: object, models: Models) -> list[Model]:
    """Known models of a block."""
    return [models[m] for m in items(block, "models") if isinstance(m, str) and m in models]


def _recipes_of(block: object) -> Iterator[tuple[int, Recipe]]:
    for index, raw in enumerate(items(block, "recipes")):
        recipe = _recipe(raw)
        if recipe is not None:
            yield index, recipe


def _model_problems(
    located: LocatedYaml, where: Location, block: dict[str, Any], model: Model
) -> Iterator[Problem]:
    for index, recipe in _recipes_of(block):
        reason = impossible_on_model(recipe, model)
        if reason is not None:
            yield problem_at((*where, "recipes", index), reason, located)
    if block.get("weights") == "pretrained" and model.weights is None:
        text = f"{model.name} has no known pretrained weights: use random"
        yield problem_at((*where, "weights"), text, located)
    for index, active in enumerate(_whole_numbers(block, "active_experts")):
        location = (*where, "active_experts", index)
        if model.experts is None:
            text = f"{model.name} has no experts: remove active_experts, or list the model apart"
            yield Problem(located.line(location), f"{dotted(location[:-1])}: {text}")
            return
        if active > model.experts:
            text = f"{active} exceeds the {model.experts} experts of {model.name}"
            yield problem_at(location, text, located)


def _whole_numbers(block: object, key: str) -> list[int]:
    return [v for v in items(block, key) if type(v) is int and v > 0]


def _signatures(model: Model, block: object) -> Iterator[tuple[object, ...]]:
    """Fields that identify the cells of a block, on any GPU."""
    # Defaults of a recipe depend on the device and model only, so equal recipes stay equal.
    recipes = [
        recipe.model_copy(update={"router_loss": adds_router_loss(recipe, model)}).key
        for _, recipe in _recipes_of(block)
    ]
    listed = isinstance(block, dict) and block.get("active_experts") is not None
    active: Sequence[int | None] = (
        _whole_numbers(block, "active_experts") if listed else [model.active_experts]
    )
    seq_lens = _whole_numbers(block, "seq_lens")
    weights = str(block.get("weights", "random")) if isinstance(block, dict) else "random"
    layouts = [layout and layout.key for layout in map(_layout, items(block, "parallel"))] or [None]
    of_layouts = itertools.product([model.name], [weights], recipes, active, layouts, seq_lens)
    yield from dict.fromkeys(of_layouts)  # in order, as their problems are printed
