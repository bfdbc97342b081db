"""Images of a batch, as the processors of transformers hand them to a vision-language model."""

import inspect
import math
from typing import Any

import torch
from torch import nn

from trials.models.build import FamilyError
from trials.models.fused_head import base_of
from trials.training.tasks.image_sizes import (
    TILES,
    ImagesError,
    divided_size,
    grid_of,
    is_crossed,
    is_divided,
    is_packed,
    is_padded,
    is_tiled,
    merged_of,
    most_padded,
    padded_images,
    reader_of,
    takes_any_size,
    tiles_of,
)

GRID = "image_grid_thw"  # argument of models that take images of any size
PLACES = "image_position_ids"  # argument of models whose processor pads images
SHAPES = "spatial_shapes"  # the same, of other models
KINDS = "mm_token_type_ids"  # another one: kinds of the tokens
ROUTED = "moe_mm_token_type_ids"  # kinds by which a class routes tokens to experts of images
MARKS = 2  # tokens around an image, which such a class routes with it
SIZES = "image_sizes"  # argument of models that take pixels of any size
HIGH_RES = "high_res_pixel_values"  # argument of a class with a second tower
UNCAST = "llama4"  # family whose tower does not cast its pixels
SIZED = "image_size"  # key of the one size of a tower's images
ANOTHER_WAY = "takes images in another way than as pixels of one size, which is not estimated"


