"""Compilation of a model by torch.compile, and the record that it took hold."""

import contextlib
from collections.abc import Callable

import torch
from torch import nn

from trials.models.weight_placement import decoder_layers
from trials.recipes.fields import Compile


def compile_model(model: nn.Module, parts: Compile | None) -> None:
    """Let a model, or each decoder layer, compile at its first step, in place.

    The settings are torch.compile's own, as accelerate's are for transformers' Trainer.
    """
    if parts is None:
        return
    for module in [model] if parts == "model" else decoder_layers(model):
        module.compile()


def uncompiled(parts: Compile | None) -> contextlib.AbstractContextManager[object]:
    """Run a model operator by operator, as if it were not to be compiled."""
    if parts is None:
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


def compiled_graphs(step: Callable[[], object], parts: Compile | None) -> dict[str, int]:
    """Run a step, and return fields of ``Built`` on its graphs, those of Dynamo's counters."""
    if parts is None:
        return {}
    from torch._dynamo.utils import counters  # noqa: PLC0415 - seconds, and few recipes compile

    torch.compiler.reset()
    counters.clear()
    step()
    return {
        "compiled_graphs": counters["stats"]["unique_graphs"],
        "graph_breaks": sum(counters["graph_break"].values()),
    }


def forget_graphs(parts: Compile | None) -> None:
    """Drop compiled graphs, so that the next step compiles for its own shapes alone."""
    if parts is not None:
        torch.compiler.reset()
