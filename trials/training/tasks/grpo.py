"""GRPO's update (arXiv 2402.03300) on completions that exist, as TRL 1.16's GRPOTrainer takes it.

Its arguments have their defaults: the loss of DAPO (arXiv 2503.14476, equation 8), one generation
and one iteration for each optimizer step. Completions, rewards and advantages are given; generating
them is no part of the update.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from trials.models.fused_head import IGNORED, base_of
from trials.recipes.recipe import Recipe
from trials.training.loss import router_inputs
from trials.training.tasks.batch import TaskBatch
from trials.training.tasks.log_probs import (
    output_with_log_probs,
    reference_token_log_probs,
    token_log_probs,
)

CLIP = 0.2
KL_WEIGHT = 0.04  # TRL's default is 0, without a reference; this is the paper's
MOST_IMPORTANCE = 3.0


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """Micro-batch with all that is constant through the update.

    Attributes:
        batch: token ids, labels and advantages.
        own: (sequences, length - 1) log-probabilities before the update; absent without vLLM.
        sampled: those of vLLM, likewise.
        importance: (sequences, 1) probability of each completion over that by vLLM, zero above a
            limit; absent without vLLM.
        by_reference: log-probabilities by the reference, as ``own``; absent without one.
    """

    batch: TaskBatch
    own: torch.Tensor | None = None
    sampled: torch.Tensor | None = None
    importance: torch.Tensor | None = None
    by_reference: torch.Tensor | None = None


def grpo_losses(
    batch: TaskBatch, recipe: Recipe, micro_batches: int
) -> Iterator[Callable[[nn.Module], torch.Tensor]]:
    """Return the function of each micro-batch's loss; the losses add up to the step's.

    The first one also runs all passes without gradients, which come before any with gradients.

    Args:
        batch: batch of the step.
        recipe: with reference and generation_share.
        micro_batches: number of parts, of equal size or with a smaller last one.
    """
    parts = list(batch.parts(micro_batches))
    scored: list[ScoredBatch] = []

    def loss_of(index: int, model: nn.Module) -> torch.Tensor:
        if not scored:
            scored.extend(_scored(model, part, recipe) for part in parts)
        output = output_with_log_probs(model, parts[index], **router_inputs(parts[index], recipe))
        loss = _loss(output.log_probs, scored[index]) / (batch.labels[:, 1:] != IGNORED).sum()
        if not recipe.router_loss:
            return loss
        config: Any = base_of(model).config
        router: torch.Tensor = config.router_aux_loss_coef * output.aux_loss / micro_batches
        return loss + router

    return (partial(loss_of, index) for index in range(len(parts)))


def alternating_advantages(
    recipe: Recipe, sequences: int, device: torch.device
) -> torch.Tensor | None:
    """Stand-ins for the advantages of completions (sequences,); None for another task."""
    if recipe.task != "grpo":
        return None
    return 1.0 - 2.0 * (torch.arange(sequences, device=device) % 2)


def _scored(model: nn.Module, batch: TaskBatch, recipe: Recipe) -> ScoredBatch:
    """Run the passes of a micro-batch without gradients."""
    own = sampled = importance = by_reference = None
    with torch.no_grad():
        if recipe.generation_share:
            own = token_log_probs(model, batch)
            sampled = own.clone() if batch.sampled_log_probs is None else batch.sampled_log_probs
            difference = (own - sampled) * (batch.labels[:, 1:] != IGNORED)
            importance = difference.sum(1, keepdim=True).exp()
            importance = importance.masked_fill(importance > MOST_IMPORTANCE, 0.0)
        if recipe.reference is not None:
            by_reference = reference_token_log_probs(model, batch)
    return ScoredBatch(batch, own, sampled, importance, by_reference)


def _loss(log_probs: torch.Tensor, scored: ScoredBatch) -> torch.Tensor:
    """Sum of the losses of a micro-batch's tokens."""
    batch = scored.batch
    assert batch.advantages is not None
    ratios = (log_probs - (log_probs.detach() if scored.own is None else scored.own)).exp()
    by_reference, divergence = scored.by_reference, None
    if by_reference is not None:
        # In TRL's order, which decides that of autograd's sums: the update amplifies roundings.
        divergence = (by_reference - log_probs).exp() - (by_reference - log_probs) - 1
        divergence = divergence * ratios
    advantages = batch.advantages[:, None]
    clipped = ratios.clamp(1 - CLIP, 1 + CLIP)
    losses = -torch.min(ratios * advantages, clipped * advantages)
    if scored.importance is not None:
        losses = losses * scored.importance
    if divergence is not None:
        losses = losses + KL_WEIGHT * divergence
    return (losses * (batch.labels[:, 1:] != IGNORED)).sum()
