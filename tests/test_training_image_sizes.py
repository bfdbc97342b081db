"""Sizes of the images that give a vision-language model so many tokens."""

import inspect
from typing import Any

import pytest
import torch
from builders.long_cases import long_cases
from builders.observations import cpu, recipe
from builders.vision import GEMMA, GEMMA4, LFM2, LLAVA_NEXT, ONEVISION, QWEN2, SMOL, tiny_vision
from torch import nn
from transformers import AutoConfig
from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

from trials.models.build import stock_model
from trials.records.cell import Cell
from trials.records.compatibility import with_defaults
from trials.simulation.tracing.trace import TraceableCell
from trials.training.tasks.image_sizes import (
    ImagesError,
    divided_size,
    grid_of,
    tiles_of,
)
from trials.training.tasks.images import image_inputs, images_for

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def stock(config: dict[str, Any]) -> nn.Module:
    """A model without weights."""
    return stock_model(tiny_vision(config), recipe("lora"), None)


@pytest.mark.parametrize(("config", "most"), [(GEMMA4, 280), (LFM2, 256)])
def test_a_padded_image_has_so_many_tokens_at_most(config: dict[str, Any], most: int) -> None:
    """More tokens are those of several images; each has as many."""
    model = stock(config)
    assert [images_for(model, tokens) for tokens in (most, 3 * most)] == [1, 3]
    near = f"at most {most}: use {most} or {2 * most}"
    with pytest.raises(ImagesError, match=f"--image-tokens {most + 20}: .*{near}"):
        images_for(model, most + 20)
    tokens = torch.zeros(2, 4 * most, dtype=torch.int64)
    pixels = image_inputs(model, tokens, 3 * most, 3)["pixel_values"]
    assert len(pixels) == 2 * 3


def test_images_of_any_size_are_as_square_as_their_tokens_allow() -> None:
    """In patches of time, height and width; a strip is refused, with the next sizes."""
    model = stock(QWEN2)
    assert [grid_of(model, tokens) for tokens in (1, 12, 1024)] == [
        (1, 2, 2),
        (1, 6, 8),
        (1, 64, 64),
    ]
    with pytest.raises(ImagesError, match=r"--image-tokens 1021: .* use 1020 or 1023"):
        images_for(model, 1021)


@pytest.mark.parametrize(
    "config", [LLAVA_NEXT, *long_cases([ONEVISION])], ids=["llava_next", "llava_onevision"]
)
def test_tokens_of_divided_images_are_those_of_the_class(config: dict[str, Any]) -> None:
    """At all numbers of tokens tried that an image can have, by the code of transformers."""
    facts = dict(config)
    published = AutoConfig.for_model(facts["model_type"])
    facts["image_grid_pinpoints"] = published.image_grid_pinpoints
    facts["vision_config"] = facts["vision_config"] | {
        "image_size": published.vision_config.image_size,
        "patch_size": 4 * published.vision_config.patch_size,
    }
    model = stock(facts)
    inner: Any = model.model
    resolutions = published.image_grid_pinpoints
    side, of_tile = facts["vision_config"]["image_size"], published.vision_config.patch_size * 4
    keys = ("vision_feature_select_strategy", "vision_aspect_ratio")
    accepted = inspect.signature(inner.pack_image_features).parameters
    own = {key: getattr(model.config, key) for key in keys if key in accepted}
    sizes = 0
    for tokens in range(40, 140):
        try:
            size = divided_size(model, tokens)
        except ImagesError:
            continue
        tiles = image_size_to_num_patches(size, resolutions, side)
        features = torch.empty(tiles, (side // of_tile) ** 2, 1)
        (packed,), _ = inner.pack_image_features(
            [features], [size], image_newline=torch.empty(1), **own
        )
        assert (tiles_of(model, size), len(packed)) == (tiles, tokens)
        sizes += 1
    assert sizes > 10


def test_a_divided_image_is_the_squarest_of_its_tokens() -> None:
    """Half the rows of four tiles are padding at 14 tokens; no image gives 23."""
    model = stock(LLAVA_NEXT)
    assert [divided_size(model, tokens) for tokens in (24, 14)] == [(64, 64), (32, 48)]
    assert images_for(model, 24) == 1
    with pytest.raises(ImagesError, match=r"--image-tokens 23: .*'llava_next' .* use 18 or 24"):
        images_for(model, 23)


@pytest.mark.parametrize("config", [GEMMA, SMOL], ids=["gemma3", "smolvlm"])
def test_image_tokens_are_those_of_whole_images(config: dict[str, Any]) -> None:
    """By the model's own code: the towers' patches, pooled for Gemma and merged for SmolVLM."""
    model = tiny_vision(config)
    settings = with_defaults(recipe("lora"), model, cpu())
    cell = Cell(gpu="cpu", model=model.name, recipe=settings, seq_len=40, image_tokens=6)
    line = f"--image-tokens 6: an image of {model.name!r} gives 4 tokens: use 4 or 8"
    with pytest.raises(ImagesError, match=line):
        TraceableCell(cell, model)
