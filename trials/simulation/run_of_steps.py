"""Runs of steps on examples of varying length, from traces at two or three lengths."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from trials.drawn_lengths import DrawnBatch
from trials.simulation.memory.streams import Moves
from trials.simulation.recording import IntArray, StructureError, with_updates_of
from trials.simulation.trace_cache import StepTrace
from trials.simulation.whole_step import Steps, interpolated


class RunOfSteps:
    """Steps of a whole model, each micro-batch of which has a length of its own.

    Args:
        traces: traces of a cell by tokens per example.
        micro_batches: forward and backward passes per step. A third is like the second, so a step
            has at most two here.
        padded: traces of padded batches, whose mask lets attention run other operators; empty for
            those of others.

    Attributes:
        held: storages of the model itself.

    Raises:
        StructureError: the traces at several lengths differ in more than numbers, or those of
            padded batches leave other storages behind.
    """

    def __init__(
        self,
        traces: Mapping[int, StepTrace],
        micro_batches: int = 1,
        padded: Mapping[int, StepTrace] | None = None,
    ) -> None:
        self._micro_batches = min(micro_batches, 2)
        self._plain = _StepsAtLengths(traces, self._micro_batches)
        self._padded = _StepsAtLengths(padded, self._micro_batches) if padded else self._plain
        self._padded.rename_like(self._plain)
        self.held = self._plain.steps.held

    def moves(self, batch_size: int, batches: Sequence[DrawnBatch]) -> Moves:
        """Allocations and frees of storages in the steps of a run.

        Args:
            batch_size: examples per micro-batch.
            batches: lengths of each micro-batch, in order.
        """
        sizes = {
            batch: self._steps_of(batch).sizes(batch_size, batch.tokens) for batch in set(batches)
        }
        parts = self._parts(batches)
        names = [self._steps_of(batch).names[part] for part, batch in parts]
        streams = [self._steps_of(batch).steps.streams[part] for part, batch in parts]
        return Moves(
            names=np.concatenate(names),
            sizes=np.concatenate([sizes[batch][part] for part, batch in parts]),
            streams=np.concatenate(streams),
        )

    def _steps_of(self, batch: DrawnBatch) -> "_StepsAtLengths":
        return self._padded if batch.is_padded else self._plain

    def _parts(self, batches: Sequence[DrawnBatch]) -> list[tuple[slice, DrawnBatch]]:
        """Events of each micro-batch and each update, and the batch of their numbers."""
        parts_of_step = self._micro_batches + 1
        parts = []
        for number, batch in enumerate(batches):
            step, micro_batch = divmod(number, self._micro_batches)
            at = min(step, 1) * parts_of_step + micro_batch
            is_last = micro_batch == self._micro_batches - 1
            of_steps = self._steps_of(batch).steps.parts
            parts += [(part, batch) for part in of_steps[at : at + 1 + is_last]]
        return parts


class _StepsAtLengths:
    """Steps of batches that run the same operators at any length.

    Sizes are polynomials of the length, as of the batch size: of the first degree, or of the second
    where masks or attention scores are held. So two or three lengths determine all others.

    Attributes:
        steps: steps at the first length.
        names: (events,) names of the storages allocated and freed.
    """

    def __init__(self, traces: Mapping[int, StepTrace], micro_batches: int) -> None:
        self._lengths = tuple(traces)
        first, *_ = traces.values()
        alike = [
            tuple(with_updates_of(r, first.recordings[0]) for r in trace.recordings)
            for trace in traces.values()
        ]
        self._steps = [
            Steps(replace(trace, recordings=recordings), micro_batches)
            for trace, recordings in zip(traces.values(), alike, strict=True)
        ]
        self._traced = first.batch_sizes[0]
        self.steps = self._steps[0]
        self.names = self.steps.names

    def sizes(self, batch_size: int, tokens: int) -> IntArray:
        """Bytes of each event's storage, (events,), negative where freed."""
        numbers = zip(*(steps.numbers(batch_size) for steps in self._steps), strict=True)
        return self.steps.sizes(*(interpolated(self._lengths, n, tokens) for n in numbers))

    def rename_like(self, other: "_StepsAtLengths") -> None:
        """Give names apart from another's, but for storages that a part of either may free.

        These are the optimizer's state, and gradients to which a later micro-batch adds its own.
        Both make them in the same order.

        Raises:
            StructureError: they are of other sizes.
        """
        if other is self:
            return
        own_sizes, lasting = self._lasting()
        other_sizes, lasting_there = other._lasting()  # noqa: SLF001 - of the same class
        if not np.array_equal(own_sizes, other_sizes):
            raise StructureError("the step leaves other storages behind with padded examples")
        renamed = np.arange(int(self.names.max(initial=-1)) + 1) + int(other.names.max()) + 1
        renamed[lasting] = lasting_there
        self.names = renamed[self.names]

    def _lasting(self) -> tuple[IntArray, IntArray]:
        """Sizes and names of the storages that outlive their part, in the order of their making.

        Those of a step's last micro-batch are left out: its own update frees them, its mask too.
        """
        _, sizes = self.steps.storages(self._traced)
        lasting = []
        parts_of_step = len(self.steps.parts) // 2
        for number, part in enumerate(self.steps.parts):
            if number % parts_of_step == parts_of_step - 2:
                continue
            names, signs = self.steps.names[part], np.sign(sizes[part])
            made, freed = names[signs > 0], names[signs < 0]
            lasting.append(part.start + np.flatnonzero(signs > 0)[~np.isin(made, freed)])
        at = np.concatenate(lasting)
        return sizes[at], self.steps.names[at]
