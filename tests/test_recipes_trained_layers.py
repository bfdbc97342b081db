"""Recipes that train some decoder layers: which ones, and what does not go with them."""

import pytest
import torch
from builders.observations import recipe, tiny_cell
from pydantic import ValidationError

from trials.models.weight_placement import LayersError, decoder_layers
from trials.recipes.recipe import Recipe
from trials.records.model import Model, find_model
from trials.training.finetune import FineTuning


def model_of(layers: int) -> Model:
    """A tiny model with so many layers."""
    facts = find_model("llama-tiny")
    return facts.model_copy(update={"config": facts.config | {"num_hidden_layers": layers}})


def trained(layers: int, **fields: object) -> list[int]:
    """Numbers of the layers that a recipe trains in a model with so many."""
    settings = recipe("full", precision="bf16-mixed", **fields)
    cell = tiny_cell("llama-tiny", settings, seq_len=8)
    tuning = FineTuning(cell, model_of(layers), device=torch.device("cpu"), seed=0)
    numbers = []
    for number, layer in enumerate(decoder_layers(tuning.model)):
        flags = {(p.requires_grad, p.dtype) for p in layer.parameters()}
        assert flags in ({(True, torch.float32)}, {(False, torch.bfloat16)})
        numbers += [number] * flags.pop()[0]
    assert len(tuning.trainable) == len(numbers) * 9
    return numbers


def test_trained_layers_are_the_last_the_first_or_spread() -> None:
    """They are in fp32; all else is frozen in bf16."""
    assert trained(4, trained_layers=1) == [3]
    assert trained(4, trained_layers=-2) == [0, 1]
    assert trained(6, trained_layers=2, spread_layers=True) == [2, 5]
    assert trained(2, trained_layers=8) == [0, 1]


def test_layers_that_cannot_be_spread_are_refused() -> None:
    """The message names both numbers."""
    with pytest.raises(LayersError, match=r"trained_layers 3 .* 4 layers"):
        trained(4, trained_layers=3, spread_layers=True)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"method": "lora", "lora_rank": 8, "trained_layers": 2}, "not apply to method lora"),
        ({"trained_layers": 0}, "trained_layers 0 trains nothing"),
        ({"trained_layers": 2, "task": "dpo"}, "trained_layers 2 does not support task dpo"),
        ({"trained_layers": -2, "spread_layers": True}, "spread_layers needs trained_layers"),
        ({"spread_layers": True}, "spread_layers needs trained_layers"),
    ],
)
def test_what_does_not_go_with_trained_layers_is_reported(
    fields: dict[str, object], reason: str
) -> None:
    """The message has the value and the remedy."""
    with pytest.raises(ValidationError, match=reason):
        Recipe.model_validate({"method": "full"} | fields)
