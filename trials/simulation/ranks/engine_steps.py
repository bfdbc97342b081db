"""Steps by DeepSpeed's engine, as they were traced."""

from collections.abc import Sequence

import numpy as np

from trials.simulation.recording import (
    IntArray,
    Kind,
    Purpose,
    Recording,
    Segment,
    Stream,
)

ENGINE_STEPS = {
    1: (Segment.ALONE_BEFORE, Segment.ALONE, Segment.ALONE_UPDATE),
    3: (
        Segment.ENGINE_BEFORE,
        Segment.ENGINE_FIRST,
        Segment.ENGINE_FURTHER,
        Segment.ENGINE_LAST,
        Segment.ENGINE_UPDATE,
    ),
}
"""Segments of a step by DeepSpeed's engine, by its micro-batches.

These differ in more than the sums of gradients, so that steps of one and of three are traced.
"""
BEFORE = (Segment.ALONE_BEFORE, Segment.ENGINE_BEFORE)
UPDATES = (Segment.ALONE_UPDATE, Segment.ENGINE_UPDATE)


def is_by_engine(recording: Recording) -> bool:
    """Whether a recording is of steps by DeepSpeed's engine."""
    return bool((recording.segments == Segment.ALONE).any())


def engine_steps(recordings: Sequence[Recording], micro_batches: int) -> list[Stream]:
    """One step at each batch size, after what the engine holds before it.

    More than one micro-batch are three. Two have the first and the last of them, and their memory
    is that of three.

    Args:
        recordings: recordings that differ in their numbers alone.
        micro_batches: forward and backward passes per step.
    """
    segments = ENGINE_STEPS[1 if micro_batches == 1 else 3]
    recording = recordings[0]
    chosen = np.isin(recording.segments, segments)
    kinds, labels = recording.kinds[chosen], recording.segments[chosen]
    is_named = kinds <= Kind.FREED
    old = np.unique(recording.names[chosen][is_named])
    names = recording.names[chosen].copy()
    names[is_named] = np.searchsorted(old, names[is_named])
    starts = np.searchsorted(labels, segments)
    return [
        Stream(
            kinds=kinds,
            names=names,
            segments=labels,
            numbers=one.numbers,
            rows=np.flatnonzero(chosen),
            purposes=_purposes(recording, old),
            parts_from=tuple(int(start) for start in starts[1:]),
            steady_from=int(starts[1]),
        )
        for one in recordings
    ]


def _purposes(recording: Recording, names: IntArray) -> IntArray:
    """Purposes of storages, (storages,), by their names; gradients count as activations."""
    made = recording.kinds == Kind.MADE
    owners = np.zeros(int(names.max(initial=-1)) + 1, np.int64)
    is_chosen = made & (recording.names <= names.max(initial=-1))
    owners[recording.names[is_chosen]] = recording.segments[is_chosen]
    purposes = np.full(len(names), int(Purpose.ACTIVATION))
    purposes[np.isin(owners[names], (*BEFORE, *UPDATES))] = Purpose.OPTIMIZER
    purposes[np.isin(names, recording.workspaces)] = Purpose.WORKSPACE
    return purposes
