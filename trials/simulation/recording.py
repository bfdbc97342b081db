"""What a traced step did, as columns of numbers: storages made and freed, operators run. No torch.

An operator's numbers (``Column``) and a storage's bytes are what depends on the batch; the order of
events, the names of storages and the kinds of operators do not. So two traces of one structure,
at two batch sizes, tell every other: each number is affine in the batch size.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Numbers = tuple[float, ...]  # of one event, by Column


class Kind(IntEnum):
    """What an event is."""

    MADE = 0
    """A storage was allocated; its bytes are in ``Column.BYTES``."""
    FREED = 1
    """A storage was let go."""
    RUN = 2
    """An operator ran."""
    WAITED = 3
    """The host waited for the device."""


class Column(IntEnum):
    """The numbers of an event."""

    BYTES = 0
    """Of a storage: its size. Of an operator: what it reads and writes of the device's memory."""
    FLOPS = 1
    """Of a dequantisation: the weights."""
    ROWS = 2
    """Of a matrix product (rows, inner) x (inner, columns); zero for other operators."""
    INNER = 3
    COLUMNS = 4
    PRODUCTS = 5
    """Matrix products in one operator: of a batch, or of a group."""
    LAUNCHES = 6
    """Kernels that the host launches for it."""


class OperatorClass(IntEnum):
    """What an operator is to the device's clock."""

    VIEW = 0
    """Only the host has work with it."""
    MATRIX_PRODUCT = 1
    ATTENTION_FORWARD = 2
    ATTENTION_BACKWARD = 3
    DEQUANTISATION = 4
    SCAN = 5
    """Mamba's selective scan, forward or backward."""
    UPDATE = 6
    """The optimizer's."""
    MEMORY = 7
    """Everything else: bound by memory."""
    GROUPED_PRODUCT = 8
    """The experts' matrix products in one operator: one kernel where the GPU has it."""


class Rate(IntEnum):
    """Which of the device's rates an operator's FLOPs run at."""

    BF16 = 0
    FP16 = 1
    FP32 = 2


class Segment(IntEnum):
    """A stretch of the step. The layers between BEFORE and HEAD repeat: three turns are traced."""

    BEFORE = 0
    FORWARD_1 = 1
    FORWARD_2 = 2
    FORWARD_3 = 3
    HEAD = 4
    """What follows the last turn, up to the loss."""
    HEAD_BACKWARD = 5
    BACKWARD_3 = 6
    BACKWARD_2 = 7
    BACKWARD_1 = 8
    AFTER = 9
    """The backward pass of what comes before the first turn."""
    FIRST_UPDATE = 10
    """The optimizer's first: it makes its state."""
    UPDATE = 11
    FORGET = 12
    """The loss and the gradients are let go."""


TURN = {
    Segment.FORWARD_1: 1,
    Segment.FORWARD_2: 2,
    Segment.FORWARD_3: 3,
    Segment.BACKWARD_1: 1,
    Segment.BACKWARD_2: 2,
    Segment.BACKWARD_3: 3,
}
"""Which of the three traced turns a segment is of."""
FORWARD = (Segment.FORWARD_1, Segment.FORWARD_2, Segment.FORWARD_3)
BACKWARD = (Segment.BACKWARD_1, Segment.BACKWARD_2, Segment.BACKWARD_3)
UPDATES = (Segment.FIRST_UPDATE, Segment.UPDATE, Segment.FORGET)


class StructureError(ValueError):
    """What was traced does not repeat as it must to be told from a part."""


class RepeatError(StructureError):
    """The turns that were traced differ, so that none of them can stand for others."""


class Purpose(IntEnum):
    """What a storage is for."""

    ACTIVATION = 0
    WORKSPACE = 1
    GRADIENT = 2
    OPTIMIZER = 3
    HEAD = 4
    """Logits, loss and what is worked out from them."""
    CHECKPOINT = 5
    """What the layers keep for the backward pass."""
    WEIGHT = 6
    QUANTISATION = 7
    """Constants of the 4-bit weights."""
    LIBRARY = 8
    """cuBLAS' workspace."""


@dataclass(frozen=True, slots=True)
class Recording:
    """One traced step, event by event, and the two updates that follow it.

    Attributes:
        kinds: (events,) of ``Kind``.
        names: (events,) the storage of MADE and FREED, counted from 0; of RUN its class of operator
            and its ``Rate`` (``4 * work + rate``).
        segments: (events,) of ``Segment``.
        numbers: (events, columns) by ``Column``.
        ghosts: (ghosts, 3): storages that stand for the gradients of layers not traced: their name,
            the storage of the second turn that they are like, and of which copy of it (from 1).
        gradients: storages that are gradients.
        workspaces: storages that are workspace within an operator.
    """

    kinds: IntArray
    names: IntArray
    segments: IntArray
    numbers: FloatArray
    ghosts: IntArray
    gradients: IntArray
    workspaces: IntArray


@dataclass(frozen=True, slots=True)
class Held:
    """What is on the device before the first step, and stays.

    Attributes:
        sizes: (storages,) bytes, in the order they are made.
        purposes: (storages,) of ``Purpose``.
        turns: (storages,) of which traced turn; 0 for none.
    """

    sizes: IntArray
    purposes: IntArray
    turns: IntArray


@dataclass(frozen=True, slots=True)
class Stream:
    """A whole step of the whole model at one batch size.

    Attributes:
        kinds, names, numbers: as of a recording; storages are named anew, each but once.
        segments: of which segment each event is.
        purposes: (storages,) of ``Purpose``.
        steady_from: the first event of the second step; the first makes the optimizer's state.
    """

    kinds: IntArray
    names: IntArray
    numbers: FloatArray
    segments: IntArray
    purposes: IntArray
    steady_from: int


@dataclass(frozen=True, slots=True)
class Operators:
    """What a step runs, and where the host waits, in order.

    Attributes:
        kinds, names, numbers, segments: as of a recording, of RUN and WAITED alone.
    """

    kinds: IntArray
    names: IntArray
    numbers: FloatArray
    segments: IntArray


def _structure(recording: Recording, part: np.ndarray) -> tuple[IntArray, IntArray, IntArray]:
    """Kinds, segments and names of a part; what is let go in a row in the order of the names."""
    kinds, names, segments = (
        column[part] for column in (recording.kinds, recording.names, recording.segments)
    )
    freed = kinds == Kind.FREED
    runs = np.cumsum(~freed | np.r_[True, ~freed[:-1]])
    order = np.lexsort((np.where(freed, names, 0), runs))
    return kinds, segments, names[order]


def with_updates_of(recording: Recording, other: Recording) -> Recording:
    """A recording whose updates are those of another one, and what is let go after them.

    What is let go at one moment may go in another order (autocast keeps its casts by address): the
    order is that of the other, too.

    Raises:
        StructureError: the two differ in more than numbers before that.
    """
    own = recording.segments < Segment.FIRST_UPDATE
    theirs = other.segments < Segment.FIRST_UPDATE
    for mine, same in zip(_structure(recording, own), _structure(other, theirs), strict=True):
        if not np.array_equal(mine, same):
            raise StructureError("the step is another one at another batch size or length")

    def joined(field: str) -> Any:
        return np.concatenate([getattr(recording, field)[own], getattr(other, field)[~theirs]])

    return Recording(
        kinds=joined("kinds"),
        names=other.names,
        segments=joined("segments"),
        numbers=joined("numbers"),
        ghosts=other.ghosts,
        gradients=other.gradients,
        workspaces=other.workspaces,
    )
