"""Traced steps, whole and assembled from a few layers, and their differences.

Run as a module for BlackMamba, whose kernels are chosen once per process.
"""

import sys

import numpy as np

from gpu_catalog.catalog import load_catalog
from trials.child_process.bootstrap import freeze_garbage_collector
from trials.recipes.parallel import Parallel
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell
from trials.records.compatibility import with_defaults
from trials.records.model import Model, find_model
from trials.simulation.layer_expansion import check_repeats, whole_model, whole_steps
from trials.simulation.recording import Kind, Stream
from trials.simulation.trace_request import Routing
from trials.simulation.tracing.trace import TraceableCell, Traced
from trials.simulation.tracing.tracing_worker import routed_shares

GPU = load_catalog().gpu("A100-80GB-SXM")


def deep(name: str, layers: int) -> Model:
    """A tiny model with more layers."""
    model = find_model(name)
    return model.model_copy(update={"config": model.config | {"num_hidden_layers": layers}})


def simulated_cell(
    model: Model, recipe: Recipe, seq_len: int = 24, parallel: Parallel | None = None
) -> Cell:
    """A cell of a model with its usual number of active experts."""
    return Cell(
        gpu=GPU.key,
        simulated=True,
        model=model.name,
        recipe=with_defaults(recipe, model, GPU),
        experts=model.experts,
        active_experts=model.active_experts,
        seq_len=seq_len,
        parallel=parallel,
    )


def traced(model: Model, recipe: Recipe, *, batch_size: int = 4, whole: bool = False) -> Traced:
    """Trace of a step on a GPU."""
    cell = simulated_cell(model, recipe)
    shares = routed_shares(Routing(), model.experts)
    return TraceableCell(cell, model, whole=whole).trace(batch_size, shares)


def numbered_in_order(stream: Stream) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Events of a stream, with storages numbered in order of appearance.

    Consecutive frees are sorted by storage: autocast frees its casts in the order of addresses.
    """
    moves = stream.kinds <= Kind.FREED
    _, first, which = np.unique(stream.names[moves], return_index=True, return_inverse=True)
    names = stream.names.copy()
    names[moves] = np.argsort(np.argsort(first))[which]
    freed = stream.kinds == Kind.FREED
    runs = np.cumsum(~freed | np.r_[True, ~freed[:-1]])
    in_order = names[np.lexsort((np.where(freed, names, 0), runs))]
    return stream.kinds, in_order, stream.numbers[stream.rows]


def differences(name: str, layers: int, recipe: Recipe, micro_batches: int = 1) -> list[str]:
    """Differences between a step assembled from a few layers and one traced whole."""
    model = deep(name, layers)
    few, all_of_it = traced(model, recipe), traced(model, recipe, whole=True)
    differing = [] if few.copies > 0 else ["nothing repeats"]
    check_repeats(few.recording)
    parts = ("kinds", "names", "numbers")
    ours = numbered_in_order(whole_steps([few.recording], few.copies, micro_batches)[0])
    theirs = numbered_in_order(whole_steps([all_of_it.recording], 0, micro_batches)[0])
    differing += [
        p for p, o, t in zip(parts, ours, theirs, strict=True) if not np.array_equal(o, t)
    ]
    held = whole_model(few.held, few.copies)
    for column in ("sizes", "purposes"):
        if not np.array_equal(getattr(held, column), getattr(all_of_it.held, column)):
            differing.append(f"held {column}")
    return differing


if __name__ == "__main__":
    freeze_garbage_collector()
    for line in sys.stdin:
        print(differences("blackmamba-tiny", 10, Recipe.model_validate_json(line)))  # noqa: T201 - its answer
