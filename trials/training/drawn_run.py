"""Steps through batches of drawn lengths, for their memory alone."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trials.devices.device import Device
from trials.records.messages import ProbeRequest
from trials.records.observation import MemoryReading
from trials.training.finetune import FineTuning

Peaks = Callable[[Sequence[MemoryReading]], None]
MICRO_BATCHES = 2  # a third micro-batch of a step takes the memory of the second


def run_drawn_lengths(
    tuning: FineTuning,
    device: Device,
    request: ProbeRequest,
    micro_batches: int,
    after_step: Peaks,
) -> None:
    """Run whole optimizer steps on micro-batches of these lengths, to measure their memory.

    Args:
        tuning: model under its recipe, at its initial weights.
        device: device of the model.
        request: with the batch size and the lengths.
        micro_batches: micro-batches per step; two stand for more.
        after_step: called after each step with the memory of all steps until then.

    Raises:
        DeviceOutOfMemoryError: as ``Device.measure_memory``.
    """
    per_step = min(micro_batches, MICRO_BATCHES)
    batches = _batches(tuning, request)
    device.settle()
    steps = [batches[at : at + per_step] for at in range(0, len(batches), per_step)]
    left = iter(steps)
    readings: list[MemoryReading] = []

    def step() -> None:
        tuning.step_of(next(left))

    def note(reading: MemoryReading) -> None:
        readings.append(reading)
        after_step(readings)

    device.measure_memory(step, steps=len(steps), already_live=tuning.tensors(), after_step=note)


def _batches(tuning: FineTuning, request: ProbeRequest) -> list[tuple[Tensor, Tensor | None]]:
    """Token ids of each micro-batch, (sequences, length), and its mask, on the host.

    The last sequence of a padded micro-batch is a token shorter.
    """
    rows = tuning.tokens(request.batch_size)[: request.batch_size * tuning.sequences].cpu()
    batches = []
    padded = request.padded or (False,) * len(request.lengths)
    for draw, (length, is_padded) in enumerate(zip(request.lengths, padded, strict=True)):
        tokens = rows[:, : max(length, 2)].roll(draw, 0)  # a single token has no loss
        mask = torch.ones_like(tokens) if is_padded else None
        if mask is not None:
            mask[-1, -1] = 0
        batches.append((tokens, mask))
    return batches
