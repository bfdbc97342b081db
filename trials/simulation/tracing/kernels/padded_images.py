"""Traced images that a processor pads, all of the same number of tokens.

Towers find the patches that are no padding by values, which fake tensors lack.
"""

from typing import Any

import numpy as np
import torch
from torch import nn

from trials.models.fused_head import base_of
from trials.simulation.tracing.tracer import Tracer
from trials.training.tasks.image_sizes import grid_of, merged_of, most_padded
from trials.training.tasks.images import SHAPES


class PaddedImages:
    """Images of a traced model whose processor pads them.

    Args:
        model: vision-language model with fake tensors; its forward pass is changed in place.
        image_tokens: tokens of each example that come from its images.
    """

    def __init__(self, model: nn.Module, image_tokens: int) -> None:
        self.tracer: Tracer | None = None
        whole: Any = base_of(model)
        self._model = whole.model
        _, self._rows, self._columns = grid_of(whole, image_tokens)
        self._of_one = self._rows * self._columns // merged_of(whole) ** 2
        self._has_padding = self._of_one < most_padded(whole)
        # Its own splits the features by the number of tokens of each image, a value.
        self._model.get_image_features = self._features
        embeddings: Any = getattr(self._model.vision_tower, "embeddings", None)
        if hasattr(embeddings, "resize_positional_embeddings"):
            self._resized = embeddings.resize_positional_embeddings
            embeddings.resize_positional_embeddings = self._positions

    def _features(
        self, pixel_values: torch.Tensor, places: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        """Features of all images, in one part."""
        assert self.tracer is not None
        needed, tokens = self.tracer.needs_mask, self.tracer.image_tokens
        self.tracer.needs_mask = needed or self._has_padding
        self.tracer.image_tokens = self._of_one  # a row of the tower is an image
        if places is not None:
            kwargs["pixel_position_ids"] = places
        outputs = self._model.vision_tower(pixel_values=pixel_values, **kwargs)
        self.tracer.needs_mask, self.tracer.image_tokens = needed, tokens
        project = self._unpadded if SHAPES in kwargs else self._model.embed_vision
        outputs.pooler_output = (project(outputs.last_hidden_state),)
        return outputs

    def _unpadded(self, features: torch.Tensor) -> torch.Tensor:
        """Tokens of features (images, patches, width) without the padding."""
        own = features[:, : self._rows * self._columns]
        squares = own.reshape(len(own), self._rows, self._columns, -1)
        tokens: torch.Tensor = self._model.multi_modal_projector(squares)
        return tokens.flatten(0, 2)

    def _positions(
        self, table: torch.Tensor, shapes: torch.Tensor, max_length: int
    ) -> torch.Tensor:
        """Embeddings of positions (images, patches, width), which are the same for each image."""
        one: torch.Tensor = self._resized(
            table, np.array([[self._rows, self._columns]]), max_length
        )
        return one.repeat(len(shapes), 1, 1)
