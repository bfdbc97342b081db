"""Losses of a step: one for each micro-batch, as transformers' Trainer computes them."""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from trials.models.fused_head import IGNORED
from trials.recipes.recipe import Recipe


def micro_batch_losses(
    tokens: torch.Tensor, labels: torch.Tensor, recipe: Recipe, micro_batches: int
) -> Iterator[Callable[[nn.Module], torch.Tensor]]:
    """Split a batch into micro-batches and return the function of each one's loss.

    The losses add up to the mean over all tokens with a loss.

    Args:
        tokens: (batch, length) token ids.
        labels: (batch, length) token ids, -100 for tokens without a loss.
        recipe: recipe of the loss.
        micro_batches: number of parts, of equal size or with a smaller last one.
    """
    if micro_batches == 1:
        yield lambda model: batch_loss(model, tokens, labels, recipe)
        return
    parts = [part.chunk(micro_batches) for part in (tokens, labels)]
    # On the device: reading the counts would make the host wait for it.
    counts = torch.stack([(part[:, 1:] != IGNORED).sum() for part in parts[1]])
    for ids, targets, share in zip(*parts, counts / counts.sum(), strict=True):
        yield lambda model, ids=ids, targets=targets, share=share: (  # type: ignore[misc]
            share * batch_loss(model, ids, targets, recipe)
        )


def batch_loss(
    model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor, recipe: Recipe
) -> torch.Tensor:
    """Mean loss of a micro-batch in nats per token.

    Args:
        model: causal language model.
        tokens: (batch, length) token ids.
        labels: (batch, length) token ids, -100 for tokens without a loss.
        recipe: with the loss and the precision.
    """
    if recipe.loss != "full-logits":
        fused: torch.Tensor = model(input_ids=tokens, labels=labels, fused_lm_head=True).loss
        return fused
    output = model(input_ids=tokens, labels=labels)
    if recipe.autocast is not None:
        # accelerate hands the trainer every output in fp32, as a copy beside the loss's own.
        output.logits = output.logits.float()
    loss: torch.Tensor = output.loss
    return loss
