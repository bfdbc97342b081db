"""Traced images that a model lists one by one: tiles of one size, or images of Pixtral's tower.

The number of tiles or tokens of each image is a value, which fake tensors lack. All images have the
same, so that they are traced as one part.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from trials.models.fused_head import base_of
from trials.simulation.recording import Kind
from trials.simulation.tracing.kernels.pieces import Pieces, register_by_pieces
from trials.simulation.tracing.tracer import NO_NUMBERS, Tracer
from trials.training.tasks.images import SIZES, grid_of


class TiledImages:
    """Images of a traced model whose processor divides them into tiles.

    Args:
        model: vision-language model with fake tensors; its forward pass is changed in place.
    """

    def __init__(self, model: nn.Module) -> None:
        self.tracer: Tracer | None = None
        whole: Any = base_of(model)
        self._own = whole.model.get_image_features
        whole.model.get_image_features = self._features

    def _features(self, pixel_values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Features of all tiles, in one part. No tile is padded, whether or not the text is."""
        assert self.tracer is not None
        needed, self.tracer.needs_mask = self.tracer.needs_mask, False
        with _listed_as([pixel_values[:, :, 0, 0, 0].numel()], self.tracer):
            outputs = self._own(pixel_values, *args, **kwargs)
        self.tracer.needs_mask = needed
        return outputs


class PackedImages:
    """Images of a traced model with Pixtral's tower, as one image that is as high as all.

    Args:
        model: vision-language model with fake tensors; its forward pass is changed in place.
        image_tokens: tokens of each example that come from its image.
        is_flash: whether the recipe attends by FlashAttention, which needs no mask of all images.
    """

    def __init__(self, model: nn.Module, image_tokens: int, *, is_flash: bool) -> None:
        self.tracer: Tracer | None = None
        self._image_tokens = image_tokens
        whole: Any = base_of(model)
        self._own = whole.model.get_image_features
        whole.model.get_image_features = self._features
        _, self._rows, self._columns = grid_of(whole, image_tokens)
        (tower,) = (part for part in whole.modules() if hasattr(part, "patch_conv"))
        self._side = tower.patch_size
        tower.patch_conv.register_forward_hook(self._as_one)
        if is_flash:
            register_by_pieces(tower)
            tower.transformer.register_forward_pre_hook(self._with_pieces, with_kwargs=True)

    def _features(
        self, pixel_values: torch.Tensor, image_sizes: torch.Tensor, **kwargs: Any
    ) -> Any:
        """Features of all images, in one part."""
        assert self.tracer is not None
        images = len(image_sizes)
        size = (images * self._rows * self._side, self._columns * self._side)
        with _listed_as([images * self._image_tokens], self.tracer):
            return self._own(pixel_values=pixel_values, **{SIZES: [size]}, **kwargs)

    def _as_one(self, _conv: nn.Module, _args: tuple[Any, ...], patches: torch.Tensor) -> Any:
        """Patches (images, width, rows, columns) as (1, width, images x rows, columns)."""
        images, width, rows, columns = patches.shape
        return patches.view(1, width, images * rows, columns)

    def _with_pieces(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the layers, with the images in place of the one."""
        assert self.tracer is not None
        of_one = self._rows * self._columns
        images = args[0].shape[1] // of_one
        pieces = Pieces((0, of_one), images, self.tracer, is_one_kernel=True)
        return args, kwargs | {"cu_seq_lens_q": pieces}


@contextlib.contextmanager
def _listed_as(numbers: list[int], tracer: Tracer) -> Iterator[None]:
    """Make these the numbers that the host reads from a tensor as a list, after a wait."""

    def read(_tensor: torch.Tensor) -> list[int]:
        tracer.event(Kind.WAITED, 0, NO_NUMBERS)
        return numbers

    own = FakeTensor.tolist
    FakeTensor.tolist = read  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        FakeTensor.tolist = own  # type: ignore[method-assign]
