"""Time of one rank's step: host, computation and collectives, each on its own."""

from collections.abc import Iterator, Sequence

import numpy as np

from gpu_catalog.gpu import Gpu
from gpu_catalog.links.within_nodes import MeasuredLink
from trials.recipes.parallel import Parallel, link_within
from trials.records.collectives import CollectiveCount
from trials.simulation.ranks.rank_links import Group, collective_speed, measured_speed
from trials.simulation.recording import (
    COLLECTIVES,
    Collective,
    Column,
    FloatArray,
    IntArray,
)

NAMES = {kind: name for name, kind in COLLECTIVES.items()}
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
    # numba takes a second to load, which an estimate of one GPU does without.
    from trials.simulation.ranks.compiled_lanes import lanes_seconds  # noqa: PLC0415 - see above

    host_waits = np.zeros(len(host), np.bool_)
    host_waits[waits] = True
    return float(lanes_seconds(host, device, links, streams, host_waits))


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
    interconnect = link_within(gpu, layout)
    for kind, group, which in _alike(kinds, numbers, layout):
        name = NAMES[Collective(kind)]
        speed = measured_speed(group, name, gpu, layout, measured)
        speed = speed or collective_speed(group, name, interconnect, network)
        sizes, places = np.unique(numbers[which, Column.BYTES], return_inverse=True)
        by_size = [speed.seconds(name, group.ranks, size) for size in sizes.tolist()]
        seconds[which] = np.array(by_size)[places]
    return seconds


def links_of(kinds: IntArray, numbers: FloatArray, layout: Parallel | None) -> IntArray:
    """Link of each collective, (collectives,); arguments are those of ``collective_seconds``."""
    links = np.full(len(kinds), WITHIN)
    for _, group, which in _alike(kinds, numbers, layout):
        links[which] = WITHIN if group.nodes == 1 else BETWEEN
    return links


def collective_counts(sums: FloatArray) -> tuple[CollectiveCount, ...]:
    """Record of each kind that a step has, by ``Operators.collective_sums``."""
    return tuple(
        CollectiveCount(collective=NAMES[kind], count=round(count), buffer_bytes=round(size))
        for kind, (count, size) in zip(Collective, sums.tolist(), strict=True)
        if count
    )


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
