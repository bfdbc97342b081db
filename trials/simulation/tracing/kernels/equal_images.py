"""Traced images of any size: each example has one, all of the same size.

The towers of Qwen's and GLM's models divide the patches of a batch into images and windows by a
grid, whose values fake tensors lack, and attend to one after another. Here hooks hand a tower all
that it computes from the grid, as transformers' own precomputed arguments, and equal pieces are one
batch.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import vision_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trials.models.fused_head import base_of
from trials.records.cell import Cell
from trials.simulation.tracing.kernels.padded_images import PaddedImages
from trials.simulation.tracing.tracer import Tracer
from trials.training.tasks.images import GRID, KINDS, grid_of, is_padded, takes_any_size

ATTENTION = "flash_attention_by_pieces"
"""Name of the attention; with a flash in it, transformers passes all pieces in one call."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Division of a batch's patches, in place of the cumulative lengths that a tower computes.

    Attributes:
        bounds: cumulative patches of the pieces of one image, from 0.
        images: images of the batch.
        tracer: tracer of the step.
        is_one_kernel: whether one kernel attends to all pieces, as FlashAttention's does.
    """

    bounds: tuple[int, ...]
    images: int
    tracer: Tracer
    is_one_kernel: bool

    def __getitem__(self, part: slice) -> torch.Tensor:
        """Some of the cumulative lengths of the batch, without values."""
        pieces = self.images * (len(self.bounds) - 1)
        return torch.empty(pieces + 1, dtype=torch.int32)[part]

    @property
    def longest(self) -> int:
        """Patches of the longest piece."""
        return max(self.counts)

    @property
    def counts(self) -> Counter[int]:
        """Pieces of one image by their patches."""
        return Counter(end - start for start, end in pairwise(self.bounds))


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
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _by_pieces)
        tower.config._attn_implementation = ATTENTION  # noqa: SLF001 - transformers' own key
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


def equal_images(model: nn.Module, cell: Cell) -> EqualImages | PaddedImages | None:
    """Images of a traced model of a cell; None unless it takes some of any size."""
    if cell.image_tokens is None or not takes_any_size(model):
        return None
    if is_padded(model):
        return PaddedImages(model, cell.image_tokens)
    is_flash = cell.recipe.attention == "flash_attention_2"
    return EqualImages(model, cell.image_tokens, is_flash=is_flash)


def _by_pieces(  # noqa: PLR0913 - the signature of transformers' functions
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: Pieces,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention (1, patches, heads, width) within each piece; all of one length are one batch."""
    pieces, outputs, start = cu_seq_lens_q, [], 0
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    for length, of_image in pieces.counts.items():
        count = of_image * pieces.images
        pieces.tracer.repeats = 1 if pieces.is_one_kernel else count
        batched = [
            tensor[0, :, start : start + count * length].reshape(len(tensor[0]), count, length, -1)
            for tensor in (query, key, value)
        ]
        parts = [tensor.transpose(0, 1) for tensor in batched]
        output, _ = attend(module, *parts, attention_mask, scaling=scaling, is_causal=False)
        outputs.append(output.flatten(0, 1).unsqueeze(0))
        start += count * length
    pieces.tracer.repeats = 1
    return torch.cat(outputs, dim=1), None
