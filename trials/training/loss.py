"""Losses of a step: one for each micro-batch, as transformers' Trainer computes them."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from trials.models.fused_head import IGNORED
from trials.recipes.recipe import Recipe
from trials.training.tasks.packing import packed_inputs, packed_labels


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


def model_inputs(tokens: torch.Tensor, recipe: Recipe) -> dict[str, Any]:
    """Arguments of a model for a micro-batch of token ids, (batch, length)."""
    if recipe.examples_per_row is None:
        return {"input_ids": tokens}
    return packed_inputs(tokens, recipe.examples_per_row)


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
    inputs = model_inputs(tokens, recipe)
    if recipe.packing:
        labels = packed_labels(labels, inputs["position_ids"])
    if recipe.loss != "full-logits":
        fused: torch.Tensor = model(**inputs, labels=labels, fused_lm_head=True).loss
        return fused
    output = model(**inputs, labels=labels)
    if recipe.autocast is not None:
        # accelerate hands the trainer every output in fp32, as a copy beside the loss's own.
        output.logits = output.logits.float()
    loss: torch.Tensor = output.loss
    return loss