def images_for(model: nn.Module, image_tokens: int) -> int:
    """Images that give a sequence so many tokens, by the model's own code.

    One where the model takes images of any size, but for those that a processor pads. A tile is an
    image where all are of one size.

    Args:
        model: vision-language model of transformers, with or without adapters and weights.
        image_tokens: tokens of each sequence that come from images.

    Raises:
        FamilyError: the model's class takes images of any size in another way.
        ImagesError: it is no multiple of the tokens of an image, or no image gives so many.
    """
    base: Any = base_of(model)
    family = base.config.model_type
    if is_divided(base):
        divided_size(base, image_tokens)
        return 1
    if takes_any_size(base):
        grid_of(base, image_tokens)
        return padded_images(base, image_tokens) if is_padded(base) else 1
    if is_crossed(base):
        return image_tokens
    if not hasattr(reader_of(base), "get_image_features"):
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
    needed = inspect.signature(reader_of(base).get_image_features).parameters
    extra = [n for n, p in needed.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    extra = [n for n in extra if n not in {"pixel_values", HIGH_RES}] or [
        n for n in needed if n == GRID
    ]
    if extra or not hasattr(base.config.vision_config, SIZED):
        why = f"its class takes {', '.join(extra)}" if extra else f"it has no {SIZED}"
        raise FamilyError(
            f"--image-tokens: images of {family!r} have no one size ({why}), which is not estimated"
        )
    try:
        with torch.no_grad():
            output = reader_of(base).get_image_features(**_pixel_inputs(base, 1))
    except (AttributeError, ValueError) as error:
        raise FamilyError(
            f"--image-tokens: the class of {family!r} {ANOTHER_WAY} ({error})"
        ) from None
    # Llama 4 projects what its tower returns later.
    features = output.last_hidden_state if output.pooler_output is None else output.pooler_output
    return int(sum(part.numel() // part.shape[-1] for part in features))


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
        (sequences x images, 2). Tiles are (sequences, images, channels, height, width). A class
        with experts of images takes which tokens go to them (sequences, length).
    """
    base: Any = base_of(model)
    count = len(tokens) * images
    device = tokens.device
    if is_crossed(base):
        return _tiles_of_images(base, tokens, images)
    if is_divided(base):
        return _divided_pixels(base, divided_size(base, image_tokens), count, device)
    if is_packed(base):
        return _sized_pixels(base, grid_of(base, image_tokens), count, device)
    if not takes_any_size(base) and is_tiled(base):
        pixels = _pixels(base, count, device)
        tiles = pixels.view(len(tokens), images, *pixels.shape[1:])
        return {"pixel_values": tiles, TILES: torch.ones_like(tiles[:, :, 0], dtype=torch.int64)}
    name = KINDS
    if is_padded(base):
        inputs = _padded_patches(base, grid_of(base, image_tokens), count, device)
    elif takes_any_size(base):
        grid = grid_of(base, image_tokens)
        inputs = {
            "pixel_values": _patches(base, count * math.prod(grid), device),
            GRID: torch.tensor([grid] * count, device=device),
        }
    else:
        name = "token_type_ids"
        inputs = _pixel_inputs(base, count, device)
    if name in inspect.signature(base.forward).parameters:
        inputs[name] = torch.zeros_like(tokens)
        inputs[name][:, :image_tokens] = 1
    if ROUTED in inspect.signature(base.forward).parameters:
        inputs[ROUTED] = torch.zeros_like(tokens)
        inputs[ROUTED][:, : routed_tokens(image_tokens, tokens.shape[1])] = 1
    return inputs


def routed_tokens(image_tokens: int, length: int) -> int:
    """Tokens of a sequence that go to experts of images: not all, since there is text."""
    return min(image_tokens + MARKS, length - 1)


def _padded_patches(
    base: Any, grid: tuple[int, int, int], images: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Patches (images, patches, 3 x height x width) and where they are in their image.

    Either their places (images, patches, 2), of padding -1, or a mask (images, patches) beside the
    rows and columns (images, 2).
    """
    vision = base.config.vision_config
    _, rows, columns = grid
    of_one = rows * columns
    patches = most_padded(base) * merged_of(base) ** 2
    inputs = {"pixel_values": torch.zeros(images, patches, 3 * vision.patch_size**2, device=device)}
    if SHAPES in inspect.signature(base.forward).parameters:
        mask = torch.zeros(images, patches, dtype=torch.int64, device=device)
        mask[:, :of_one] = 1
        shapes = torch.tensor([grid[1:]] * images, device=device)
        return inputs | {TILES: mask, SHAPES: shapes}
    places = torch.full((patches, 2), -1)
    places[:of_one] = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
    return inputs | {PLACES: places.repeat(images, 1, 1).to(device)}


def _divided_pixels(
    base: Any, size: tuple[int, int], images: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Pixels (images, tiles, 3, height, width) of images in tiles, and sizes (images, 2)."""
    tiles = tiles_of(base, size)
    pixels = _pixels(base, images * tiles, device)
    return {
        "pixel_values": pixels.view(images, tiles, *pixels.shape[1:]),
        SIZES: torch.tensor([size] * images, device=device),
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
    """Rows of patches, or where a tower takes no films squares (patches, channels, side, side)."""
    vision = base.config.vision_config
    names = ("in_channels", "in_chans", "num_channels")
    channels = next(getattr(vision, name) for name in names if hasattr(vision, name))
    # A tower without films may still take rows, whose films its projector merges.
    merges_films = hasattr(vision, "temporal_merge_size")
    frames = getattr(vision, "temporal_patch_size", 1 if merges_films else None)
    side = vision.patch_size
    shape = (channels, side, side) if frames is None else (channels * frames * side**2,)
    return torch.zeros(patches, *shape, device=device)


def _pixel_inputs(
    base: Any, images: int, device: torch.device | None = None
) -> dict[str, torch.Tensor]:
    """Pixels of images of one size, for each tower."""
    inputs = {"pixel_values": _pixels(base, images, device)}
    # A step fails unless pixels that a tower does not cast have its dtype.
    if base.config.model_type == UNCAST:
        dtype = base.vision_model.class_embedding.dtype
        inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
    if HIGH_RES in inspect.signature(base.forward).parameters:
        embedding = reader_of(base).high_res_vision_model.get_input_embeddings()
        pixels = _pixels(base, images, device, base.config.high_res_vision_config)
        inputs[HIGH_RES] = pixels.to(next(embedding.parameters()).dtype)
    return inputs


def _pixels(
    base: Any, images: int, device: torch.device | None = None, tower: Any = None
) -> torch.Tensor:
    vision = base.config.vision_config if tower is None else tower
    size = getattr(vision, SIZED)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(vision, "num_channels", 3)
    # Tiles of zeros would be padding.
    return torch.ones(images, channels, height, width, device=device)
