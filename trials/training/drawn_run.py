"""Steps through batches of drawn lengths, for their memory alone."""

from collections.abc import Callable, Iterator, Sequence

import torch

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
    batches = _batches(tuning, request.batch_size, request.lengths)
    device.settle()
    steps = [batches[at : at + per_step] for at in range(0, len(batches), per_step)]
    left: Iterator[list[torch.Tensor]] = iter(steps)
    readings: list[MemoryReading] = []

    def step() -> None:
        tuning.step_of(next(left))

    def note(reading: MemoryReading) -> None:
        readings.append(reading)
        after_step(readings)

    device.measure_memory(step, steps=len(steps), already_live=tuning.tensors(), after_step=note)


def _batches(tuning: FineTuning, batch_size: int, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Token ids of each micro-batch, (sequences, length), on the host."""
    rows = tuning.tokens(batch_size)[: batch_size * tuning.sequences].cpu()
    # A single token has no loss.
    return [rows[:, : max(length, 2)].roll(draw, 0) for draw, length in enumerate(lengths)]
