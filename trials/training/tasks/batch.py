"""Batch of a step: token ids, and the reference that some tasks compare the model with."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class TaskBatch:
    """Batch of a step, or one of its micro-batches.

    Attributes:
        tokens: (sequences, length) token ids; of pairs, a micro-batch has the chosen sequences
            first.
        labels: (sequences, length) token ids, -100 for tokens without a loss.
        reference: the separate reference model; absent without one.
        reference_log_probs: (sequences, passes) precomputed log-probabilities of each pass of a
            reference; absent without any.
        advantages: (sequences,) advantages of completions; absent but for ``grpo``.
        sampled_log_probs: (sequences, length - 1) log-probabilities by the sampler of completions;
            absent for those of the model itself.
        mask: (sequences, length) 1 for tokens, 0 for padding; absent where no sequence is padded.
        images: arguments of a vision-language model for the images of the batch, which is one
            micro-batch then.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    reference: nn.Module | None = None
    reference_log_probs: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    sampled_log_probs: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    images: Mapping[str, torch.Tensor] | None = None

    @property
    def masked(self) -> dict[str, Any]:
        """Arguments that hand the mask and the images to a model; empty without any."""
        mask = {} if self.mask is None else {"attention_mask": self.mask}
        return mask | dict(self.images or {})

    def beside(self) -> "TaskBatch":
        """Batch with each example's sequence beside that of another one."""
        mask = None if self.mask is None else self.mask.roll(1, 0)
        tokens, labels = self.tokens.roll(1, 0), self.labels.roll(1, 0)
        return replace(self, tokens=tokens, labels=labels, mask=mask)

    def parts(self, count: int) -> Iterator["TaskBatch"]:
        """Yield micro-batches, of equal size or with a smaller last one."""
        columns = {
            field.name: column.chunk(count)
            for field in fields(self)
            if isinstance(column := getattr(self, field.name), torch.Tensor)
        }
        for part in zip(*columns.values(), strict=True):
            yield replace(self, **dict(zip(columns, part, strict=True)))
