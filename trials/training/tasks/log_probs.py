"""Log-probabilities of labels, by a model with a fused head and by its reference."""

from typing import Any

import torch
from torch import nn

from trials.training.tasks.batch import TaskBatch


def output_with_log_probs(model: nn.Module, batch: TaskBatch, **arguments: Any) -> Any:
    """Output with the log-probabilities of each sequence's labels, (sequences, length - 1)."""
    inputs = {"input_ids": batch.tokens, "labels": batch.labels} | batch.masked | arguments
    output = model(**inputs, fused_lm_head=True)
    # accelerate gives each forward pass an autocast of its own.
    torch.clear_autocast_cache()
    return output


def token_log_probs(model: nn.Module, batch: TaskBatch) -> torch.Tensor:
    """Log-probabilities of each sequence's labels, (sequences, length - 1)."""
    log_probs: torch.Tensor = output_with_log_probs(model, batch).log_probs
    return log_probs


def reference_token_log_probs(model: nn.Module, batch: TaskBatch) -> torch.Tensor:
    """Log-probabilities (sequences, length - 1) by the separate reference, or without adapters."""
    with torch.no_grad():
        if batch.reference is not None:
            return token_log_probs(batch.reference, batch)
        with model.disable_adapter():  # type: ignore[operator]
            return token_log_probs(model, batch)
