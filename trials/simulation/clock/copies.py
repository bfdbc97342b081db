"""Time of a step whose copies to and from the host have a stream of their own."""

from collections import deque

import numpy as np

from trials.simulation.recording import FloatArray, IntArray, Wait


def two_stream_seconds(
    host: FloatArray,
    device: FloatArray,
    is_copy: np.ndarray,
    streams: IntArray,
    waits: IntArray,
) -> float:
    """Time in seconds at which the host and both streams have finished.

    Args:
        host: (events,) seconds on the host.
        device: (events,) seconds on the GPU; 0 for events that launch nothing.
        is_copy: (events,) whether the stream of copies runs the event.
        streams: (events,) ``Wait`` of the streams, 0 for none.
        waits: indices of the events at which the host waits for the stream of the computation.
    """
    host_waits = np.zeros(len(host), np.bool_)
    host_waits[waits] = True
    now = 0.0
    free = [0.0, 0.0]  # times at which the computation and the copies are done
    marks: tuple[deque[float], deque[float]] = (deque(), deque())
    columns = (host, device, is_copy.astype(np.int64), streams, host_waits)
    for spent, busy, stream, wait, is_wait in zip(*(c.tolist() for c in columns), strict=True):
        if is_wait:
            now = max(now, free[0])
        now += spent
        if wait:
            _synchronise(Wait(wait), free, marks)
        elif busy:
            free[stream] = max(free[stream], now) + busy
    return max(now, *free)


def _synchronise(wait: Wait, free: list[float], marks: tuple[deque[float], deque[float]]) -> None:
    match wait:
        case Wait.COMPUTE_MARKED | Wait.COPIES_MARKED:
            stream = int(wait is Wait.COPIES_MARKED)
            marks[stream].append(free[stream])
        case Wait.COMPUTE_FOR_MARK | Wait.COPIES_FOR_MARK:
            stream = int(wait is Wait.COPIES_FOR_MARK)
            others = marks[1 - stream]
            if others:
                free[stream] = max(free[stream], others.popleft())
        case _:
            stream = int(wait is Wait.COPIES_FOR_COMPUTE)
            free[stream] = max(free)
