"""Images of a batch, as the processors of transformers hand them to a vision-language model."""

import inspect
from typing import Any

import torch
from torch import nn

from trials.models.build import FamilyError
from trials.models.fused_head import base_of

GRID = "image_grid_thw"  # argument of towers that take images of any size
SIZED = "image_size"  # key of the one size of a tower's images


class ImagesError(ValueError):
    """A model cannot be given images of so many tokens."""


def images_for(model: nn.Module, image_tokens: int) -> int:
    """Images that give a sequence so many tokens, by the model's own code.

    Args:
        model: vision-language model of transformers, with or without adapters and weights.
        image_tokens: tokens of each sequence that come from images.

    Raises:
        FamilyError: the model's class takes images that are not of one size.
        ImagesError: it is no multiple of the tokens of an image.
    """
    base: Any = base_of(model)
    family = base.config.model_type
    needed = inspect.signature(base.get_image_features).parameters
    extra = [n for n, p in needed.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    extra = [n for n in extra if n != "pixel_values"] or [n for n in needed if n == GRID]
    if extra or not hasattr(base.config.vision_config, SIZED):
        why = f"its class takes {', '.join(extra)}" if extra else f"it has no {SIZED}"
        raise FamilyError(
            f"--image-tokens: images of {family!r} have no one size ({why}), which is not estimated"
        )
    with torch.no_grad():
        features = base.get_image_features(pixel_values=_pixels(base, 1)).pooler_output
    width: int = base.config.get_text_config().hidden_size
    of_one: int = sum(part.numel() for part in features) // width
    if image_tokens % of_one:
        raise ImagesError(
            f"--image-tokens {image_tokens}: an image of {family!r} gives {of_one} tokens: use a "
            "multiple"
        )
    return image_tokens // of_one


def image_inputs(
    model: nn.Module, tokens: torch.Tensor, image_tokens: int, images: int
) -> dict[str, torch.Tensor]:
    """Arguments of a vision-language model for the images of a batch.

    Args:
        model: vision-language model, as for ``images_for``.
        tokens: (sequences, length) token ids; the first ``image_tokens`` of each are from images.
        image_tokens: tokens of each sequence that come from images.
        images: images of each sequence.

    Returns:
        Pixels (sequences x images, channels, height, width) in fp32, and where the class takes
        them the kinds of the tokens (sequences, length), 1 for images.
    """
    base: Any = base_of(model)
    inputs = {"pixel_values": _pixels(base, len(tokens) * images, tokens.device)}
    if "token_type_ids" in inspect.signature(base.forward).parameters:
        kinds = torch.zeros_like(tokens)
        kinds[:, :image_tokens] = 1
        inputs["token_type_ids"] = kinds
    return inputs


def _pixels(base: Any, images: int, device: torch.device | None = None) -> torch.Tensor:
    vision = base.config.vision_config
    size = getattr(vision, SIZED)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(vision, "num_channels", 3)
    return torch.zeros(images, channels, height, width, device=device)
