"""The largest batch size that fits: exact, and cheap when memory is nearly affine in batch size.

The search is a generator of batch sizes to probe, so whoever runs it owns the probes: how they are
made, stored, timed out and retried. It knows nothing of models, devices or records.
"""

from collections.abc import Generator
from dataclasses import dataclass

EXTRA_PROBES = 2
"""How many more probes than doubling and bisection the guidance may ever cost. With one, a single
wrong guess would end it; each one more would be paid in full on a law that no line describes."""

REACH = 48
"""How far beyond the largest fit, as a multiple of it, a prediction is followed. Two small batches
differ by little memory, so noise can make their line point anywhere, and a batch far too large can
end worse than out of memory. A shorter reach costs an exact line more probes, a longer one a noisy
line more misses: weigh a change of it with tests/benchmarks/search_probes.py."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The answer of one probe.

    Attributes:
        fits: whether the batch fits. Taken to be monotone: what fits, fits in any smaller size.
        peak_memory_bytes: peak memory of a probe that fits; absent when it is not known. It only
            guides: a wrong one costs probes, never exactness.
    """

    fits: bool
    peak_memory_bytes: int | None = None


Search = Generator[int, ProbeResult, int]


def search_largest_batch(*, limit: int, memory_limit_bytes: int) -> Search:
    """Yield each batch size to probe, receive its result by ``send``, return the largest that fits.

    The result is 0 when not even one example fits and ``limit`` when that fits; in between, the
    probes include a fit at it and a miss one above. No probe is asked whose answer is implied.

    Peak memory predicts the limit (``_predicted_limit``). However wrong it is, the probes used
    never exceed those of ``doubling_and_bisection`` by more than ``EXTRA_PROBES``: with
    ``plain_done`` the number of that search's leading probes whose answers are known by now,

        used <= plain_done + EXTRA_PROBES

    holds throughout. A guided probe is made only where it still holds if it teaches nothing; the
    plain search's next probe, made otherwise, raises both sides by one. At the end all answers of
    the plain search are known.

    Args:
        limit: the largest batch size to try, at least 1.
        memory_limit_bytes: what the peaks are held against, at least 1.
    """
    if limit < 1 or memory_limit_bytes < 1:
        raise ValueError(
            f"search_largest_batch got limit {limit} and memory_limit_bytes {memory_limit_bytes}: "
            "both must be at least 1"
        )
    fit, miss = 0, limit + 1
    peaks: dict[int, int] = {}
    plain = doubling_and_bisection(limit=limit)
    plain_batch, plain_done, used = next(plain), 0, 0
    while miss - fit > 1:
        while not fit < plain_batch < miss:
            plain_batch = plain.send(ProbeResult(plain_batch <= fit, None))
            plain_done += 1
        batch = plain_batch
        if used + 1 <= plain_done + EXTRA_PROBES:
            batch = _guided(peaks, fit, miss, limit, memory_limit_bytes) or plain_batch
        reading = yield batch
        used += 1
        fit, miss = (batch, miss) if reading.fits else (fit, batch)
        if reading.fits and reading.peak_memory_bytes is not None:
            peaks[batch] = reading.peak_memory_bytes
    return fit


def doubling_and_bisection(*, limit: int) -> Search:
    """Search by doubling from 1 until a miss, then bisect: what the guided search is held against.

    It looks at no peak, so its probes depend on the largest batch and the limit alone.
    """
    fit, miss = 0, limit + 1
    while miss - fit > 1:
        batch = min(max(1, 2 * fit), limit) if miss > limit else (fit + miss) // 2
        reading = yield batch
        fit, miss = (batch, miss) if reading.fits else (fit, batch)
    return fit


def _guided(
    peaks: dict[int, int], fit: int, miss: int, limit: int, memory_limit_bytes: int
) -> int | None:
    """The batch size between ``fit`` and ``miss`` that the peaks speak for, or None."""
    predicted = _predicted_limit(peaks, memory_limit_bytes)
    if predicted is None:
        return None
    predicted = min(predicted, REACH * fit)
    if predicted <= fit:
        return fit + 1  # The prediction is confirmed from below; a miss here closes the search.
    if predicted < miss:
        return predicted
    if miss > limit:
        return limit
    # A miss contradicts the prediction. Far from a fit, the line stood on too small a span: a fit
    # well inside makes a far better one, and below the middle it is likelier than a miss.
    if miss > 4 * fit:
        return fit + (miss - fit) // 3
    # Near one, the line is good and the limit lies little below the miss.
    return miss - max(1, (miss - fit) // 4)


def _predicted_limit(peaks: dict[int, int], memory_limit_bytes: int) -> int | None:
    """The largest batch size whose peak is within the limit, by the line ``peak = m + k * batch``.

    The line goes through the largest fit and the largest one at most half of it: nearer ones would
    turn noise into slope, and batch 1, which often stands above the line, is used only for want of
    another. One peak alone bounds the limit from below by proportion (m >= 0); twice that is asked
    for, as most of a first peak is the model itself. None when there is no rising line.
    """
    known = {batch: peak for batch, peak in peaks.items() if peak > 0}
    if not known:
        return None
    upper = max(known)
    if len(known) == 1:
        return 2 * upper * memory_limit_bytes // known[upper]
    lower = max((batch for batch in known if batch <= upper // 2), default=min(known))
    rise = known[upper] - known[lower]
    if rise <= 0:
        return None
    return upper + (memory_limit_bytes - known[upper]) * (upper - lower) // rise
