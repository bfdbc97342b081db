"""Batch sizes that fit a memory limit, with few replays: each takes a tenth of a second."""

from collections.abc import Callable, MutableMapping
from itertools import count

import numpy as np

from trials.simulation.memory.blocks import AllocatorPeaks
from trials.simulation.trace_request import SMALLEST

Replay = Callable[[int, int | None], AllocatorPeaks]


class Replays:
    """Replays of a cell's steps on all GPUs whose libraries hold the same memory.

    A replay without a limit holds for every limit above its peak. A batch that fits also fits in
    more memory, and smaller batches fit too; a batch that misses also misses in less memory, and
    larger batches miss too.

    Args:
        replay: replays steps of a batch size under a limit in bytes; None for no limit.
        in_use: peak bytes in use at a batch size, computed without a replay.
        held_elsewhere: peak bytes held by batch size, with libraries of slightly other sizes: a
            basis for guesses, shared by all instances. Replays are added to it.
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
        """Peaks of steps of a batch size in unlimited memory."""
        if batch_size not in self._unlimited:
            self._note(batch_size, self._replay(batch_size, None))
        return self._unlimited[batch_size]

    def within(self, batch_size: int, limit_bytes: int) -> AllocatorPeaks:
        """Peaks of steps of a batch size under a memory limit."""
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
        """Whether this batch size itself was replayed."""
        return batch_size in self._unlimited

    def fits(self, batch_size: int, limit_bytes: int) -> bool | None:
        """Whether earlier replays imply that a batch size fits without a retry; None for unknown.

        Peaks are not quite monotone in the batch size: a larger fit outweighs a smaller miss.
        """
        largest = self._largest_fit(limit_bytes)
        if batch_size <= largest and largest >= SMALLEST:
            return True
        smallest = min((b for b in self._misses(limit_bytes) if b > largest), default=None)
        return False if smallest is not None and batch_size >= smallest else None

    def largest(self, limit_bytes: int, batch_limit: int) -> int:
        """Largest batch size from ``SMALLEST`` on that fits without a retry; else one less.

        It fits, and one more example does not, unless it is the limit. Held memory is nearly affine
        in the batch size, so guesses follow the line through all replays from the nearest one.
        Every fourth guess bisects, because held memory is not exactly affine.

        Args:
            limit_bytes: memory limit.
            batch_limit: largest batch size to try.
        """
        for attempt in count(1):
            fit = self._largest_fit(limit_bytes)
            above = [b for b in self._misses(limit_bytes) if b > fit]
            miss = min(above) if above else self._first_beyond(limit_bytes, fit, batch_limit)
            if miss - fit <= 1 or fit >= batch_limit:
                return min(fit, batch_limit)
            guess = (fit + miss) // 2 if attempt % 4 == 0 else self.guess(limit_bytes, miss - 1)
            guess = min(max(guess, fit + 1), miss - 1, batch_limit)
            if guess == fit + 1:  # a miss here ends the search, and its outcome is needed next
                self.within(guess, limit_bytes)
            else:
                self.without_limit(guess)
        raise AssertionError("unreachable: each attempt narrows the interval")

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
        """First batch size above a fit whose memory in use exceeds the limit.

        Memory in use is affine in the batch size except for rounding, so the line through two batch
        sizes gives nearly the answer.
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
        """Batch size that holds ``limit_bytes`` by the line through all replays, or ``without``."""
        held = dict(self._anywhere)
        if not held:
            return without
        near = min(held, key=lambda b: abs(held[b] - limit_bytes))
        if len(held) == 1:
            held[SMALLEST] = self._in_use(SMALLEST)
        rise = np.polyfit(list(held), list(held.values()), 1)[0] if len(held) > 1 else 0.0
        return without if rise <= 0 else int(near + (limit_bytes - held[near]) // rise)
