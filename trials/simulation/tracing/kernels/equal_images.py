"""Traced images of any size: each example has one, all of the same size.

The towers of Qwen's and GLM's models divide the patches of a batch into images and windows by a
grid, whose values fake tensors lack, and attend to one after another. Here hooks hand a tower all
that it computes from the grid, as transformers' own precomputed arguments, and equal pieces are one
batch.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import vision_utils

from trials.models.fused_head import base_of
from trials.records.cell import Cell
from trials.simulation.tracing.kernels.listed_images import PackedImages, TiledImages
from trials.simulation.tracing.kernels.padded_images import PaddedImages
from trials.simulation.tracing.kernels.pieces import Pieces, register_by_pieces
from trials.simulation.tracing.tracer import Tracer
from trials.training.tasks.images import (
    GRID,
    KINDS,
    grid_of,
    is_packed,
    is_padded,
    is_tiled,
    takes_any_size,
)


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
        tower = whole.model.visual
        grid = torch.tensor([grid_of(whole, image_tokens)])
        self._grid = grid.numpy()
        self._bounds: dict[str, Sequence[int]] = {
            "cu_seqlens": vision_utils.get_vision_cu_seqlens(grid).tolist()
        }
        self._indices = self._indices_of(tower, grid)
        register_by_pieces(tower)
        whole.model.register_forward_pre_hook(self._without_values, with_kwargs=True)
        tower.register_forward_pre_hook(self._with_precomputed, with_kwargs=True)

    def _indices_of(self, tower: Any, grid: torch.Tensor) -> dict[str, torch.Tensor]:
        """Positions and indices of one image that the tower's class computes, by argument."""
        merge = tower.spatial_merge_size
        indices = {"position_ids": vision_utils.get_vision_position_ids(grid, merge)}
        if hasattr(tower, "window_size"):
            index, bounds = vision_utils.get_vision_window_index(
                grid, merge, tower.window_size, tower.patch_size
            )
            indices["window_index"] = index
            self._bounds["cu_window_seqlens"] = bounds.tolist()
        if hasattr(tower, "num_grid_per_side"):
            names = ("interp_indices", "interp_weights")
            weighted = vision_utils.get_vision_interpolation_indices_and_weights(
                grid,
                tower.num_grid_per_side,
                tower.interpolation_mode,
                tower.interpolation_align_corners,
                merge,
            )
            indices |= dict(zip(names, weighted, strict=True))
        return indices

    def _without_values(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of a model without a tensor that it would read: a grid on the host, positions.

        The positions (3, examples, length) of time, height and width are made of the grid. The
        8 bytes of each example that the model keeps of them are left out.
        """
        tokens = kwargs["input_ids"]
        further: dict[str, Any] = {
            GRID: np.repeat(self._grid, len(kwargs[GRID]), 0),
            "position_ids": tokens.new_empty(3, *tokens.shape),
        }
        return args, {name: kwargs[name] for name in kwargs if name != KINDS} | further

    def _with_precomputed(
        self, _tower: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of a tower with all that it would compute from the grid."""
        assert self.tracer is not None
        images = len(kwargs["grid_thw"])
        further: dict[str, Any] = {"grid_thw": torch.empty(images, 3, dtype=torch.int64)} | {
            name: torch.empty(images * len(one), *one.shape[1:], dtype=one.dtype)
            for name, one in self._indices.items()
        }
        for name, bounds in self._bounds.items():
            pieces = Pieces(tuple(bounds), images, self.tracer, self._is_flash)
            longest = name.replace("cu_", "max_").replace("seqlens", "seqlen")
            further |= {name: pieces, longest: pieces.longest}
        return args, kwargs | further


TracedImages = EqualImages | PaddedImages | PackedImages | TiledImages


def traced_images(model: nn.Module, cell: Cell) -> TracedImages | None:
    """Images of a traced model of a cell; None if its class handles all of a batch as one."""
    if cell.image_tokens is None:
        return None
    is_flash = cell.recipe.attention == "flash_attention_2"
    if is_packed(model):
        return PackedImages(model, cell.image_tokens, is_flash=is_flash)
    if not takes_any_size(model):
        return TiledImages(model) if is_tiled(model) else None
    if is_padded(model):
        return PaddedImages(model, cell.image_tokens)
    return EqualImages(model, cell.image_tokens, is_flash=is_flash)
