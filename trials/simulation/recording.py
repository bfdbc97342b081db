"""Recordings of traced steps: storages made and freed, operators run. No torch.

Only an operator's numbers (``Column``) and a storage's bytes depend on the batch size, and both are
affine in it, but for tiles (``TileColumn``); the order of events, the names of storages and the
classes of operators are constant. So two traces at two batch sizes determine all others.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from gpu_catalog.links.within_nodes import CollectiveName

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Numbers = tuple[float, ...]  # numbers of one event, in the order of Column


class Kind(IntEnum):
    """Kind of an event."""

    MADE = 0
    """A storage was allocated; its bytes are in ``Column.BYTES`` and ``TileColumn``."""
    FREED = 1
    """A storage was freed."""
    RUN = 2
    """An operator ran."""
    WAITED = 3
    """The host waited for the device."""
    ACCUMULATED = 4
    """A gradient was handed to its parameter: later micro-batches add it to the first one's."""
    STREAM = 5
    """A stream was marked or waited for the other one; ``Wait`` is the name."""
    DROPPED = 6
    """Something that held a gradient beside its parameter let it go: a later micro-batch's, which
    is otherwise freed as it is added, is freed here."""
    ADDED_ON_HOST = 7
    """A gradient was copied to the host, which waits for that of a later micro-batch to add it."""


class Wait(IntEnum):
    """Marks and waits of the stream of the computation and that of copies to and from the host.

    Each stream waits for the marks of the other one in their order.
    """

    HOST = 0
    """The host waited for the device."""
    COMPUTE_MARKED = 1
    COPIES_MARKED = 2
    COMPUTE_FOR_MARK = 3
    COPIES_FOR_MARK = 4
    COMPUTE_FOR_COPIES = 5
    COPIES_FOR_COMPUTE = 6


class Column(IntEnum):
    """The numbers of an event."""

    BYTES = 0
    """Size of a storage; bytes of device memory that an operator reads and writes."""
    FLOPS = 1
    """Floating-point operations; for a dequantisation, the number of weights."""
    ROWS = 2
    """Rows of a matrix product (rows, inner) x (inner, columns), such as attention's of queries and
    keys, or of an operator that works on rows or single elements (``clock.moving``); else zero."""
    INNER = 3
    """Inner dimension of a product; bytes of a row that another operator reads more than once."""
    COLUMNS = 4
    """Columns of a product; elements of a row."""
    PRODUCTS = 5
    """Matrix products in one operator, batched or grouped; heads of all examples of attention."""
    LAUNCHES = 6
    """Kernels that the host launches for the operator."""


class TileColumn(IntEnum):
    """Further numbers of a storage whose operator works on a tile of its rows at a time.

    They are zero for all other storages. The storage's bytes are those of ``Column.BYTES`` and of
    the tile, which alone is not affine in the batch size.
    """

    ROW_BYTES = 1
    """Bytes of one row of the tile."""
    ROWS = 2
    """Rows of the operator."""
    PARTS = 3
    """Parts that divide the rows, each rounded up to a power of two; 0 for no division."""
    MOST_ROWS = 4
    """Most rows of the tile where no parts divide them."""


STREAM = 5
"""Column of a new storage: number of the stream that allocates it."""
COMPUTE_STREAM, COPY_STREAM = 0, 1
"""Streams of the computation, and of copies to and from the host. Those of collectives follow."""


def tile_bytes(numbers: FloatArray) -> FloatArray:
    """Bytes of the tiles (storages,) by the numbers of their storages (storages, columns)."""
    rows = numbers[:, TileColumn.ROWS]
    parts = numbers[:, TileColumn.PARTS]
    part = np.maximum(np.ceil(rows / np.maximum(parts, 1)), 1)
    most = np.where(parts > 0, 2 ** np.ceil(np.log2(part)), numbers[:, TileColumn.MOST_ROWS])
    tiles: FloatArray = np.minimum(rows, most) * numbers[:, TileColumn.ROW_BYTES]
    return tiles


class OperatorClass(IntEnum):
    """Class of an operator by its cost on the device."""

    VIEW = 0
    """No kernel: work of the host alone."""
    MATRIX_PRODUCT = 1
    ATTENTION_FORWARD = 2
    ATTENTION_BACKWARD = 3
    DEQUANTISATION = 4
    SCAN = 5
    """Mamba's selective scan, forward or backward."""
    UPDATE = 6
    """Update by the optimizer."""
    MEMORY = 7
    """Any other operator: streams its tensors, bound by memory."""
    GROUPED_PRODUCT = 8
    """Matrix products of all experts in one operator: one kernel on GPUs that have it."""
    HOST_COPY = 9
    """Copy between GPU and host, on a stream of its own."""
    COLLECTIVE = 10
    """Collective operation of several GPUs; ``Collective`` takes the place of the rate."""
    SCATTERED = 11
    """Addresses or converts its elements one by one: strided, broadcast or widened tensors."""
    NORM = 12
    NORM_BACKWARD = 13
    SOFTMAX = 14
    """Softmax or its logarithm."""
    SOFTMAX_BACKWARD = 15
    GATHER = 16
    """Writes or adds rows of a table, element by element."""
    PICKED_LOSS = 17
    """Mean of one picked number of each row: one block adds up all rows."""
    FLASH2_FORWARD = 18
    """FlashAttention-2's own kernel, where PyTorch has a faster one."""
    FLASH2_BACKWARD = 19
    HOST_MEMORY = 20
    """Work of the host on tensors in its own memory."""


