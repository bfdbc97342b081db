"""Simulated log-probabilities of labels, by the buffers and work of TRL's kernel on a GPU.

Source: TRL 1.16.0, ``trl/kernels/logprob_entropy.py``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trials.simulation.recording import OperatorClass, Rate
from trials.simulation.tracing.operator_costs import (
    DeclaredKernel,
    Described,
    declare,
    moved_bytes,
)


def _log_probs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # noqa: ARG001 - the operator's signature
    """Log-probabilities, entropies, normalisers and expected logits, of each token."""
    rows = logits.shape[:-1]
    return tuple(logits.new_empty(rows, dtype=torch.float32) for _ in range(4))  # type: ignore[return-value]


def _log_probs_backward(logits: Tensor, labels: Tensor, log_z: Tensor, grad: Tensor) -> Tensor:  # noqa: ARG001 - as above
    return logits.new_empty(logits.shape)


def _work(args: Sequence[Any], result: Any) -> list[Described]:
    numbers = (float(moved_bytes(args, result)), 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
    return [(OperatorClass.MEMORY, Rate.BF16, numbers)]


declare(
    "label_log_probs(Tensor logits, Tensor labels) -> (Tensor, Tensor, Tensor, Tensor)",
    _log_probs,
    DeclaredKernel(_work),
)
declare(
    "label_log_probs_backward(Tensor logits, Tensor labels, Tensor log_z, Tensor grad) -> Tensor",
    _log_probs_backward,
    DeclaredKernel(_work),
)


class _LabelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        log_probs, _, log_z, expected = torch.ops.simulated.label_log_probs(logits, labels)
        ctx.save_for_backward(logits, labels, log_z, expected)
        return log_probs  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        logits, labels, log_z, _ = ctx.saved_tensors
        grad = grads[0].contiguous()
        return torch.ops.simulated.label_log_probs_backward(logits, labels, log_z, grad), None


def simulated_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probabilities of labels (sequences, length) as TRL's kernel computes them."""
    return _LabelLogProbs.apply(logits, labels)  # type: ignore[no-any-return,no-untyped-call]
