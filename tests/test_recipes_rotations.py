"""Recipes of OFT: what goes with rotations, and which layers they fit."""

import pytest
import torch
from builders.observations import recipe, tiny_cell
from pydantic import ValidationError

from orchestrator.spec.recipe_options import RecipeOptions, recipe_of
from trials.models.adapter_targets import TargetError
from trials.recipes.recipe import Recipe
from trials.records.model import find_model
from trials.training.finetune import FineTuning

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
OFT = {"method": "lora", "oft_block_size": 8}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"lora_rank": 8}, "oft_block_size 8 and lora_rank exclude"),
        ({"lora_dropout": 0.1}, "oft_block_size 8 and lora_dropout exclude"),
        ({"dora": True}, "oft_block_size 8 and dora exclude"),
        ({"method": "full"}, "oft_block_size 8 does not apply to method full"),
        ({"lora_targets": ("experts",), "experts": "grouped"}, "use experts: looped"),
    ],
)
def test_what_does_not_go_with_rotations_is_reported(
    fields: dict[str, object], reason: str
) -> None:
    """They take the place of LoRA's matrices."""
    with pytest.raises(ValidationError, match=reason):
        Recipe.model_validate(OFT | fields)


def test_rotations_are_options_and_part_of_the_key() -> None:
    """The command line's default rank stays away; adapters have their usual dtype."""
    options = RecipeOptions(method="lora", oft_block_size=8, precision="bf16-mixed")
    made = recipe_of(options)
    assert (made.lora_rank, made.lora_alpha, made.adapter_dtype) == (None, None, "fp32")
    assert made.key.startswith("lora-oft8-")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"oft_block_size": 16}, "does not divide the 344 inputs of model.layers.0.mlp.down_proj"),
        ({"oft_block_size": 8, "lora_targets": ("embed_tokens",)}, "no linear layer"),
    ],
)
def test_rotations_that_do_not_fit_are_refused(fields: dict[str, object], reason: str) -> None:
    """PEFT would take another size, with a warning."""
    cell = tiny_cell("llama-tiny", recipe("lora", lora_rank=None, **fields))
    with pytest.raises(TargetError, match=reason):
        FineTuning(cell, find_model("llama-tiny"), device=torch.device("cpu"), seed=0)


def test_rotations_have_their_published_number_of_parameters() -> None:
    """A block of n inputs has n (n - 1) / 2 angles: 16 blocks of 28 for q_proj of each layer."""
    settings = recipe("lora", lora_rank=None, oft_block_size=8, lora_targets=("q_proj",))
    facts = find_model("llama-tiny")
    tuning = FineTuning(
        tiny_cell("llama-tiny", settings), facts, device=torch.device("cpu"), seed=0
    )
    layers = int(facts.config["num_hidden_layers"])  # type: ignore[arg-type]
    assert [tuple(p.shape) for p in tuning.trainable] == [(16, 28)] * layers
