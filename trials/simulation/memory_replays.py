"""Which batch sizes fit a memory, for as few replays as may be: each takes a tenth of a second."""

from collections.abc import Callable, MutableMapping
from itertools import count

import numpy as np

from trials.simulation.allocator import AllocatorPeaks
from trials.simulation.trace_request import SMALLEST

Replay = Callable[[int, int | None], AllocatorPeaks]


class Replays:
    """The replays of a cell's steps on GPUs whose libraries hold the same.

    What fits without a limit below one does the same under it; what fits, fits in any larger memory
    and any smaller batch; what does not, in no smaller memory and no larger batch.

    Args:
        replay: what steps of so many examples come to under a limit, or without one.
        in_use: most bytes in use at once at a batch size, which takes no replay.
        held_elsewhere: by batch size, most bytes held where libraries hold a little more or less:
            to guess from. It is added to.
    """

    def __init__(
        self,
        replay: Replay,
        in_use: Callable[[int], int],
        held_elsewhere: MutableMapping[int, int],
    ) -> None:
        self._replay = replay
        self._in_use = in_use
        self._anywhere = held_elsewhere
        self._unlimited: dict[int, AllocatorPeaks] = {}
        self._missed: dict[tuple[int, int], AllocatorPeaks] = {}  # by batch size and limit

    def without_limit(self, batch_size: int) -> AllocatorPeaks:
        """What steps of so many examples hold where there is no end of memory."""
        if batch_size not in self._unlimited:
            self._note(batch_size, self._replay(batch_size, None))
        return self._unlimited[batch_size]

    def within(self, batch_size: int, limit_bytes: int) -> AllocatorPeaks:
        """What they come to under a limit."""
        unlimited = self._unlimited.get(batch_size)
        if unlimited is not None and unlimited.peak_reserved_bytes <= limit_bytes:
            return unlimited
        key = (batch_size, limit_bytes)
        if key not in self._missed:
            peaks = self._replay(batch_size, limit_bytes)
            if peaks.retries == 0:
                self._note(batch_size, peaks)
                return peaks
            self._missed[key] = peaks
        return self._missed[key]

    def has(self, batch_size: int) -> bool:
        """Whether so many were replayed themselves."""
        return batch_size in self._unlimited

    def fits(self, batch_size: int, limit_bytes: int) -> bool | None:
        """Whether so many do without a retry, by what was replayed; None where that does not tell.

        It is not quite monotone in the batch: a larger one that fits tells more.
        """
        largest = self._largest_fit(limit_bytes)
        if batch_size <= largest:
            return True
        smallest = min((b for b in self._misses(limit_bytes) if b > largest), default=None)
        return False if smallest is not None and batch_size >= smallest else None

    def largest(self, limit_bytes: int, batch_limit: int) -> int:
        """The largest batch of ``SMALLEST`` or more that fits without a retry; else one less.

        It fits, and one example more does not, or it is the limit. What is held is nearly affine in
        the batch, so the line through all that was replayed leads on from the nearest. As it is not
        quite that, every fourth guess is half-way.

        Args:
            limit_bytes: what may be held.
            batch_limit: the largest to try.
        """
        for turn in count(1):
            fit = self._largest_fit(limit_bytes)
            above = [b for b in self._misses(limit_bytes) if b > fit]
            miss = min(above) if above else self._first_beyond(limit_bytes, fit, batch_limit)
            if miss - fit <= 1 or fit >= batch_limit:
                return min(fit, batch_limit)
            guess = (fit + miss) // 2 if turn % 4 == 0 else self.guess(limit_bytes, miss - 1)
            guess = min(max(guess, fit + 1), miss - 1, batch_limit)
            if guess == fit + 1:  # if it misses, that is the end, and how is asked for next
                self.within(guess, limit_bytes)
            else:
                self.without_limit(guess)
        raise AssertionError("unreachable: each turn closes in")

    def _note(self, batch_size: int, peaks: AllocatorPeaks) -> None:
        self._unlimited[batch_size] = peaks
        self._anywhere[batch_size] = peaks.peak_reserved_bytes

    def _largest_fit(self, limit_bytes: int) -> int:
        unlimited = self._unlimited.items()
        fits = (b for b, peaks in unlimited if peaks.peak_reserved_bytes <= limit_bytes)
        return max(fits, default=SMALLEST - 1)

    def _misses(self, limit_bytes: int) -> list[int]:
        unlimited = self._unlimited.items()
        return [
            *(b for b, peaks in unlimited if peaks.peak_reserved_bytes > limit_bytes),
            *(b for b, limit in self._missed if limit >= limit_bytes),
        ]

    def _first_beyond(self, limit_bytes: int, fit: int, batch_limit: int) -> int:
        """The first batch above one that fits with more in use at once than the limit.

        What is in use is affine in the batch, but for rounding: the line through two batches tells
        nearly where it is.
        """
        miss = batch_limit + 1
        if miss - fit <= 1:
            return miss
        least, most = self._in_use(SMALLEST), self._in_use(batch_limit)
        if most <= limit_bytes:
            return miss
        rise = max((most - least) / max(batch_limit - SMALLEST, 1), 1.0)
        guess, step = SMALLEST + int((limit_bytes - least) / rise), 1
        has_fitted = has_missed = False
        while miss - fit > 1:
            is_between = has_fitted and has_missed
            middle = (fit + miss) // 2 if is_between else min(max(guess, fit + 1), miss - 1)
            if self._in_use(middle) > limit_bytes:
                miss, has_missed, guess = middle, True, middle - step
            else:
                fit, has_fitted, guess = middle, True, middle + step
            step *= 2
        return miss

    def guess(self, limit_bytes: float, without: int) -> int:
        """The batch that holds as much as the limit, by the replays there are; else ``without``."""
        held = dict(self._anywhere)
        if not held:
            return without
        near = min(held, key=lambda b: abs(held[b] - limit_bytes))
        if len(held) == 1:
            held[SMALLEST] = self._in_use(SMALLEST)
        rise = np.polyfit(list(held), list(held.values()), 1)[0] if len(held) > 1 else 0.0
        return without if rise <= 0 else int(near + (limit_bytes - held[near]) // rise)
