"""Losses of tasks, as TRL 1.16's trainers compute them with their default arguments."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn
from torch.nn import functional

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
        model: causal language model, with a fused head where the recipe's loss has one.
        batch: micro-batch.
        recipe: with task, loss and precision.
    """
    if recipe.task == "sft":
        return batch_loss(model, batch.tokens, batch.labels, recipe)
    return TASKS[recipe.task](model, batch)


def dpo_loss(model: nn.Module, batch: TaskBatch) -> torch.Tensor:
    """Sigmoid loss of DPO (2305.18290, equation 7), mean over the pairs."""
    log_ratios = sequence_log_probs(model, batch) - reference_log_probs(model, batch)
    chosen, rejected = log_ratios.chunk(2)
    return -functional.logsigmoid(BETA * (chosen - rejected)).mean()


def sequence_log_probs(model: nn.Module, batch: TaskBatch) -> torch.Tensor:
    """Sum of the log-probabilities of each sequence's labels, (sequences,)."""
    output = model(input_ids=batch.tokens, labels=batch.labels, fused_lm_head=True)
    # accelerate gives each forward pass an autocast of its own.
    torch.clear_autocast_cache()
    sums: torch.Tensor = output.log_probs.sum(1)
    return sums


def reference_log_probs(model: nn.Module, batch: TaskBatch) -> torch.Tensor:
    """Log-probabilities of each sequence under the reference, (sequences,)."""
    if batch.reference_log_probs is not None:
        return batch.reference_log_probs
    with torch.no_grad():
        if batch.reference is not None:
            return sequence_log_probs(batch.reference, batch)
        with model.disable_adapter():  # type: ignore[operator]
            return sequence_log_probs(model, batch)


TASKS: dict[Task, Callable[[nn.Module, TaskBatch], torch.Tensor]] = {"dpo": dpo_loss}
