"""Lanes of a rank, compiled by numba: its host, its streams and the links of its collectives.

All is in one file, because numba's cache on disk notices no change of another one; the constants of
others that it uses are those of recordings on disk.
"""

import numpy as np

from trials.simulation.ranks.compilation import compiled
from trials.simulation.ranks.stream_events import FIRST, MOST_BACK, STREAMS, Action
from trials.simulation.recording import COMPUTE_STREAM, FloatArray, IntArray

RUN, MARK = int(Action.RUN), int(Action.MARK)
LINKS = 3  # the first stands for no link


@compiled
def lanes_seconds(
    host: FloatArray,
    device: FloatArray,
    links: IntArray,
    streams: IntArray,
    host_waits: np.ndarray,
) -> float:
    """Time at which all lanes have finished; ``rank_seconds`` describes the columns.

    The last one says of each event whether the host waits for the stream that runs then.
    """
    free = np.zeros(STREAMS)  # when each stream is idle
    busy_until = np.zeros(LINKS)
    marks = np.zeros((STREAMS, MOST_BACK))  # the latest of each stream, in a ring
    marked = np.zeros(STREAMS, np.int64)
    now, stream = 0.0, COMPUTE_STREAM
    for event in range(len(host)):
        if host_waits[event]:
            now = max(now, free[stream])
        now += host[event]
        number, link, busy = streams[event] - FIRST, links[event], device[event]
        if number >= 0:  # as in StreamEvent.of
            place, back = number // MOST_BACK, number % MOST_BACK
            other, own = place % STREAMS, place // STREAMS % STREAMS
            action = place // STREAMS // STREAMS
            if action == RUN:
                stream = own
            elif action == MARK:
                marks[own, marked[own] % MOST_BACK] = free[own]
                marked[own] += 1
            elif marked[other] > back:
                latest = marks[other, (marked[other] - 1 - back) % MOST_BACK]
                free[own] = max(free[own], latest)
        elif link:
            busy_until[link] = free[stream] = max(free[stream], busy_until[link], now) + busy
        elif busy:
            free[stream] = max(free[stream], now) + busy
    return max(now, free.max())  # type: ignore[no-any-return] # an element of an array
