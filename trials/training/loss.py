"""Losses of a step: one for each micro-batch, as transformers' Trainer computes them."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from trials.models.fused_head import IGNORED
from trials.recipes.recipe import Recipe
from trials.training.tasks.batch import TaskBatch
from trials.training.tasks.packing import packed_inputs, packed_labels


def micro_batch_losses(
    batch: TaskBatch, recipe: Recipe, micro_batches: int
) -> Iterator[Callable[[nn.Module], torch.Tensor]]:
    """Split a batch into micro-batches and return the function of each one's loss.

    The losses add up to the mean over all tokens with a loss.

    Args:
        batch: token ids, labels and the mask.
        recipe: recipe of the loss.
        micro_batches: number of parts, of equal size or with a smaller last one.
    """
    if micro_batches == 1:
        yield lambda model: batch_loss(model, batch, recipe)
        return
    parts = list(batch.parts(micro_batches))
    # On the device: reading the counts would make the host wait for it.
    counts = torch.stack([(part.labels[:, 1:] != IGNORED).sum() for part in parts])
    total = counts.sum()
    if recipe.router_loss and recipe.loss == "full-logits":
        # transformers' Trainer adds the load-balancing loss of each micro-batch in full.
        for part in parts:
            yield partial(batch_loss, batch=part, recipe=recipe, num_items_in_batch=total)
        return
    for part, share in zip(parts, counts / total, strict=True):
        yield lambda model, part=part, share=share: (  # type: ignore[misc]
            share * batch_loss(model, part, recipe)
        )


def model_inputs(tokens: torch.Tensor, recipe: Recipe) -> dict[str, Any]:
    """Arguments of a model for a micro-batch of token ids, (batch, length)."""
    if recipe.examples_per_row is None:
        return {"input_ids": tokens}
    return packed_inputs(tokens, recipe.examples_per_row)


def router_inputs(batch: TaskBatch, recipe: Recipe) -> dict[str, Any]:
    """Arguments that ask a model for the load-balancing loss of its routers; empty without it.

    That loss counts the tokens of the trainer's mask, which packed rows do not have.
    """
    if not recipe.router_loss:
        return {}
    has_own = recipe.packing or batch.mask is not None
    mask = {} if has_own else {"attention_mask": torch.ones_like(batch.tokens)}
    return {"output_router_logits": True} | mask


def as_returned(output: Any, *, is_autocast: bool) -> Any:
    """Output of a model as accelerate hands it to the trainer: under autocast, copies in fp32."""
    if is_autocast:
        output.logits = output.logits.float()
        if output.get("values") is not None:
            output.values = output.values.float()
        if output.get("router_logits") is not None:
            output.router_logits = tuple(logits.float() for logits in output.router_logits)
    return output


def batch_loss(
    model: nn.Module, batch: TaskBatch, recipe: Recipe, **arguments: torch.Tensor
) -> torch.Tensor:
    """Mean loss of a micro-batch in nats per token.

    Args:
        model: causal language model.
        batch: token ids, labels and the mask.
        recipe: with the loss and the precision.
        arguments: further arguments of the model.
    """
    inputs = model_inputs(batch.tokens, recipe) | batch.masked
    inputs |= router_inputs(batch, recipe) | arguments
    labels = batch.labels
    if recipe.packing:
        labels = packed_labels(labels, inputs["position_ids"])
    if recipe.loss != "full-logits":
        fused: torch.Tensor = model(**inputs, labels=labels, fused_lm_head=True).loss
        return fused
    output = as_returned(model(**inputs, labels=labels), is_autocast=recipe.autocast is not None)
    loss: torch.Tensor = output.loss
    return loss
