"""Traced images that a model lists one by one: tiles, divided images, those of Pixtral's tower.

The number of tiles or tokens of each image is a value, which fake tensors lack. All images have the
same, so that they are traced as one part.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from trials.models.fused_head import base_of
from trials.simulation.recording import Kind
from trials.simulation.tracing.kernels.pieces import Pieces, register_by_pieces
from trials.simulation.tracing.tracer import NO_NUMBERS, Tracer
from trials.training.tasks.image_sizes import divided_size, grid_of
from trials.training.tasks.images import SIZES


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


class DividedImages:
    """Images of a traced model that takes each in tiles, as one image of all tiles.

    Args:
        model: vision-language model with fake tensors; its forward pass is changed in place.
        image_tokens: tokens of each example that come from its image.
    """

    def __init__(self, model: nn.Module, image_tokens: int) -> None:
        self.tracer: Tracer | None = None
        whole: Any = base_of(model)
        self._size = divided_size(whole, image_tokens)
        self._own, self._pack = whole.model.get_image_features, whole.model.pack_image_features
        self._module = sys.modules[type(whole).__module__]
        whole.model.get_image_features = self._features
        whole.model.pack_image_features = self._packed

    def _features(
        self, pixel_values: torch.Tensor, image_sizes: torch.Tensor, **kwargs: Any
    ) -> Any:
        """Features of all images, in one part, of tiles (images, tiles, 3, height, width)."""
        assert self.tracer is not None
        self._images = len(image_sizes)
        tiles = pixel_values.flatten(0, 1)
        count = "image_size_to_num_patches"
        own = getattr(self._module, count)
        setattr(self._module, count, lambda *_args, **_kwargs: len(tiles))
        self.tracer.event(Kind.WAITED, 0, NO_NUMBERS)  # for the sizes
        try:
            return self._own(tiles.unsqueeze(0), [self._size], **kwargs)
        finally:
            setattr(self._module, count, own)

    def _packed(
        self, features: list[torch.Tensor], sizes: list[Any], *args: Any, **kwargs: Any
    ) -> tuple[list[torch.Tensor], None]:
        """Tokens of all images: the class's own steps for one are mapped over them."""
        assert self.tracer is not None

        def tokens(tiles: torch.Tensor) -> torch.Tensor:
            (one,), _ = self._pack([tiles], sizes, *args, **kwargs)
            return one  # type: ignore[no-any-return]

        (tiles,) = features
        self.tracer.repeats = self._images
        packed = torch.vmap(tokens)(tiles.view(self._images, -1, *tiles.shape[1:]))
        self.tracer.repeats = 1
        return [packed.flatten(0, 1)], None


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
