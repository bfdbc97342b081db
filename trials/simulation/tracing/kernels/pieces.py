"""Attention of a tower within each image or window, equal ones as one batch."""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trials.simulation.tracing.tracer import Tracer

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


def register_by_pieces(tower: Any) -> None:
    """Let a tower of transformers attend within pieces, in place."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _by_pieces)
    tower.config._attn_implementation = ATTENTION  # noqa: SLF001 - transformers' own key


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
