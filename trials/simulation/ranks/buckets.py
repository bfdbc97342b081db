"""Buckets in which DistributedDataParallel sums the gradients of its ranks.

A bucket is full as soon as its gradients reach its limit: 1 MiB for the first, which starts the
communication early, and 25 MiB for each further one (PyTorch's ``_DEFAULT_FIRST_BUCKET_BYTES`` and
``bucket_cap_mb``, ``compute_bucket_assignment_by_size`` in its reducer.cpp). From the second step
on their order is that in which gradients become ready. They are allocated once, and stay.
"""

from dataclasses import dataclass, replace

import numpy as np

from trials.simulation.ranks.stream_events import Action, StreamEvent
from trials.simulation.recording import (
    COMPUTE_STREAM,
    Collective,
    Column,
    Held,
    IntArray,
    Kind,
    OperatorClass,
    Purpose,
    Rate,
    Stream,
)

FIRST_BYTES = 2**20
FURTHER_BYTES = 25 * 2**20
NETWORK_STREAM = 7


@dataclass(frozen=True, slots=True)
class Buckets:
    """Buckets of a step's gradients.

    Attributes:
        ends: (buckets,) index of the event that makes the last gradient of each, in the last
            micro-batch of the second step.
        sizes: (buckets,) bytes.
    """

    ends: IntArray
    sizes: IntArray


def buckets_of(stream: Stream) -> Buckets:
    """Buckets of a step, by the order in which its last micro-batch makes gradients."""
    start, end = stream.parts_from[-2:]
    made = start + np.flatnonzero(stream.kinds[start:end] == Kind.MADE)
    made = made[stream.purposes[stream.names[made]] == Purpose.GRADIENT]
    sizes = stream.numbers[stream.rows[made], Column.BYTES].astype(np.int64)
    ends, totals = [], []
    total, limit = 0, FIRST_BYTES
    for index, size in zip(made.tolist(), sizes.tolist(), strict=True):
        total += size
        if total >= limit:
            ends.append(index)
            totals.append(total)
            total, limit = 0, FURTHER_BYTES
    if total:
        ends.append(int(made[-1]))
        totals.append(total)
    return Buckets(np.array(ends, np.int64), np.array(totals, np.int64))


def with_buckets(stream: Stream, ranks: int) -> Stream:
    """Step whose last micro-batch sums its gradients over ranks, while the others do not.

    Only the second step has the collectives: the first is never timed.
    """
    buckets = buckets_of(stream)
    last = stream.parts_from[-1]
    mark = StreamEvent(Action.MARK, COMPUTE_STREAM)
    at: list[int] = []
    kinds: list[int] = []
    names: list[int] = []
    moved: list[float] = []

    def add(index: int, kind: Kind, name: int, size: float = 0.0) -> None:
        at.append(index)
        kinds.append(kind)
        names.append(name)
        moved.append(size)

    copied = 4 * OperatorClass.MEMORY + Rate.BF16
    for index, size in zip(buckets.ends.tolist(), buckets.sizes.tolist(), strict=True):
        add(index + 1, Kind.RUN, copied, 2.0 * size)
        add(index + 1, Kind.STREAM, mark.number)
        wait = StreamEvent(Action.WAIT, NETWORK_STREAM, COMPUTE_STREAM)
        add(index + 1, Kind.STREAM, wait.number)
        add(index + 1, Kind.STREAM, StreamEvent(Action.RUN, NETWORK_STREAM).number)
        collective = 4 * OperatorClass.COLLECTIVE + Collective.ALL_REDUCE
        add(index + 1, Kind.RUN, collective, float(size))
        add(index + 1, Kind.STREAM, StreamEvent(Action.MARK, NETWORK_STREAM).number)
        add(index + 1, Kind.STREAM, StreamEvent(Action.RUN, COMPUTE_STREAM).number)
    add(last, Kind.STREAM, StreamEvent(Action.WAIT, COMPUTE_STREAM, NETWORK_STREAM).number)
    for size in buckets.sizes.tolist():
        add(last, Kind.RUN, copied, 2.0 * size)
    numbers = np.zeros((len(at), stream.numbers.shape[1]))
    numbers[:, Column.BYTES] = moved
    is_run = np.array(kinds) == Kind.RUN
    is_collective = is_run & (np.array(names) // 4 == OperatorClass.COLLECTIVE)
    numbers[is_run, Column.LAUNCHES] = 1.0
    numbers[is_collective, Column.PRODUCTS] = ranks
    numbers[is_collective, Column.COLUMNS] = 1.0
    return replace(
        stream,
        kinds=np.insert(stream.kinds, at, kinds),
        names=np.insert(stream.names, at, names),
        segments=np.insert(stream.segments, at, stream.segments[np.array(at) - 1]),
        numbers=np.concatenate([stream.numbers, numbers]),
        rows=np.insert(stream.rows, at, len(stream.numbers) + np.arange(len(at))),
        parts_from=(*stream.parts_from[:-1], last + sum(index < last for index in at)),
    )


def held_with_buckets(held: Held, stream: Stream) -> Held:
    """Storages of the model, and the buckets of its gradients."""
    sizes = buckets_of(stream).sizes
    gradient = np.full(len(sizes), int(Purpose.GRADIENT))
    return Held(
        np.r_[held.sizes, sizes], np.r_[held.purposes, gradient], np.r_[held.turns, 0 * sizes]
    )


def synchronises(kinds: IntArray, names: IntArray) -> np.ndarray:
    """Whether each operator is a collective, or an event that orders streams; (operators,)."""
    is_collective = names // 4 == OperatorClass.COLLECTIVE
    synchronising: np.ndarray = (kinds == Kind.STREAM) | ((kinds == Kind.RUN) & is_collective)
    return synchronising
