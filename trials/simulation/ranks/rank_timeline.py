"""Time of one rank's step: host, computation and collectives, each on its own."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gpu_catalog.gpu import Gpu
from gpu_catalog.links.within_nodes import CollectiveName, MeasuredLink, moved_share
from trials.recipes.parallel import Parallel
from trials.simulation.ranks.rank_links import Group, collective_speed, measured_speed
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


WITHIN, BETWEEN = 1, 2
"""Link of a collective: that within a node, or the network between nodes."""


def rank_seconds(
    host: FloatArray,
    device: FloatArray,
    links: IntArray,
    streams: IntArray,
    waits: IntArray,
) -> float:
    """Time in seconds at which the host and all streams of a rank have finished.

    Collectives on one link run one after another, whatever their streams: NCCL has one stream for a
    group, and groups share the link.

    Args:
        host: (events,) seconds on the host.
        device: (events,) seconds on the GPU; 0 for events that launch nothing.
        links: (events,) ``WITHIN`` or ``BETWEEN`` for collectives, 0 for other events.
        streams: (events,) ``StreamEvent.number`` of each event, 0 for none.
        waits: indices of the events at which the host waits for the stream that runs then.
    """
    host_waits = np.zeros(len(host), np.bool_)
    host_waits[waits] = True
    is_stop = (streams >= FIRST) | (links > 0) | host_waits
    stops = np.flatnonzero(is_stop)
    runs = _runs(host, np.where(is_stop, 0.0, device), stops)
    columns = (host[stops], device[stops], links[stops], streams[stops], host_waits[stops])
    at_stops = zip(*map(_listed, columns), strict=True)
    events = {int(n): StreamEvent.of(int(n)) for n in np.unique(streams) if n >= FIRST}
    free: dict[int, float] = defaultdict(float)
    marks: dict[int, list[float]] = defaultdict(list)
    now, busy_until = 0.0, [0.0, 0.0, 0.0]
    stream = COMPUTE_STREAM
    *before, last = runs
    for (run_spent, run_busy, latest), stop in zip(before, at_stops, strict=True):
        free[stream] = max(free[stream] + run_busy, now + latest)
        now += run_spent
        spent, busy, link, number, is_wait = stop
        if is_wait:
            now = max(now, free[stream])
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
        elif link:
            busy_until[link] = free[stream] = max(free[stream], busy_until[link], now) + busy
        elif busy:
            free[stream] = max(free[stream], now) + busy
    run_spent, run_busy, latest = last
    free[stream] = max(free[stream] + run_busy, now + latest)
    return max(now + run_spent, *free.values())


def _runs(
    host: FloatArray, device: FloatArray, stops: IntArray
) -> Iterator[tuple[float, float, float]]:
    """Sums over the events before each stop, and after the last.

    In a run without stops a kernel begins when the one before has ended and the host has launched
    it, so the stream is free at the latest sum of a launch and of all kernels from it on.

    Returns:
        For each run the host's seconds, those of its kernels, and the latest end of its kernels
        after the host's begin, on a stream that is free then; -inf without kernels.
    """
    launched = np.concatenate([[0.0], np.cumsum(host)])  # after as many events
    done = np.concatenate([[0.0], np.cumsum(device)])
    leads = np.append(np.where(device > 0, launched[1:] - done[:-1], -np.inf), -np.inf)
    starts = np.concatenate([[0], stops + 1])
    ends = np.append(stops, len(host))
    latest = np.maximum.reduceat(leads, starts) + done[ends] - launched[starts]
    columns = (launched[ends] - launched[starts], done[ends] - done[starts], latest)
    return zip(*map(_listed, columns), strict=True)


def _listed(column: np.ndarray) -> list[Any]:
    """Values of a column; Python's own types are faster in loops."""
    return list(column.tolist())


def collective_seconds(
    kinds: IntArray,
    numbers: FloatArray,
    gpu: Gpu,
    layout: Parallel | None,
    measured: Sequence[MeasuredLink] = (),
) -> FloatArray:
    """Seconds of each collective, (collectives,), by the equation of ``within_nodes``.

    Args:
        kinds: (collectives,) ``Collective``.
        numbers: (collectives, columns) numbers of each by ``Column``.
        gpu: GPU of every rank.
        layout: layout of the ranks; None for one node.
        measured: speeds that a user measured, which come before the catalog's.
    """
    seconds = np.zeros(len(kinds))
    network = None if layout is None else layout.network
    for kind, group, which in _alike(kinds, numbers, layout):
        name = NAMES[Collective(kind)]
        speed = measured_speed(group, name, gpu, measured)
        speed = speed or collective_speed(group, name, gpu.interconnect, network)
        moved = moved_share(name, group.ranks) * numbers[which, Column.BYTES]
        seconds[which] = speed.alpha_seconds + moved / speed.bytes_per_second
    return seconds


def links_of(kinds: IntArray, numbers: FloatArray, layout: Parallel | None) -> IntArray:
    """Link of each collective, (collectives,); arguments are those of ``collective_seconds``."""
    links = np.full(len(kinds), WITHIN)
    for _, group, which in _alike(kinds, numbers, layout):
        links[which] = WITHIN if group.nodes == 1 else BETWEEN
    return links


def _alike(
    kinds: IntArray, numbers: FloatArray, layout: Parallel | None
) -> Iterator[tuple[int, Group, np.ndarray]]:
    """Collectives of one kind and group, each with (collectives,) whether it is one of them."""
    per_node = None if layout is None else layout.gpus_per_node
    groups = np.rint(numbers[:, [Column.PRODUCTS, Column.COLUMNS]]).astype(np.int64)
    keys = np.c_[kinds, groups]
    for key in np.unique(keys, axis=0):
        kind, ranks, distance = key.tolist()
        yield kind, Group(ranks, distance, per_node), (keys == key).all(axis=1)
