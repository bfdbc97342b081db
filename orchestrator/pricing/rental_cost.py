"""What renting for a job comes to: start-up, checkpoints, interruptions, billing. Pure.

Hours are wall-clock time. Every function takes arrays, for draws of what is not known, or numbers.
"""

import math
from dataclasses import dataclass

import numpy as np

from fitting.numerics.arrays import FloatArray
from orchestrator.spec.job import HOURS_PER_DAY, MINUTES_PER_HOUR, SECONDS_PER_HOUR, Overheads


@dataclass(frozen=True, slots=True)
class Rental:
    """What a job is charged for.

    Attributes:
        hours: expected, start-up, checkpoints and work done twice included.
        checkpoint_minutes: of work between two checkpoints.
    """

    hours: FloatArray
    checkpoint_minutes: float


def rental(steps_hours: FloatArray, overheads: Overheads, *, spot: bool) -> Rental:
    """The hours to be paid for.

    Args:
        steps_hours: hours of the steps alone; the first is what is expected, and what the interval
            between checkpoints is chosen for.
        overheads: beside them.
        spot: whether the instance may be taken away.
    """
    startup = overheads.startup_minutes / MINUTES_PER_HOUR
    checkpoint = overheads.checkpoint_seconds / SECONDS_PER_HOUR
    rate = overheads.interruptions_per_day / HOURS_PER_DAY if spot else 0.0
    if rate == 0.0:
        interval = overheads.checkpoint_minutes / MINUTES_PER_HOUR
        written = np.floor(steps_hours / interval) * checkpoint
        return Rental(np.asarray(startup + steps_hours + written), overheads.checkpoint_minutes)
    interval = best_interval(rate, checkpoint)
    # A job shorter than that writes none before its end.
    expected = float(steps_hours[0])
    interval = min(interval, expected) if expected > 0 else interval
    worked = interrupted_hours(steps_hours, rate, checkpoint, startup, interval)
    return Rental(np.asarray(startup + worked), interval * MINUTES_PER_HOUR)


def interrupted_hours(
    steps_hours: FloatArray, rate: float, checkpoint: float, restart: float, interval: float
) -> FloatArray:
    """Expected hours of work that is interrupted at random, and goes on from its last checkpoint.

    ``T / tau * exp(rate R) * (exp(rate (tau + C)) - 1) / rate`` (Daly, Future Generation Computer
    Systems 22, 2006, his complete model): intervals of ``tau`` hours of work and a checkpoint of
    ``C`` that each start anew until they are through, ``R`` hours later each time.

    Args:
        steps_hours: T.
        rate: interruptions an hour; they strike a restart, too.
        checkpoint: C.
        restart: R.
        interval: tau.
    """
    tries = math.expm1(rate * (interval + checkpoint)) * math.exp(rate * restart) / rate
    return np.asarray(steps_hours / interval * tries)


def best_interval(rate: float, checkpoint: float) -> float:
    """Hours of work between checkpoints for which ``interrupted_hours`` are fewest.

    The root of ``(1 - rate tau) exp(rate (tau + C)) = 1``. Near it is Young's ``sqrt(2 C / rate)``
    (Communications of the ACM 17, 1974). It depends on no restart.
    """
    if checkpoint == 0.0:
        return 1e-3  # free ones are written all the time
    scaled = rate * checkpoint
    low, high = 0.0, 1.0  # of rate * tau
    for _ in range(200):
        middle = (low + high) / 2
        is_left = math.log1p(-middle) + middle + scaled > 0 if middle < 1 else False
        low, high = (middle, high) if is_left else (low, middle)
    return low / rate


def charged_hours(hours: float, minimum_minutes: float | None) -> float:
    """Hours on the bill: rented by the second, a minimum at least; none where none is known."""
    return max(hours, (minimum_minutes or 0.0) / MINUTES_PER_HOUR)