class Rate(IntEnum):
    """Peak rate of the device that applies to an operator's FLOPs."""

    BF16 = 0
    FP16 = 1
    FP32 = 2


class Collective(IntEnum):
    """Kind of a collective.

    ``Column.BYTES`` has the bytes of the whole buffer (the output of an all-gather, the input of a
    reduce-scatter), ``Column.PRODUCTS`` the ranks of the group, and ``Column.COLUMNS`` the distance
    between the numbers of two neighbours.
    """

    ALL_GATHER = 0
    REDUCE_SCATTER = 1
    ALL_REDUCE = 2


COLLECTIVES = dict(zip(get_args(CollectiveName), Collective, strict=True))
"""Kinds by their names in records, which have the same order."""


class Segment(IntEnum):
    """Part of the step. The layers between BEFORE and HEAD repeat: three turns are traced.

    A turn is one period of the repeated layers (``layer_expansion``). A step has one forward pass,
    or up to four where a task also needs passes without gradients.
    """

    BEFORE = 0
    FORWARD_1 = 1
    FORWARD_2 = 2
    FORWARD_3 = 3
    HEAD = 4
    """Forward pass after the last turn, up to the loss or the next pass."""
    SECOND_FORWARD_1 = 5
    SECOND_FORWARD_2 = 6
    SECOND_FORWARD_3 = 7
    SECOND_HEAD = 8
    THIRD_FORWARD_1 = 9
    THIRD_FORWARD_2 = 10
    THIRD_FORWARD_3 = 11
    THIRD_HEAD = 12
    FOURTH_FORWARD_1 = 13
    FOURTH_FORWARD_2 = 14
    FOURTH_FORWARD_3 = 15
    FOURTH_HEAD = 16
    ROUTER_1 = 17
    """Load-balancing loss: operators on the router logits of a turn's layers."""
    ROUTER_2 = 18
    ROUTER_3 = 19
    ROUTER_HEAD = 20
    CAST_1 = 21
    """Casts of the router logits that the model returns."""
    CAST_2 = 22
    CAST_3 = 23
    CAST_HEAD = 24
    HEAD_BACKWARD = 25
    ROUTER_BACKWARD_3 = 26
    ROUTER_BACKWARD_2 = 27
    ROUTER_BACKWARD_1 = 28
    HEAD_BACKWARD_AFTER = 29
    """Rest of the head's backward pass, after that of the load-balancing loss."""
    BACKWARD_3 = 30
    BACKWARD_2 = 31
    BACKWARD_1 = 32
    AFTER = 33
    """Backward pass of the layers before the first turn."""
    ALONE_BEFORE = 34
    """Storages from before a step by DeepSpeed's engine: of one micro-batch, or of three."""
    ALONE = 35
    ALONE_UPDATE = 36
    ENGINE_BEFORE = 37
    ENGINE_FIRST = 38
    ENGINE_FURTHER = 39
    ENGINE_LAST = 40
    ENGINE_UPDATE = 41
    FIRST_UPDATE = 42
    """First update, in which the optimizer makes its state."""
    UPDATE = 43
    FORGET = 44
    """Loss and gradients are freed."""


Turns = tuple[Segment, Segment, Segment]
HEADS = (Segment.HEAD, Segment.SECOND_HEAD, Segment.THIRD_HEAD, Segment.FOURTH_HEAD)
"""Segments after the last turn of each forward pass."""


def _turns_before(head: Segment) -> Turns:
    return Segment(head - 3), Segment(head - 2), Segment(head - 1)


