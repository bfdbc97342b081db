"""Losses of tasks, as TRL 1.16's trainers compute them with their default arguments."""

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from trials.models.fused_head import IGNORED, base_of
from trials.recipes.fields import Task
from trials.recipes.recipe import Recipe
from trials.training.loss import batch_loss, micro_batch_losses, router_inputs
from trials.training.tasks.all_logits import (
    all_logits,
    dpo_loss_of_logits,
    kto_loss_of_logits,
    reward_loss_of_values,
)
from trials.training.tasks.batch import TaskBatch
from trials.training.tasks.grpo import grpo_losses
from trials.training.tasks.log_probs import (
    output_with_log_probs,
    reference_token_log_probs,
    token_log_probs,
)

BETA = 0.1
LossOf = Callable[[nn.Module], torch.Tensor]


def step_losses(batch: TaskBatch, recipe: Recipe, micro_batches: int) -> Iterator[LossOf]:
    """Return the function of each micro-batch's loss; the losses add up to the step's.

    Args:
        batch: batch of the step.
        recipe: with task, loss and precision.
        micro_batches: number of parts, of equal size or with a smaller last one.
    """
    if recipe.task == "sft":
        return micro_batch_losses(batch, recipe, micro_batches)
    if recipe.task == "grpo":
        return grpo_losses(batch, recipe, micro_batches)

    def loss_of(part: TaskBatch, model: nn.Module) -> torch.Tensor:
        # transformers' Trainer divides by the number of micro-batches, even by one.
        return task_loss(model, part, recipe) / micro_batches

    return (partial(loss_of, part) for part in batch.parts(micro_batches))


def task_loss(model: nn.Module, batch: TaskBatch, recipe: Recipe) -> torch.Tensor:
    """Loss of a micro-batch.

    Args:
        model: causal language model, with a fused head where the recipe's loss has one; or a
            reward model.
        batch: micro-batch.
        recipe: with task, loss and precision.
    """
    if recipe.task == "sft":
        return batch_loss(model, batch, recipe)
    if recipe.task == "grpo":
        (loss_of,) = grpo_losses(batch, recipe, 1)
        return loss_of(model)
    of_task = OF_ALL_LOGITS if recipe.loss == "full-logits" else TASKS
    loss, output = of_task[recipe.task](model, batch, router_inputs(batch, recipe))
    if not recipe.router_loss:
        return loss
    config: Any = base_of(model).config
    with_router: torch.Tensor = loss + config.router_aux_loss_coef * output.aux_loss
    return with_router


def dpo_loss(
    model: nn.Module, batch: TaskBatch, arguments: dict[str, Any]
) -> tuple[torch.Tensor, Any]:
    """Sigmoid loss of DPO (2305.18290, equation 7), mean over the pairs, and the model's output.

    Args:
        model: model to train.
        batch: micro-batch.
        arguments: further arguments of the pass with gradients.
    """
    output = output_with_log_probs(model, batch, **arguments)
    log_probs = output.log_probs.sum(1)
    (of_reference,) = reference_log_probs(model, batch)
    log_ratios = log_probs - of_reference
    chosen, rejected = log_ratios.chunk(2)
    return -functional.logsigmoid(BETA * (chosen - rejected)).mean(), output


def kto_loss(
    model: nn.Module, batch: TaskBatch, arguments: dict[str, Any]
) -> tuple[torch.Tensor, Any]:
    """Loss of KTO (2402.01306, equation 7), mean over the examples; the first half is desirable.

    Each example's sequence beside is that of another one, whose log-probabilities estimate how far
    the model is from its reference. As in TRL, its passes come first.
    """
    beside = batch.beside()
    with torch.no_grad():
        distance = sequence_log_probs(model, beside)
    output = output_with_log_probs(model, batch, **arguments)
    log_ratios = output.log_probs.sum(1)
    of_beside, of_batch = reference_log_probs(model, beside, batch)
    distance = (distance - of_beside).mean().clamp(min=0)
    log_ratios = log_ratios - of_batch
    desirable = (len(log_ratios) + 1) // 2
    margins = log_ratios[:desirable] - distance, distance - log_ratios[desirable:]
    losses = torch.cat([1 - functional.sigmoid(BETA * margin) for margin in margins])
    return losses.nanmean(), output


