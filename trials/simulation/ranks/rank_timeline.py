"""Time of one rank's step: host, computation and collectives, each on its own."""

from collections import defaultdict

import numpy as np

from gpu_catalog.gpu import Gpu
from gpu_catalog.links import CollectiveName, link_speed
from trials.simulation.ranks.stream_events import FIRST, Action, StreamEvent
from trials.simulation.recording import (
    COMPUTE_STREAM,
    Collective,
    Column,
    FloatArray,
    IntArray,
)

NAMES: dict[Collective, CollectiveName] = {
    Collective.ALL_GATHER: "all-gather",
    Collective.REDUCE_SCATTER: "reduce-scatter",
    Collective.ALL_REDUCE: "all-reduce",
}


def rank_seconds(
    host: FloatArray,
    device: FloatArray,
    is_collective: np.ndarray,
    streams: IntArray,
    waits: IntArray,
) -> float:
    """Time in seconds at which the host and all streams of a rank have finished.

    Collectives run one after another, whatever their streams: NCCL has one stream for a group.

    Args:
        host: (events,) seconds on the host.
        device: (events,) seconds on the GPU; 0 for events that launch nothing.
        is_collective: (events,) whether the event is a collective.
        streams: (events,) ``StreamEvent.number`` of each event, 0 for none.
        waits: indices of the events at which the host waits for the stream of the computation.
    """
    host_waits = np.zeros(len(host), np.bool_)
    host_waits[waits] = True
    events = {int(n): StreamEvent.of(int(n)) for n in np.unique(streams) if n >= FIRST}
    free: dict[int, float] = defaultdict(float)
    marks: dict[int, list[float]] = defaultdict(list)
    now = network = 0.0
    stream = COMPUTE_STREAM
    columns = (host, device, is_collective, streams, host_waits)
    for spent, busy, moves, number, is_wait in zip(*(c.tolist() for c in columns), strict=True):
        if is_wait:
            now = max(now, free[COMPUTE_STREAM])
        now += spent
        if number >= FIRST:
            event = events[number]
            if event.action is Action.RUN:
                stream = event.stream
            elif event.action is Action.MARK:
                marks[event.stream].append(free[event.stream])
            elif len(marks[event.other]) > event.back:
                marked = marks[event.other][-1 - event.back]
                free[event.stream] = max(free[event.stream], marked)
        elif moves:
            network = free[stream] = max(free[stream], network, now) + busy
        elif busy:
            free[stream] = max(free[stream], now) + busy
    return max(now, *free.values())


def collective_seconds(kinds: IntArray, numbers: FloatArray, gpu: Gpu) -> FloatArray:
    """Seconds of each collective, (collectives,): ``gpu_catalog.links`` has the equation.

    Args:
        kinds: (collectives,) ``Collective``.
        numbers: (collectives, columns) numbers of each by ``Column``.
        gpu: GPU of every rank.
    """
    seconds = np.zeros(len(kinds))
    ranks = np.rint(numbers[:, Column.PRODUCTS]).astype(np.int64)
    for kind, number in {(int(k), int(n)) for k, n in zip(kinds, ranks, strict=True)}:
        which = (kinds == kind) & (ranks == number)
        speed = link_speed(gpu.interconnect, number, NAMES[Collective(kind)])
        parts = 2 if kind == Collective.ALL_REDUCE else 1
        moved = parts * (number - 1) / number * numbers[which, Column.BYTES]
        seconds[which] = speed.alpha_seconds + moved / speed.bytes_per_second
    return seconds
