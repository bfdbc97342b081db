"""Batch of a step: token ids, and the reference that some tasks compare the model with."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

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
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    reference: nn.Module | None = None
    reference_log_probs: torch.Tensor | None = None

    def parts(self, count: int) -> Iterator["TaskBatch"]:
        """Yield micro-batches, of equal size or with a smaller last one."""
        columns = (self.tokens, self.labels, self.reference_log_probs)
        split = [[None] * count if c is None else c.chunk(count) for c in columns]
        for tokens, labels, log_probs in zip(*split, strict=True):
            assert tokens is not None
            assert labels is not None
            yield replace(self, tokens=tokens, labels=labels, reference_log_probs=log_probs)
