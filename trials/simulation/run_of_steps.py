"""Runs of steps on examples of varying length, from traces at two or three lengths."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from trials.simulation.memory.streams import Moves
from trials.simulation.recording import with_updates_of
from trials.simulation.trace_cache import StepTrace
from trials.simulation.whole_step import Steps, interpolated


class RunOfSteps:
    """Steps of a whole model, each micro-batch of which has a length of its own.

    Sizes are polynomials of the length, as of the batch size: of the first degree, or of the second
    where attention scores are held. So traces at two or three lengths determine all others.

    Args:
        traces: traces of a cell by tokens per example.
        micro_batches: forward and backward passes per step. A third is like the second, so a step
            has at most two here.

    Attributes:
        held: storages of the model itself.

    Raises:
        StructureError: the traces differ in more than numbers.
    """

    def __init__(self, traces: Mapping[int, StepTrace], micro_batches: int = 1) -> None:
        self._lengths = tuple(traces)
        self._micro_batches = min(micro_batches, 2)
        first = next(iter(traces.values())).recordings[0]
        self._steps = []
        for trace in traces.values():
            alike = tuple(with_updates_of(recording, first) for recording in trace.recordings)
            self._steps.append(Steps(replace(trace, recordings=alike), micro_batches))
        self.held = self._steps[0].held

    def moves(self, batch_size: int, tokens: Sequence[int]) -> Moves:
        """Allocations and frees of storages in the steps of a run.

        Args:
            batch_size: examples per micro-batch.
            tokens: tokens per example of each micro-batch, in order.
        """
        numbers = list(zip(*(s.numbers(batch_size) for s in self._steps), strict=True))
        steps = self._steps[0]
        sizes = {
            length: steps.sizes(*(interpolated(self._lengths, n, length) for n in numbers))
            for length in set(tokens)
        }
        names, apart = steps.names, steps.on_copy_stream
        parts = self._parts(tokens)
        return Moves(
            names=np.concatenate([names[part] for part, _ in parts]),
            sizes=np.concatenate([sizes[length][part] for part, length in parts]),
            on_copy_stream=np.concatenate([apart[part] for part, _ in parts]),
        )

    def _parts(self, tokens: Sequence[int]) -> list[tuple[slice, int]]:
        """Events of each micro-batch and each update, and the length of their numbers."""
        parts_of_step = self._micro_batches + 1
        parts = []
        for number, length in enumerate(tokens):
            step, micro_batch = divmod(number, self._micro_batches)
            at = min(step, 1) * parts_of_step + micro_batch
            is_last = micro_batch == self._micro_batches - 1
            parts += [(part, length) for part in self._steps[0].parts[at : at + 1 + is_last]]
        return parts
