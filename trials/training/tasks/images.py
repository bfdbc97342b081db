"""Images of a batch, as the processors of transformers hand them to a vision-language model."""

import inspect
import math
from typing import Any

import torch
from torch import nn

from trials.models.build import FamilyError
from trials.models.fused_head import base_of
from trials.records.compatibility import ANY_SIZE_FAMILIES, PACKED_IMAGES

GRID = "image_grid_thw"  # argument of models that take images of any size
PLACES = "image_position_ids"  # argument of models whose processor pads images
KINDS = "mm_token_type_ids"  # another one: kinds of the tokens
SIZES = "image_sizes"  # argument of models with Pixtral's tower
TILES = "pixel_attention_mask"  # argument of models whose processors divide images into tiles
SIZED = "image_size"  # key of the one size of a tower's images
ANOTHER_WAY = "takes images in another way than as pixels of one size, which is not estimated"
CROSSED = "mllama"  # family whose text attends to images in layers of their own
PADDED = "gemma4"  # family whose processor pads each image to as many patches
MOST_PADDED = 280  # tokens of an image by that processor (max_soft_tokens)
MOST_ASPECT = 4  # longer side of an image over the shorter one


class ImagesError(ValueError):
    """A model cannot be given images of so many tokens."""


def images_for(model: nn.Module, image_tokens: int) -> int:
    """Images that give a sequence so many tokens, by the model's own code.

    One where the model takes images of any size. A tile is an image.

    Args:
        model: vision-language model of transformers, with or without adapters and weights.
        image_tokens: tokens of each sequence that come from images.

    Raises:
        FamilyError: the model's class takes images of any size in another way.
        ImagesError: it is no multiple of the tokens of an image, or no image gives so many.
    """
    base: Any = base_of(model)
    family = base.config.model_type
    if takes_any_size(model):
        grid_of(base, image_tokens)
        return 1
    if is_crossed(base):
        return image_tokens
    if not hasattr(base, "get_image_features"):
        raise FamilyError(f"--image-tokens: the class of {family!r} {ANOTHER_WAY}")
    of_one: int = _tokens_of_a_tile(base) if is_tiled(base) else _tokens_of_one(base)
    if image_tokens % of_one:
        lower = image_tokens // of_one * of_one
        near = " or ".join(str(n) for n in (lower, lower + of_one) if n)
        raise ImagesError(
            f"--image-tokens {image_tokens}: an image of {family!r} gives {of_one} tokens: use "
            f"{near}, or another multiple"
        )
    return image_tokens // of_one


def _tokens_of_a_tile(base: Any) -> int:
    """Tokens of a tile; Idefics 3 and SmolVLM merge squares of patches.

    Raises:
        FamilyError: the side of a tile is not so many squares.
    """
    vision, merged = base.config.vision_config, getattr(base.config, "scale_factor", 1)
    side = vision.image_size // vision.patch_size
    if side % merged:
        raise FamilyError(
            f"scale_factor {merged} does not divide the {side} patches of a tile's side "
            "(image_size over patch_size)"
        )
    return int(base.model.image_seq_len)


