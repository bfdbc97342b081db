"""Losses of preference tasks from the logits of all tokens, as LLaMA-Factory 0.9 computes them."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from trials.models.fused_head import IGNORED
from trials.training.loss import as_returned
from trials.training.tasks.batch import TaskBatch

BETA = 0.1


def dpo_loss_of_logits(
    model: nn.Module, batch: TaskBatch, arguments: dict[str, Any]
) -> tuple[torch.Tensor, Any]:
    """Sigmoid loss of DPO, mean over the pairs (llamafactory/train/dpo/trainer.py:248).

    The logits of the pass with gradients are alive through that of the reference.
    """
    output = all_logits(model, batch, arguments)
    log_probs = _log_probs(output.logits, batch)
    if batch.reference_log_probs is not None:
        of_reference = batch.reference_log_probs[:, 0]
    else:
        reference, without_adapters = _reference(model, batch)
        with torch.no_grad(), without_adapters:
            of_reference = _log_probs(all_logits(reference, batch, {}).logits, batch)
    chosen, rejected = (log_probs - of_reference).chunk(2)
    for part in output.logits.chunk(2):
        part.detach().mean()  # logged
    return -functional.logsigmoid(BETA * (chosen - rejected)).mean(), output


def kto_loss_of_logits(
    model: nn.Module, batch: TaskBatch, arguments: dict[str, Any]
) -> tuple[torch.Tensor, Any]:
    """Loss of KTO, mean over the examples (llamafactory/train/kto/trainer.py:183).

    Each example's sequence beside is that of another one, as in TRL; the first half is desirable.
    """
    beside = batch.beside()
    halves, log_probs, of_beside = _kto_passes(model, batch, beside, arguments)
    if batch.reference_log_probs is not None:
        beside_by_reference, by_reference = batch.reference_log_probs.unbind(1)
    else:
        reference, without_adapters = _reference(model, batch)
        with torch.no_grad(), without_adapters:
            _, by_reference, beside_by_reference = _kto_passes(reference, batch, beside, {})
    distance = (of_beside - beside_by_reference).mean().clamp(min=0)
    desirable = len(halves[0])
    log_ratios = log_probs - by_reference
    margins = log_ratios[:desirable] - distance, distance - log_ratios[desirable:]
    losses = torch.cat([1 - functional.sigmoid(BETA * margin) for margin in margins])
    for half in halves:
        half.detach().nansum()  # logged
    return losses.nanmean(), None


def reward_loss_of_values(
    model: nn.Module, batch: TaskBatch, arguments: dict[str, Any]
) -> tuple[torch.Tensor, Any]:
    """Loss of a reward model by the values of last tokens, mean over the pairs.

    The pass also computes the logits (llamafactory/train/rm/trainer.py:92).
    """
    output = all_logits(model, batch, arguments)
    mask = torch.ones_like(batch.tokens) if batch.mask is None else batch.mask
    last = mask.sum(dim=-1, keepdim=True) - 1
    chosen, rejected = output.values.gather(-1, last).squeeze(-1).chunk(2)
    return -functional.logsigmoid(chosen.float() - rejected.float()).mean(), output


def _kto_passes(
    model: nn.Module, batch: TaskBatch, beside: TaskBatch, arguments: dict[str, Any]
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]:
    """Run a batch, and without gradients the sequences beside it.

    Returns:
        Copies of the logits of desirable and of undesirable examples, the log-probabilities of
        the batch and of the sequences beside it (sequences,) each.
    """
    logits = all_logits(model, batch, arguments).logits
    log_probs = _log_probs(logits, batch)
    with torch.no_grad():
        of_beside = _log_probs(all_logits(model, beside, {}).logits, beside)
    order = torch.arange(len(logits), device=logits.device)
    desirable = (len(logits) + 1) // 2
    halves = tuple(logits[part] for part in (order[:desirable], order[desirable:]))
    return halves, log_probs, of_beside


def _reference(
    model: nn.Module, batch: TaskBatch
) -> tuple[nn.Module, AbstractContextManager[object]]:
    """Separate reference, or the model with a context that disables its adapters."""
    if batch.reference is not None:
        return batch.reference, nullcontext()
    return model, model.disable_adapter()  # type: ignore[operator]


def all_logits(model: nn.Module, batch: TaskBatch, arguments: dict[str, Any]) -> Any:
    """Output with logits, as accelerate returns it.

    The logits are (sequences, length, vocabulary) of a language model, (sequences, 1) of a reward
    model.
    """
    output = model(input_ids=batch.tokens, **batch.masked, **arguments)
    torch.clear_autocast_cache()
    return as_returned(output, is_autocast=torch.is_autocast_enabled(batch.tokens.device.type))


def _log_probs(logits: torch.Tensor, batch: TaskBatch) -> torch.Tensor:
    """Sum of the log-probabilities of each sequence's labels (sequences,), in fp32."""
    labels = batch.labels[:, 1:]
    has_loss = labels != IGNORED
    log_softmax = logits.float()[:, :-1].log_softmax(-1)
    of_labels = log_softmax.gather(2, labels.where(has_loss, 0)[..., None]).squeeze(2)
    return (of_labels * has_loss).sum(1)