FORWARD: tuple[Turns, ...] = tuple(map(_turns_before, HEADS))
"""Segments of the three turns of each forward pass."""
ROUTER_LOOPS = tuple((_turns_before(h), h) for h in (Segment.ROUTER_HEAD, Segment.CAST_HEAD))
"""Turns of each loop over the router logits of all layers, and the segment after it."""
FORWARD_PASSES = (*zip(FORWARD, HEADS, strict=True), *ROUTER_LOOPS)
"""Turns of all that runs from the first layer to the last, and the segment after it."""
BACKWARD: Turns = (Segment.BACKWARD_1, Segment.BACKWARD_2, Segment.BACKWARD_3)
ROUTER_BACKWARD: Turns = (
    Segment.ROUTER_BACKWARD_1,
    Segment.ROUTER_BACKWARD_2,
    Segment.ROUTER_BACKWARD_3,
)
BACKWARD_PASSES = (
    (ROUTER_BACKWARD, Segment.HEAD_BACKWARD_AFTER),
    (BACKWARD, Segment.AFTER),
)
"""Turns of all that runs from the last layer to the first, and the segment after it."""
FAMILIES = {segment: turns for turns, _ in (*FORWARD_PASSES, *BACKWARD_PASSES) for segment in turns}
"""The three turns of the pass that a segment belongs to."""
TURN = {segment: turns.index(segment) + 1 for segment, turns in FAMILIES.items()}
"""Number of the traced turn, from 1, that a segment belongs to."""
UPDATES = (Segment.FIRST_UPDATE, Segment.UPDATE, Segment.FORGET)


class StructureError(ValueError):
    """A trace lacks the structure that expansion to the whole step requires."""


class RepeatError(StructureError):
    """The traced turns differ, so that none of them can represent others."""


class Purpose(IntEnum):
    """Purpose of a storage."""

    ACTIVATION = 0
    WORKSPACE = 1
    GRADIENT = 2
    OPTIMIZER = 3
    HEAD = 4
    """Logits, loss and tensors computed from them."""
    CHECKPOINT = 5
    """Tensors that the layers keep for the backward pass."""
    WEIGHT = 6
    QUANTISATION = 7
    """Constants of the 4-bit weights."""
    LIBRARY = 8
    """cuBLAS' workspace."""


@dataclass(frozen=True, slots=True)
class Recording:
    """One traced step, event by event, and the two updates that follow it.

    Attributes:
        kinds: (events,) kind of each event, ``Kind``.
        names: (events,) for MADE and FREED the storage, counted from 0; for RUN class and rate of
            the operator, ``4 * OperatorClass + Rate``.
        segments: (events,) segment of each event, ``Segment``.
        numbers: (events, columns) numbers of each event, by ``Column``.
        ghosts: (storages, 3) storages of the gradients of untraced parameters: name of the storage,
            name of the storage in the second turn that it copies, number of the copy (from 1).
        gradients: names of the storages that hold gradients.
        workspaces: names of the storages that are workspace of one operator.
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
    """Storages on the device before the first step, which stay throughout.

    Attributes:
        sizes: (storages,) bytes, in the order of allocation.
        purposes: (storages,) purpose of each storage, ``Purpose``.
        turns: (storages,) traced turn that a storage belongs to; 0 for none.
    """

    sizes: IntArray
    purposes: IntArray
    turns: IntArray


@dataclass(frozen=True, slots=True)
class Stream:
    """A whole step of the whole model at one batch size.

    Attributes:
        kinds, names, segments: as in a recording; every storage has a name of its own.
        numbers: (rows, columns) numbers by ``Column``; repeated layers share rows.
        rows: (events,) row of each event's numbers.
        purposes: (storages,) purpose of each storage, ``Purpose``.
        parts_from: index of the first event of each part: micro-batches and update of the first
            step, which makes the optimizer's state, and of the second; by DeepSpeed of one.
        steady_from: index of the first event of the last step.
    """

    kinds: IntArray
    names: IntArray
    segments: IntArray
    numbers: FloatArray
    rows: IntArray
    purposes: IntArray
    parts_from: tuple[int, ...]
    steady_from: int


def _structure(recording: Recording, part: np.ndarray) -> tuple[IntArray, IntArray, IntArray]:
    """Kinds, segments and names of a part, with frees sorted by name between two kernels."""
    columns = recording.kinds, recording.names, recording.segments
    kinds, names, segments = (column[part] for column in columns)
    freed = kinds == Kind.FREED
    passed = freed | ((kinds == Kind.RUN) & (names == OperatorClass.VIEW))
    runs = np.cumsum(~passed | np.r_[True, ~passed[:-1]])
    return kinds, segments, names[np.lexsort((np.where(freed, names, 0), runs))]


def with_updates_of(recording: Recording, other: Recording) -> Recording:
    """Combine the step of one recording with the updates of another and the frees after them.

    Frees without a kernel between them may come in another order (autocast keeps its casts by
    address, DeepSpeed gathered weights); the result has the order of the other recording.

    Raises:
        StructureError: before the updates the two differ in more than numbers.
    """
    own = recording.segments < Segment.FIRST_UPDATE
    theirs = other.segments < Segment.FIRST_UPDATE
    pairs = zip(_structure(recording, own), _structure(other, theirs), strict=True)
    if not all(np.array_equal(*pair) for pair in pairs):
        raise StructureError("the step has another structure at another batch size or length")

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
