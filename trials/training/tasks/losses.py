"""Losses of tasks, as TRL 1.16's trainers compute them with their default arguments."""

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from trials.models.fused_head import IGNORED
from trials.recipes.fields import Task
from trials.recipes.recipe import Recipe
from trials.training.loss import batch_loss, micro_batch_losses
from trials.training.tasks.batch import TaskBatch

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
        return micro_batch_losses(batch.tokens, batch.labels, recipe, micro_batches)

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
        return batch_loss(model, batch.tokens, batch.labels, recipe)
    return TASKS[recipe.task](model, batch)


def dpo_loss(model: nn.Module, batch: TaskBatch) -> torch.Tensor:
    """Sigmoid loss of DPO (2305.18290, equation 7), mean over the pairs."""
    log_probs = sequence_log_probs(model, batch)
    (of_reference,) = reference_log_probs(model, batch)
    log_ratios = log_probs - of_reference
    chosen, rejected = log_ratios.chunk(2)
    return -functional.logsigmoid(BETA * (chosen - rejected)).mean()


def kto_loss(model: nn.Module, batch: TaskBatch) -> torch.Tensor:
    """Loss of KTO (2402.01306, equation 7), mean over the examples; the first half is desirable.

    Each example's sequence beside is that of another one, whose log-probabilities estimate how far
    the model is from its reference. As in TRL, its passes come first.
    """
    beside = replace(batch, tokens=batch.tokens.roll(1, 0), labels=batch.labels.roll(1, 0))
    with torch.no_grad():
        distance = sequence_log_probs(model, beside)
    log_ratios = sequence_log_probs(model, batch)
    of_beside, of_batch = reference_log_probs(model, beside, batch)
    distance = (distance - of_beside).mean().clamp(min=0)
    log_ratios = log_ratios - of_batch
    desirable = (len(log_ratios) + 1) // 2
    margins = log_ratios[:desirable] - distance, distance - log_ratios[desirable:]
    return torch.cat([1 - functional.sigmoid(BETA * margin) for margin in margins]).nanmean()


def orpo_loss(model: nn.Module, batch: TaskBatch) -> torch.Tensor:
    """Loss of ORPO (2403.07691, equation 6), mean over the pairs."""
    logits = all_logits(model, batch.tokens)
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
    return likelihood - (BETA * functional.logsigmoid(odds)).mean()


def reward_loss(model: nn.Module, batch: TaskBatch) -> torch.Tensor:
    """Loss of a reward model (2203.02155, equation 1), mean over the pairs."""
    chosen, rejected = all_logits(model, batch.tokens).squeeze(-1).chunk(2)
    return -functional.logsigmoid(chosen - rejected).mean()


def all_logits(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Logits, in fp32 under autocast as accelerate returns them.

    Returns:
        (sequences, length, vocabulary) of a language model, (sequences, 1) of a reward model.
    """
    logits: torch.Tensor = model(input_ids=tokens).logits
    torch.clear_autocast_cache()
    return logits.float() if torch.is_autocast_enabled(logits.device.type) else logits


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
    output = model(input_ids=batch.tokens, labels=batch.labels, fused_lm_head=True)
    # accelerate gives each forward pass an autocast of its own.
    torch.clear_autocast_cache()
    sums: torch.Tensor = output.log_probs.sum(1)
    return sums


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
    with torch.no_grad():
        if first.reference is not None:
            return [sequence_log_probs(first.reference, batch) for batch in batches]
        with model.disable_adapter():  # type: ignore[operator]
            return [sequence_log_probs(model, batch) for batch in batches]


TASKS: dict[Task, Callable[[nn.Module, TaskBatch], torch.Tensor]] = {
    "dpo": dpo_loss,
    "kto": kto_loss,
    "orpo": orpo_loss,
    "reward": reward_loss,
}
PASSES: dict[Task, int] = {"dpo": 1, "kto": 2}
"""Forward passes of a reference."""
