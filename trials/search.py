"""The largest batch size that fits: exact, and cheap when memory is nearly affine in batch size.

The search is a generator of batch sizes to probe. Its caller makes, stores, times out and retries
the probes, so this module depends on no model, device or record.
"""

from collections.abc import Generator
from dataclasses import dataclass

EXTRA_PROBES = 2
"""Most probes that guidance may add to those of doubling and bisection. With 1, a single wrong
guess would end the guidance; every further one is wasted where memory follows no line."""

REACH = 48
"""Largest batch to try, as a multiple of the largest one that fits. Two small batches differ by
little memory, so noise can turn their line anywhere, and a batch far too large can do worse than
run out of memory. A shorter reach adds probes where the line is exact, a longer one adds misses
where it is noisy: measure a change with tests/benchmarks/search_probes.py."""

RETREAT = 0.3
"""Second batch size to try, as a share of the first, where an estimate began with a miss. It fits
for estimates up to three times too high. A larger share comes closer to the largest batch after a
small error, but a second miss leaves nothing but doubling from 1."""


@dataclass(frozen=True, slots=True)
class LikelyLargest:
    """Estimate of the largest batch from another source. A wrong one costs probes, never exactness.

    Attributes:
        batch: largest batch size that fits, at least 1.
        fixed_share: share of the peak at ``batch`` that does not grow with the batch size, by the
            slope there: at most 1, 0 where nothing is known, and below 0 where the peak grows by a
            larger factor than the batch size.
        error: relative error to expect of ``batch``, from 0 (exact) to 1.
    """

    batch: int
    fixed_share: float = 0.0
    error: float = 0.0

    def suggested(self, fit: int, miss: int, limit: int) -> int | None:
        """Batch size to probe before any peak is known, or to confirm an exact estimate."""
        if fit == 0 and miss > limit:
            return min(max(1, round((1 - self.error) * self.batch)), limit)
        if fit == 0:
            return round(RETREAT * miss)  # from 1: a miss at 1 ends the search
        return fit + 1 if self.error == 0 and fit == self.batch else None

    def fixed_share_at(self, batch: int) -> float:
        """Share of the peak at a batch size that does not grow with it."""
        if self.fixed_share <= 0:
            return self.fixed_share
        growing = (1 - self.fixed_share) * batch / self.batch
        return self.fixed_share / (self.fixed_share + growing)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of one probe.

    Attributes:
        fits: whether the batch fits. Assumed monotone: every smaller batch fits too.
        peak_memory_bytes: peak memory of a probe that fits; None when unknown. It only guides the
            search: a wrong value costs probes, never exactness.
    """

    fits: bool
    peak_memory_bytes: int | None = None


Search = Generator[int, ProbeResult, int]


def search_largest_batch(
    *, limit: int, memory_limit_bytes: int, estimate: LikelyLargest | None = None
) -> Search:
    """Yield each batch size to probe, receive its result by ``send``, return the largest that fits.

    The search returns 0 when one example does not fit and ``limit`` when ``limit`` fits. Otherwise
    it has probed the batch size it returns (a fit) and the next larger one (a miss). It skips every
    probe whose result earlier ones imply.

    Peak memory predicts the largest batch (``_predicted_largest``). With an estimate the search
    begins below it, by its error: a fit has a peak, a miss has none. The search uses at most
    ``EXTRA_PROBES`` more probes than ``doubling_and_bisection``, however wrong the predictions and
    the estimate are.
    With ``plain_done`` the number of leading probes of the plain search whose results are implied,

        used <= plain_done + EXTRA_PROBES

    is invariant: a guided probe is made only where the inequality survives a useless result, and
    the plain search's next probe, made otherwise, raises both sides by one. At the end the results
    of the whole plain search are implied.

    Args:
        limit: largest batch size to try, at least 1.
        memory_limit_bytes: memory that a fitting batch may take, at least 1.
        estimate: estimate of the result; None to begin with a batch of 1.

    Raises:
        ValueError: an argument is below 1.
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
            suggested = estimate and estimate.suggested(fit, miss, limit)
            predicted = _predicted_largest(peaks, memory_limit_bytes, estimate)
            batch = suggested or _guided(predicted, fit, miss, limit) or plain_batch
        result = yield batch
        used += 1
        fit, miss = (batch, miss) if result.fits else (fit, batch)
        if result.fits and result.peak_memory_bytes is not None:
            peaks[batch] = result.peak_memory_bytes
    return fit


def doubling_and_bisection(*, limit: int) -> Search:
    """Search by doubling from 1 until a miss, then bisect: the plain search.

    It ignores peaks, so its probes depend only on the largest batch and the limit.
    """
    fit, miss = 0, limit + 1
    while miss - fit > 1:
        batch = min(max(1, 2 * fit), limit) if miss > limit else (fit + miss) // 2
        result = yield batch
        fit, miss = (batch, miss) if result.fits else (fit, batch)
    return fit


def _guided(predicted: int | None, fit: int, miss: int, limit: int) -> int | None:
    """Next batch size to probe by the predicted largest, between ``fit`` and ``miss``."""
    if predicted is None:
        return None
    predicted = min(predicted, REACH * fit)
    if predicted <= fit:
        return fit + 1  # The prediction is confirmed from below; a miss here closes the search.
    if predicted < miss:
        return predicted
    if miss > limit:
        return limit
    # A miss contradicts the prediction. Far from a fit, the line extrapolated too far: another fit
    # well inside the interval gives a better line, and below its middle a fit is the likelier
    # result.
    if miss > 4 * fit:
        return fit + (miss - fit) // 3
    # Close to a fit the line is good, so the largest batch lies little below the miss.
    return miss - max(1, (miss - fit) // 4)


def _predicted_largest(
    peaks: dict[int, int], memory_limit_bytes: int, estimate: LikelyLargest | None
) -> int | None:
    """Largest batch size within the memory limit by the line ``peak = m + k * batch``.

    The line joins the largest fit and the largest one at most half of it. Closer points would turn
    noise into slope. Batch 1 often lies above the line and is used only where no other point is
    left. Without such a point, ``m`` is the share of the largest fit's peak that the estimate calls
    fixed. Without an estimate, a single peak bounds the result from below by proportion (m >= 0);
    the prediction is twice that bound, since most of a first peak is the model itself. None when no
    line rises.
    """
    peaks = {batch: peak for batch, peak in peaks.items() if peak > 0}
    if not peaks:
        return None
    upper = max(peaks)
    if estimate is not None:
        peaks[0] = round(estimate.fixed_share_at(upper) * peaks[upper])
    elif len(peaks) == 1:
        return 2 * upper * memory_limit_bytes // peaks[upper]
    lower = max((batch for batch in peaks if batch <= upper // 2), default=min(peaks))
    rise = peaks[upper] - peaks[lower]
    if rise <= 0:
        return None
    return upper + (memory_limit_bytes - peaks[upper]) * (upper - lower) // rise
