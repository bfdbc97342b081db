"""Losses of a step: one for each micro-batch, as transformers' Trainer computes them."""

from collections.abc import Callable, Iterator
from functools import partial
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
    total = counts.sum()
    if recipe.router_loss and recipe.loss == "full-logits":
        # transformers' Trainer adds the load-balancing loss of each micro-batch in full.
        for ids, targets in zip(*parts, strict=True):
            yield partial(
                batch_loss, tokens=ids, labels=targets, recipe=recipe, num_items_in_batch=total
            )
        return
    for ids, targets, share in zip(*parts, counts / total, strict=True):
        yield lambda model, ids=ids, targets=targets, share=share: (  # type: ignore[misc]
            share * batch_loss(model, ids, targets, recipe)
        )


def model_inputs(tokens: torch.Tensor, recipe: Recipe) -> dict[str, Any]:
    """Arguments of a model for a micro-batch of token ids, (batch, length)."""
    if recipe.examples_per_row is None:
        return {"input_ids": tokens}
    return packed_inputs(tokens, recipe.examples_per_row)


def router_inputs(tokens: torch.Tensor, recipe: Recipe) -> dict[str, Any]:
    """Arguments that ask a model for the load-balancing loss of its routers; empty without it.

    That loss counts the tokens of the trainer's mask, which packed rows do not have.
    """
    if not recipe.router_loss:
        return {}
    mask = {} if recipe.packing else {"attention_mask": torch.ones_like(tokens)}
    return {"output_router_logits": True} | mask


def as_returned(output: Any, *, is_autocast: bool) -> Any:
    """Output of a model as accelerate hands it to the trainer: under autocast, copies in fp32."""
    if is_autocast:
        output.logits = output.logits.float()
        if output.get("router_logits") is not None:
            output.router_logits = tuple(logits.float() for logits in output.router_logits)
    return output


def batch_loss(
    model: nn.Module,
    tokens: torch.Tensor,
    labels: torch.Tensor,
    recipe: Recipe,
    **arguments: torch.Tensor,
) -> torch.Tensor:
    """Mean loss of a micro-batch in nats per token.

    Args:
        model: causal language model.
        tokens: (batch, length) token ids.
        labels: (batch, length) token ids, -100 for tokens without a loss.
        recipe: with the loss and the precision.
        arguments: further arguments of the model.
    """
    inputs = model_inputs(tokens, recipe) | router_inputs(tokens, recipe) | arguments
    if recipe.packing:
        labels = packed_labels(labels, inputs["position_ids"])
    if recipe.loss != "full-logits":
        fused: torch.Tensor = model(**inputs, labels=labels, fused_lm_head=True).loss
        return fused
    output = as_returned(model(**inputs, labels=labels), is_autocast=recipe.autocast is not None)
    loss: torch.Tensor = output.loss
    return loss
