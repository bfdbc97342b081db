"""Compiled models: they train as others do, and a recipe that did not compile is an error."""

import pytest
import torch
from builders.observations import recipe, tiny_cell

from trials.models.weight_placement import decoder_layers
from trials.records.model import find_model
from trials.simulation.tracing.trace import TraceableCell
from trials.simulation.tracing.tracer import UntraceableError
from trials.training.finetune import FineTuning
from trials.training.recipe_check import departures

pytestmark = [
    pytest.mark.usefixtures("made_for_small_steps"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def tuning_of(part: str | None, *, checkpoints: bool = False) -> FineTuning:
    """A tiny model on the CPU."""
    settings = recipe("full", gradient_checkpointing=checkpoints, compile=part)
    cell = tiny_cell("llama-tiny", settings, seq_len=16)
    return FineTuning(cell, find_model(cell.model), device=torch.device("cpu"), seed=0)


@pytest.mark.long
@pytest.mark.parametrize(("part", "checkpoints"), [("model", False), ("layers", True)])
def test_a_compiled_step_has_the_losses_of_one_without(part: str, *, checkpoints: bool) -> None:
    """Inductor compiles for this CPU by g++."""
    losses = []
    for compiles in (part, None):
        tuning = tuning_of(compiles, checkpoints=checkpoints)
        tokens = tuning.tokens(2)
        losses.append([tuning.step(tokens) for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def quickly_compiled(part: str) -> FineTuning:
    """A tiny model with graphs that run operator by operator, for which g++ is not needed."""
    tuning = tuning_of(part)
    for module in [tuning.model, *decoder_layers(tuning.model)]:
        if module._compiled_call_impl is not None:
            module.compile(backend="eager")
    return tuning


@pytest.mark.parametrize("part", ["model", "layers"])
def test_a_record_counts_the_graphs_of_a_step(part: str) -> None:
    """The census itself runs without graphs, and sees every operator."""
    tuning = quickly_compiled(part)
    built = tuning.built()
    assert built.compiled_graphs == 1
    assert departures(recipe("full", attention="sdpa", compile=part), built, tuning.implied()) == []


def test_a_recipe_that_did_not_compile_is_an_error() -> None:
    """A step without a graph is not what the recipe says."""
    plain = tuning_of(None)
    wanted = recipe("full", attention="sdpa", compile="model")
    wrong = departures(wanted, plain.built(), plain.implied())
    assert [line.partition(":")[0] for line in wrong] == ["compiled graphs"]


def test_a_compiled_step_is_not_simulated() -> None:
    """The trace has operators, which compiled code has not."""
    cell = tiny_cell("llama-tiny", recipe("full", compile="layers"), seq_len=16)
    with pytest.raises(UntraceableError, match="compile layers"):
        TraceableCell(cell, find_model(cell.model))
