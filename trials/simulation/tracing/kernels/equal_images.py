"""Traced images of any size: each example has one, all of the same size.

The towers of Qwen's and GLM's models divide the patches of a batch into images and windows by a
grid, whose values fake tensors lack, and attend to one after another. Here hooks hand a tower all
that it computes from the grid, as transformers' own precomputed arguments, and equal pieces are one
batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import vision_utils

from trials.models.fused_head import base_of
from trials.records.cell import Cell
from trials.simulation.recording import IntArray, Kind
from trials.simulation.tracing.kernels.listed_images import DividedImages, PackedImages, TiledImages
from trials.simulation.tracing.kernels.padded_images import PaddedImages
from trials.simulation.tracing.kernels.pieces import Pieces, register_by_pieces
from trials.simulation.tracing.tracer import NO_NUMBERS, Tracer
from trials.training.tasks.image_sizes import (
    grid_of,
    is_divided,
    is_packed,
    is_padded,
    is_tiled,
    takes_any_size,
)
from trials.training.tasks.images import GRID, KINDS, ROUTED, routed_tokens


@dataclass(frozen=True, slots=True)
class _OneGrid:
    """Grid of all images of a batch, as one that has each as a frame.

    Attributes:
        sides: frames, rows and columns of patches.
    """

    sides: tuple[int, int, int]

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        yield self.sides

    def prod(self, dim: int) -> IntArray:
        """Patches of each image, as of a tensor (images, 3)."""
        patches: IntArray = np.array([self.sides]).prod(dim)
        return patches


class EqualImages:
    """Images of a traced model that takes images of any size.

    Args:
        model: vision-language model with fake tensors; its forward pass is changed in place.
        image_tokens: tokens of each example that come from its image.
        is_flash: whether the recipe attends by FlashAttention.
    """

    def __init__(self, model: nn.Module, image_tokens: int, *, is_flash: bool) -> None:
        self.tracer: Tracer | None = None
        self._is_flash = is_flash
        whole: Any = base_of(model)
        tower = getattr(whole.model, "visual", None) or whole.model.vision_tower
        grid = torch.tensor([grid_of(whole, image_tokens)])
        self._grid = grid.numpy()
        self._bounds: dict[str, Sequence[int]] = {
            "cu_seqlens": vision_utils.get_vision_cu_seqlens(grid).tolist()
        }
        self._indices = self._indices_of(tower, grid)
        register_by_pieces(tower)
        whole.model.register_forward_pre_hook(self._without_values, with_kwargs=True)
        tower.register_forward_pre_hook(self._with_precomputed, with_kwargs=True)
        if hasattr(whole.model, "projector"):
            whole.model.projector.register_forward_pre_hook(self._as_one)
        if hasattr(whole.model, "resampler_model"):
            whole.model.resampler_model._temporal_slicing = self._twice  # noqa: SLF001 - its rule
        self._image_tokens = image_tokens

    def _indices_of(self, tower: Any, grid: torch.Tensor) -> dict[str, torch.Tensor]:
        """Positions and indices of one image that the tower's class computes, by argument."""
        merge = getattr(tower, "spatial_merge_size", 1)  # PaddleOCR's projector merges
        indices = {"position_ids": vision_utils.get_vision_position_ids(grid, merge)}
        if hasattr(tower, "window_size"):
            index, bounds = vision_utils.get_vision_window_index(
                grid, merge, tower.window_size, tower.patch_size
            )
            indices["window_index"] = index
            self._bounds["cu_window_seqlens"] = bounds.tolist()
        for table in (part for part in tower.modules() if hasattr(part, "num_grid_per_side")):
            names = ("interp_indices", "interp_weights")
            weighted = vision_utils.get_vision_interpolation_indices_and_weights(
                grid,
                table.num_grid_per_side,
                table.interpolation_mode,
                table.interpolation_align_corners,
                merge,
            )
            indices |= dict(zip(names, weighted, strict=True))
        return indices

    def _without_values(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of a model without a tensor that it would read: a grid on the host, positions.

        The positions (3, examples, length) of time, height and width are made of the grid. The
        8 bytes of each example that the model keeps of them are left out.
        """
        tokens = kwargs["input_ids"]
        further: dict[str, Any] = {GRID: np.repeat(self._grid, len(kwargs[GRID]), 0)}
        if hasattr(model, "get_rope_index"):
            further["position_ids"] = tokens.new_empty(3, *tokens.shape)
        if ROUTED in kwargs:
            assert self.tracer is not None
            self.tracer.entries_of = partial(self._routed_entries, tokens.shape[1])
        return args, {name: kwargs[name] for name in kwargs if name != KINDS} | further

    def _routed_entries(self, length: int, mask: torch.Tensor) -> int:
        """Set entries of a mask of the tokens that go to experts of images, or of all others.

        The latter is a new tensor, the former a view of one mask for all features of a token.
        """
        routed = routed_tokens(self._image_tokens, length)
        return mask.numel() // length * (routed if mask.stride(-1) == 0 else length - routed)

    def _twice(self, features: torch.Tensor, _grids: IntArray) -> torch.Tensor:
        """Features (tokens, 2 x width) of a film's pairs of frames: an image's frame is a pair.

        The class makes the indices on the host, by a grid that it reads.
        """
        assert self.tracer is not None
        self.tracer.event(Kind.WAITED, 0, NO_NUMBERS)
        rows = [torch.empty(len(features), dtype=torch.int64) for _ in range(2)]
        return torch.cat([features.index_select(0, index) for index in rows], dim=-1)

    def _as_one(
        self, _projector: nn.Module, args: tuple[torch.Tensor, Any]
    ) -> tuple[torch.Tensor, "_OneGrid"]:
        """Arguments of a projector that takes images one by one; all at once hold no less."""
        features, grids = args
        return features, _OneGrid((len(grids), *self._grid[0, 1:].tolist()))

    def _with_precomputed(
        self, _tower: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of a tower with all that it would compute from the grid."""
        assert self.tracer is not None
        args, grids = (args, kwargs["grid_thw"]) if "grid_thw" in kwargs else (args[:1], args[1])
        images = len(grids)
        further: dict[str, Any] = {"grid_thw": torch.empty(images, 3, dtype=torch.int64)} | {
            name: torch.empty(images * len(one), *one.shape[1:], dtype=one.dtype)
            for name, one in self._indices.items()
        }
        for name, bounds in self._bounds.items():
            pieces = Pieces(tuple(bounds), images, self.tracer, self._is_flash)
            longest = name.replace("cu_", "max_").replace("seqlens", "seqlen")
            further |= {name: pieces, longest: pieces.longest}
        return args, kwargs | further


TracedImages = EqualImages | DividedImages | PaddedImages | PackedImages | TiledImages


def traced_images(model: nn.Module, cell: Cell) -> TracedImages | None:
    """Images of a traced model of a cell; None if its class handles all of a batch as one."""
    if cell.image_tokens is None:
        return None
    is_flash = cell.recipe.attention == "flash_attention_2"
    if is_divided(model):
        return DividedImages(model, cell.image_tokens)
    if is_packed(model):
        return PackedImages(model, cell.image_tokens, is_flash=is_flash)
    if not takes_any_size(model):
        return TiledImages(model) if is_tiled(model) else None
    if is_padded(model):
        return PaddedImages(model, cell.image_tokens)
    return EqualImages(model, cell.image_tokens, is_flash=is_flash)
