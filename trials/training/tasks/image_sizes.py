"""Ways in which classes of transformers take images, and sizes of images of so many tokens."""

import inspect
import math
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.image_processing_utils import select_best_resolution

from trials.models.fused_head import base_of
from trials.records.compatibility import (
    DIVIDED_FAMILIES,
    GRID_FAMILIES,
    PACKED_IMAGES,
    PADDED_FAMILIES,
)

TILES = "pixel_attention_mask"  # argument of models whose processors divide images into tiles
CROSSED = "mllama"  # family whose text attends to images in layers of their own
LEAST_SHRUNK = 1.1  # times that an image has too many patches in a row, from which it is shrunk
MOST_ASPECT = 4  # longer side of an image over the shorter one


class ImagesError(ValueError):
    """A model cannot be given images of so many tokens."""


def reader_of(model: nn.Module) -> Any:
    """Part of a model that reads images, itself but for some classes without a method for it."""
    base: Any = base_of(model)
    return base if hasattr(base, "get_image_features") else getattr(base, "model", None)


def takes_any_size(model: nn.Module) -> bool:
    """Whether a model takes images of any size, by a grid, the places of patches or their sizes."""
    base: Any = base_of(model)
    families = (*GRID_FAMILIES, *PADDED_FAMILIES, *DIVIDED_FAMILIES)
    return base.config.model_type in families or is_packed(base)


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
    return TILES in inspect.signature(reader_of(base).get_image_features).parameters


def is_divided(model: nn.Module) -> bool:
    """Whether a model takes an image of any size in tiles, the whole of it as another tile."""
    base: Any = base_of(model)
    return base.config.model_type in DIVIDED_FAMILIES


def is_padded(model: nn.Module) -> bool:
    """Whether a model's processor pads the patches of each image to one number."""
    base: Any = base_of(model)
    return base.config.model_type in PADDED_FAMILIES


def most_padded(model: nn.Module) -> int:
    """Tokens to which the processor of such a model pads each image."""
    base: Any = base_of(model)
    return PADDED_FAMILIES[base.config.model_type]


def padded_images(model: nn.Module, image_tokens: int) -> int:
    """Images of a padded family that give so many tokens: one, or several of the most.

    Raises:
        ImagesError: it is more than an image gives, and no multiple of it.
    """
    base: Any = base_of(model)
    most = most_padded(base)
    if image_tokens > most and image_tokens % most:
        lower = image_tokens // most * most
        raise ImagesError(
            f"--image-tokens {image_tokens}: an image of {base.config.model_type!r} gives at most "
            f"{most}: use {lower} or {lower + most}, or another multiple"
        )
    return max(1, image_tokens // most)


def grid_of(model: nn.Module, image_tokens: int) -> tuple[int, int, int]:
    """Patches of an image in time, height and width: the squarest image of so many tokens.

    Raises:
        ImagesError: each image of so many tokens is a strip.
    """
    base: Any = base_of(model)
    if is_padded(base):
        image_tokens //= padded_images(base, image_tokens)
    if not _is_shapely(image_tokens):
        lower = next(n for n in range(image_tokens, 0, -1) if _is_shapely(n))
        higher = next(n for n in range(image_tokens, 2 * image_tokens) if _is_shapely(n))
        raise ImagesError(
            f"--image-tokens {image_tokens}: an image of so many tokens would be over "
            f"{MOST_ASPECT} times as long as it is wide: use {lower} or {higher}"
        )
    rows, merged = _rows(image_tokens), merged_of(base)
    return 1, merged * rows, merged * image_tokens // rows


def merged_of(model: nn.Module) -> int:
    """Patches in a row of those that a token comes from, by the names that classes give it."""
    base: Any = base_of(model)
    facts, vision = base.config, base.config.vision_config
    names = ("pooling_kernel_size", "spatial_merge_size", "downsample_factor")
    parts = [facts] if is_packed(base) else [vision, facts]
    return next((int(getattr(p, n)) for p in parts for n in names if hasattr(p, n)), 1)


def _rows(image_tokens: int) -> int:
    """Rows of tokens of the squarest image: the largest divisor up to the root."""
    return next(n for n in range(math.isqrt(image_tokens), 0, -1) if image_tokens % n == 0)


def _is_shapely(image_tokens: int) -> bool:
    return image_tokens <= MOST_ASPECT * _rows(image_tokens) ** 2


def divided_size(model: nn.Module, image_tokens: int) -> tuple[int, int]:
    """Height and width of the squarest image that a model divides into so many tokens.

    Raises:
        ImagesError: no image gives so many.
    """
    base: Any = base_of(model)
    lower, higher = 0, math.inf
    for size in sorted(_divisible_sizes(base), key=_aspect):
        tokens = _divided_tokens(base.config, size)
        if tokens == image_tokens:
            return size
        lower = max(lower, tokens) if tokens < image_tokens else lower
        higher = min(higher, tokens) if tokens > image_tokens else higher
    near = " or ".join(str(n) for n in (lower, higher) if 0 < n < math.inf)
    raise ImagesError(
        f"--image-tokens {image_tokens}: no image of {base.config.model_type!r} gives so many "
        f"tokens (image_grid_pinpoints): use {near}"
    )


def _aspect(size: tuple[int, int]) -> tuple[float, int]:
    """Longer side of an image over the shorter one; of equal ones the smaller image is first."""
    return max(size) / min(size), max(size)


def _divisible_sizes(base: Any) -> Iterator[tuple[int, int]]:
    """Sizes of images that fill a resolution of the model in one direction, in whole patches."""
    vision = base.config.vision_config
    of_tile = vision.image_size // vision.patch_size
    for sides in {tuple(sides) for sides in base.config.image_grid_pinpoints}:
        for direction, side in enumerate(sides):
            for patches in range(1, side // vision.image_size * of_tile + 1):
                size = [*sides]
                size[direction] = math.ceil(patches * vision.image_size / of_tile)
                if max(size) <= MOST_ASPECT * min(size):
                    yield size[0], size[1]


def tiles_of(model: nn.Module, size: tuple[int, int]) -> int:
    """Tiles of an image of this height and width, with the one of the whole image."""
    facts: Any = base_of(model).config
    height, width = select_best_resolution(size, facts.image_grid_pinpoints)
    side = facts.vision_config.image_size
    return int(math.ceil(height / side) * math.ceil(width / side)) + 1


def _divided_tokens(facts: Any, size: tuple[int, int]) -> int:
    """Tokens of an image of this height and width: of the whole, and of its tiles by rows.

    A row ends with a token of its own; those of padding are dropped, as ``unpad_image`` does, and
    some classes have at most so many tiles' worth (``vision_aspect_ratio``).
    """
    vision = facts.vision_config
    of_tile = vision.image_size // vision.patch_size
    best = select_best_resolution(size, facts.image_grid_pinpoints)
    rows, columns = (side // vision.image_size * of_tile for side in best)
    height, width = size
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    if most := getattr(facts, "vision_aspect_ratio", None):
        shrunk = math.sqrt(rows * columns / (int(most.removeprefix("anyres_max_")) * of_tile**2))
        if shrunk > LEAST_SHRUNK:
            rows, columns = int(rows // shrunk), int(columns // shrunk)
    return int(of_tile**2 + rows * (columns + 1))
