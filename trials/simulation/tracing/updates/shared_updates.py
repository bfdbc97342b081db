"""Updates of one step put into another that has the same parameters and optimizer.

A trace of a large model with adapters spends most of its time in the updates, which no batch size,
length, checkpointing, attention or loss changes.
"""

from enum import Enum, auto
from typing import Any

import numpy as np

from trials.simulation.recording import (
    Column,
    FloatArray,
    IntArray,
    Kind,
    Recording,
    Segment,
    StructureError,
)


class Updates(Enum):
    """Part of the updates that a trace has."""

    TRACED = auto()
    SHARED = auto()
    """The frees after them, so that those of another step can be put before these."""
    DROPPED = auto()
    """Neither, where the rest of another step with the same structure is taken."""

    @property
    def traced(self) -> tuple[Segment, ...]:
        """Segments of the updates to trace."""
        return (Segment.FIRST_UPDATE, Segment.UPDATE) if self is Updates.TRACED else ()


def with_shared_updates(recording: Recording, other: Recording) -> Recording:
    """Insert the updates of another step, with its storages named after those of this one.

    Args:
        recording: step without updates, but with the frees that follow them.
        other: step with updates, whose gradients are those of this one.

    Raises:
        StructureError: the gradients differ, or an update frees what is no gradient.
    """
    end, their_end = _names_before_updates(recording), _names_before_updates(other)
    if not np.array_equal(_gradient_bytes(recording), _gradient_bytes(other)):
        raise StructureError("the step has other gradients")
    renamed = np.full(their_end, -1)
    renamed[_gradients(other)] = _gradients(recording)
    chosen = (other.segments == Segment.FIRST_UPDATE) | (other.segments == Segment.UPDATE)
    names, is_named = other.names[chosen], other.kinds[chosen] <= Kind.FREED
    is_earlier = is_named & (names < their_end)
    names = np.where(is_named & ~is_earlier, names - their_end + end, names)
    names[is_earlier] = renamed[names[is_earlier]]
    if (names < 0).any() or _left(recording) != _left(other):
        raise StructureError("an update frees what is no gradient")
    made = int((other.kinds[chosen] == Kind.MADE).sum())
    own = recording.segments < Segment.FIRST_UPDATE
    after = recording.names[~own]
    after = after + made * ((recording.kinds[~own] <= Kind.FREED) & (after >= end))
    workspaces = other.workspaces[(their_end <= other.workspaces)]
    workspaces = workspaces[workspaces < their_end + made] - their_end + end

    def joined(field: str) -> Any:
        column = getattr(recording, field)
        return np.concatenate([column[own], getattr(other, field)[chosen], column[~own]])

    return Recording(
        kinds=joined("kinds"),
        names=np.concatenate([recording.names[own], names, after]),
        segments=joined("segments"),
        numbers=joined("numbers"),
        ghosts=recording.ghosts,
        gradients=recording.gradients,
        workspaces=np.concatenate([recording.workspaces, workspaces]),
    )


def _names_before_updates(recording: Recording) -> int:
    """Number of storages made before the updates, gradients of untraced parameters among them."""
    made = (recording.kinds == Kind.MADE) & (recording.segments < Segment.FIRST_UPDATE)
    last = recording.names[made].max(initial=-1), recording.ghosts[:, 0].max(initial=-1)
    return int(max(last)) + 1


def _gradients(recording: Recording) -> IntArray:
    """Names of all gradients, those of untraced parameters last."""
    names: IntArray = np.r_[recording.gradients, recording.ghosts[:, 0]]
    return names


def _gradient_bytes(recording: Recording) -> FloatArray:
    """Bytes of each gradient, (gradients,)."""
    made = recording.kinds == Kind.MADE
    sizes = np.zeros(1 + max(int(recording.names[made].max(initial=-1)), 0))
    sizes[recording.names[made]] = recording.numbers[made, Column.BYTES]
    traced: FloatArray = sizes[np.r_[recording.gradients, recording.ghosts[:, 1]]]
    return traced


def _left(recording: Recording) -> int:
    """Storages of the forward and backward pass, beside gradients, that outlive the updates."""
    end = _names_before_updates(recording)
    freed = (recording.kinds == Kind.FREED) & (recording.segments == Segment.FORGET)
    names = recording.names[freed]
    return int(((names < end) & ~np.isin(names, _gradients(recording))).sum())
