"""Traced images that a processor pads: each example has one, of the same number of tokens.

The tower of Gemma 4 finds the patches that are no padding by values, which fake tensors lack.
"""

from typing import Any

import torch
from torch import nn

from trials.models.fused_head import base_of
from trials.simulation.tracing.tracer import Tracer
from trials.training.tasks.images import MOST_PADDED


class PaddedImages:
    """Images of a traced model whose processor pads them.

    Args:
        model: vision-language model with fake tensors; its forward pass is changed in place.
        image_tokens: tokens of each example that come from its image.
    """

    def __init__(self, model: nn.Module, image_tokens: int) -> None:
        self.tracer: Tracer | None = None
        self._has_padding = image_tokens < MOST_PADDED
        whole: Any = base_of(model)
        self._model = whole.model
        # Its own splits the features by the number of tokens of each image, a value.
        self._model.get_image_features = self._features

    def _features(
        self, pixel_values: torch.Tensor, image_position_ids: torch.Tensor, **kwargs: Any
    ) -> Any:
        """Features of all images, in one part."""
        assert self.tracer is not None
        needed = self.tracer.needs_mask
        self.tracer.needs_mask = needed or self._has_padding
        outputs = self._model.vision_tower(
            pixel_values=pixel_values, pixel_position_ids=image_position_ids, **kwargs
        )
        self.tracer.needs_mask = needed
        outputs.pooler_output = (self._model.embed_vision(outputs.last_hidden_state),)
        return outputs