def orpo_loss(
    model: nn.Module, batch: TaskBatch, arguments: dict[str, Any]
) -> tuple[torch.Tensor, Any]:
    """Loss of ORPO (2403.07691, equation 6), mean over the pairs."""
    output = all_logits(model, batch, arguments)
    logits = output.logits
    pairs, targets = len(logits) // 2, batch.labels[:, 1:]
    # The slices are TRL's: the backward pass of each allocates a gradient of its source.
    chosen = logits[:pairs][:, :-1].contiguous()
    likelihood = functional.cross_entropy(chosen.flatten(0, 1), targets[:pairs].flatten())
    has_loss = targets != IGNORED
    log_probs = label_log_probs(logits[:, :-1], targets.where(has_loss, 0))
    means = (log_probs * has_loss).sum(1) / has_loss.sum(1)
    for part in (logits[:pairs], logits[pairs:]):
        part[:, :-1].detach().mean()  # logged
    of_chosen, of_rejected = means[:pairs].float(), means[pairs:].float()
    odds = (of_chosen - of_rejected) - (_log1mexp(of_chosen) - _log1mexp(of_rejected))
    return likelihood - (BETA * functional.logsigmoid(odds)).mean(), output


def reward_loss(
    model: nn.Module, batch: TaskBatch, arguments: dict[str, Any]
) -> tuple[torch.Tensor, Any]:
    """Loss of a reward model (2203.02155, equation 1), mean over the pairs."""
    output = all_logits(model, batch, arguments)
    chosen, rejected = output.logits.squeeze(-1).chunk(2)
    return -functional.logsigmoid(chosen - rejected).mean(), output


def label_log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of labels (sequences, length), by TRL's function."""
    library: Any = importlib.import_module("trl.trainer.utils")
    log_probs: torch.Tensor = library.selective_log_softmax(logits, labels)
    return log_probs


def _log1mexp(x: torch.Tensor) -> torch.Tensor:
    """log(1 - exp(x)) without cancellation."""
    return torch.where(x < -math.log(2), torch.log1p(-torch.exp(x)), torch.log(-torch.expm1(x)))


def sequence_log_probs(model: nn.Module, batch: TaskBatch) -> torch.Tensor:
    """Sum of the log-probabilities of each sequence's labels, (sequences,)."""
    return token_log_probs(model, batch).sum(1)


def precomputed_log_probs(
    recipe: Recipe, sequences: int, device: torch.device
) -> torch.Tensor | None:
    """Stand-ins for precomputed log-probabilities (sequences, passes); None for another recipe."""
    if recipe.reference != "precomputed":
        return None
    return torch.zeros(sequences, PASSES[recipe.task], device=device)


def reference_log_probs(model: nn.Module, *batches: TaskBatch) -> Sequence[torch.Tensor]:
    """Log-probabilities of each batch's sequences under the reference, (sequences,) each."""
    first = batches[0]
    if first.reference_log_probs is not None:
        return first.reference_log_probs.unbind(1)
    return [reference_token_log_probs(model, batch).sum(1) for batch in batches]


TaskLoss = Callable[[nn.Module, TaskBatch, dict[str, Any]], tuple[torch.Tensor, Any]]
TASKS: dict[Task, TaskLoss] = {
    "dpo": dpo_loss,
    "kto": kto_loss,
    "orpo": orpo_loss,
    "reward": reward_loss,
}
OF_ALL_LOGITS: dict[Task, TaskLoss] = {
    "dpo": dpo_loss_of_logits,
    "kto": kto_loss_of_logits,
    "orpo": orpo_loss,
    "reward": reward_loss_of_values,
}
PASSES: dict[Task, int] = {"dpo": 1, "kto": 2}
"""Forward passes of a reference."""
