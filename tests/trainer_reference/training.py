"""Training that the trainer and the project share: its size, and the trainer's record of it."""

from dataclasses import dataclass

import torch

from trainer_reference.cells import ReferenceCell

BATCH = 2
LENGTH = 64
RANK = 8
SEED = 0
LEARNING_RATE = 5e-5


def tokens_per_row(cell: ReferenceCell) -> int:
    """Tokens of a row of a batch: of an example, or of two that are packed."""
    return LENGTH if cell.packing is None else 2 * LENGTH


@dataclass(frozen=True, slots=True)
class TrainerRun:
    """Training by the trainer.

    Attributes:
        peak_bytes: most bytes of live tensors at once: weights, gradients, optimizer state,
            activations and the batches of the running optimizer step. The data set and batches
            prefetched for later steps are not counted, since on a GPU they stay on the host.
        losses: loss of each optimizer step, as the trainer logs it.
        batches: token ids (batch, length) of each micro-step, by optimizer step.
        initial: trained weights before the first step.
        reference_log_probs: precomputed log-probabilities of each micro-step's sequences, by
            optimizer step; absent without any.
        advantages, sampled_log_probs: those of each micro-step's completions, likewise.
        at_peak: storages alive at the peak (``PeakCounter.at_peak``).
    """

    peak_bytes: int
    losses: list[float]
    batches: list[list[torch.Tensor]]
    initial: dict[str, torch.Tensor]
    at_peak: list[tuple[int, int, str]]
    reference_log_probs: list[list[torch.Tensor]] | None = None
    advantages: list[list[torch.Tensor]] | None = None
    sampled_log_probs: list[list[torch.Tensor]] | None = None