def _tokens_of_one(base: Any) -> int:
    """Tokens of an image of the tower's one size.

    Raises:
        FamilyError: the class takes images in another way.
    """
    family = base.config.model_type
    needed = inspect.signature(base.get_image_features).parameters
    extra = [n for n, p in needed.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    extra = [n for n in extra if n != "pixel_values"] or [n for n in needed if n == GRID]
    if extra or not hasattr(base.config.vision_config, SIZED):
        why = f"its class takes {', '.join(extra)}" if extra else f"it has no {SIZED}"
        raise FamilyError(
            f"--image-tokens: images of {family!r} have no one size ({why}), which is not estimated"
        )
    try:
        with torch.no_grad():
            features = base.get_image_features(pixel_values=_pixels(base, 1)).pooler_output
    except (AttributeError, ValueError) as error:
        raise FamilyError(
            f"--image-tokens: the class of {family!r} {ANOTHER_WAY} ({error})"
        ) from None
    width: int = base.config.get_text_config().hidden_size
    return int(sum(part.numel() for part in features) // width)


def takes_any_size(model: nn.Module) -> bool:
    """Whether a model takes images of any size, by a grid, the places of patches or their sizes."""
    base: Any = base_of(model)
    return base.config.model_type in ANY_SIZE_FAMILIES or is_packed(base)


def is_packed(model: nn.Module) -> bool:
    """Whether a model's tower, Pixtral's, attends to all images of a batch as one sequence."""
    base: Any = base_of(model)
    tower = getattr(base.config, "vision_config", None)
    return bool(getattr(tower, "model_type", None) == PACKED_IMAGES)


def is_crossed(model: nn.Module) -> bool:
    """Whether a model's text attends to images in layers of their own; each image is one token."""
    base: Any = base_of(model)
    return bool(base.config.model_type == CROSSED)


def is_tiled(model: nn.Module) -> bool:
    """Whether a model's processor divides images into tiles of one size."""
    base: Any = base_of(model)
    if not hasattr(getattr(base, "model", None), "image_seq_len"):
        return False
    return TILES in inspect.signature(base.get_image_features).parameters


def is_padded(model: nn.Module) -> bool:
    """Whether a model's processor pads the patches of each image to one number."""
    base: Any = base_of(model)
    return bool(base.config.model_type == PADDED)


def grid_of(model: nn.Module, image_tokens: int) -> tuple[int, int, int]:
    """Patches of an image in time, height and width: the squarest image of so many tokens.

    Raises:
        ImagesError: each image of so many tokens is a strip.
    """
    base: Any = base_of(model)
    if is_padded(base) and image_tokens > MOST_PADDED:
        raise ImagesError(
            f"--image-tokens {image_tokens}: an image of {PADDED!r} gives at most {MOST_PADDED}, "
            "and one image in each example is estimated"
        )
    if not _is_shapely(image_tokens):
        lower = next(n for n in range(image_tokens, 0, -1) if _is_shapely(n))
        higher = next(n for n in range(image_tokens, 2 * image_tokens) if _is_shapely(n))
        raise ImagesError(
            f"--image-tokens {image_tokens}: an image of so many tokens would be over "
            f"{MOST_ASPECT} times as long as it is wide: use {lower} or {higher}"
        )
    rows = _rows(image_tokens)
    merged = _merged(base)
    return 1, merged * rows, merged * image_tokens // rows


def _merged(base: Any) -> int:
    """Patches in a row of those that a token comes from."""
    facts, vision = base.config, base.config.vision_config
    if is_padded(base):
        return int(vision.pooling_kernel_size)
    return int(getattr(facts if is_packed(base) else vision, "spatial_merge_size", 1))


def _rows(image_tokens: int) -> int:
    """Rows of tokens of the squarest image: the largest divisor up to the root."""
    return next(n for n in range(math.isqrt(image_tokens), 0, -1) if image_tokens % n == 0)


def _is_shapely(image_tokens: int) -> bool:
    return image_tokens <= MOST_ASPECT * _rows(image_tokens) ** 2


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
        Pixels in fp32, (sequences x images, channels, height, width), and where the class takes
        them the kinds of the tokens (sequences, length), 1 for images. For images of any size the
        pixels are rows of patches (patches, channels x frames x height x width), beside their grid
        (sequences x images, 3), or padded ones beside their places, or pixels beside their sizes
        (sequences x images, 2). Tiles are (sequences, images, channels, height, width).
    """
    base: Any = base_of(model)
    count = len(tokens) * images
    if is_crossed(base):
        return _tiles_of_images(base, tokens, images)
    if is_packed(base):
        return _sized_pixels(base, grid_of(base, image_tokens), count, tokens.device)
    if not takes_any_size(base) and is_tiled(base):
        pixels = _pixels(base, count, tokens.device)
        tiles = pixels.view(len(tokens), images, *pixels.shape[1:])
        return {"pixel_values": tiles, TILES: torch.ones_like(tiles[:, :, 0], dtype=torch.int64)}
    if is_padded(base):
        name = KINDS
        inputs = _padded_patches(base, grid_of(base, image_tokens), count, tokens.device)
    elif takes_any_size(model):
        grid, name = grid_of(base, image_tokens), KINDS
        inputs = {
            "pixel_values": _patches(base, count * math.prod(grid), tokens.device),
            GRID: torch.tensor([grid] * count, device=tokens.device),
        }
    else:
        name = "token_type_ids"
        inputs = {"pixel_values": _pixels(base, count, tokens.device)}
    if name in inspect.signature(base.forward).parameters:
        inputs[name] = torch.zeros_like(tokens)
        inputs[name][:, :image_tokens] = 1
    return inputs


def _padded_patches(
    base: Any, grid: tuple[int, int, int], images: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Patches (images, patches, 3 x height x width) and their places (images, patches, 2).

    Padding is at -1.
    """
    vision = base.config.vision_config
    patches = MOST_PADDED * vision.pooling_kernel_size**2
    _, rows, columns = grid
    places = torch.full((patches, 2), -1)
    places[: rows * columns] = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(
        1
    )
    return {
        "pixel_values": torch.zeros(images, patches, 3 * vision.patch_size**2, device=device),
        PLACES: places.repeat(images, 1, 1).to(device),
    }


def _tiles_of_images(base: Any, tokens: torch.Tensor, images: int) -> dict[str, torch.Tensor]:
    """Pixels (sequences, images, tiles, 3, height, width) of images with all tiles, and masks."""
    vision = base.config.vision_config
    most = vision.max_num_tiles
    ones = torch.ones(len(tokens), images, most, dtype=torch.int64, device=tokens.device)
    pixels = _pixels(base, ones.numel(), tokens.device)
    return {
        "pixel_values": pixels.view(*ones.shape, *pixels.shape[1:]),
        "aspect_ratio_ids": ones[:, :, 0].contiguous(),
        "aspect_ratio_mask": ones,
        "cross_attention_mask": ones.new_ones(*tokens.shape, images, most),
    }


def _sized_pixels(
    base: Any, grid: tuple[int, int, int], images: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Pixels (images, 3, height, width) and sizes (images, 2) of images."""
    vision = base.config.vision_config
    size = [vision.patch_size * patches for patches in grid[1:]]
    return {
        "pixel_values": torch.ones(images, vision.num_channels, *size, device=device),
        SIZES: torch.tensor([size] * images, device=device),
    }


def _patches(base: Any, patches: int, device: torch.device) -> torch.Tensor:
    vision = base.config.vision_config
    frames, side = vision.temporal_patch_size, vision.patch_size
    channels = getattr(vision, "in_channels", None) or vision.in_chans
    return torch.zeros(patches, channels * frames * side**2, device=device)


def _pixels(base: Any, images: int, device: torch.device | None = None) -> torch.Tensor:
    vision = base.config.vision_config
    size = getattr(vision, SIZED)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(vision, "num_channels", 3)
    # Tiles of zeros would be padding.
    return torch.ones(images, channels, height, width, device=device)
