"""Hours and billing of a rental: start-up, checkpoints and interruptions. Pure.

Hours are wall-clock time.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np

from fitting.numerics.arrays import FloatArray
from gpu_catalog.offer import Offer
from orchestrator.pricing.billing_terms import billed_seconds, minimum_minutes
from orchestrator.spec.job import HOURS_PER_DAY, MINUTES_PER_HOUR, SECONDS_PER_HOUR, Overheads

Hours = TypeVar("Hours", float, FloatArray)


@dataclass(frozen=True, slots=True)
class Rental:
    """Rental of an instance for a job.

    Attributes:
        hours: (draws,) expected hours, with start-up, checkpoints and repeated work.
        checkpoint_minutes: minutes of work between two checkpoints.
    """

    hours: FloatArray
    checkpoint_minutes: float


def rental(steps_hours: FloatArray, overheads: Overheads, *, spot: bool) -> Rental:
    """Hours to pay for.

    Args:
        steps_hours: (draws,) hours of the steps alone; the first element is the expected value, for
            which the interval between checkpoints is chosen.
        overheads: start-up, checkpoints and interruptions.
        spot: whether the instance may be interrupted.
    """
    startup = overheads.expected_startup_minutes / MINUTES_PER_HOUR
    checkpoint = overheads.expected_checkpoint_seconds / SECONDS_PER_HOUR
    rate = overheads.interruptions_per_day / HOURS_PER_DAY if spot else 0.0
    if rate == 0.0:
        minutes = overheads.on_demand_checkpoint_minutes
        # The last one is the trained model, which the shortest job writes, too.
        written = np.maximum(steps_hours / (minutes / MINUTES_PER_HOUR), 1.0) * checkpoint
        return Rental(np.asarray(startup + steps_hours + written), minutes)
    interval = best_interval(rate, checkpoint)
    # A job shorter than the interval writes its only checkpoint at the end.
    expected = float(steps_hours[0])
    interval = min(interval, expected) if expected > 0 else interval
    worked = interrupted_hours(steps_hours, rate, checkpoint, startup, interval)
    return Rental(np.asarray(startup + worked), interval * MINUTES_PER_HOUR)


def interrupted_hours(
    steps_hours: FloatArray, rate: float, checkpoint: float, restart: float, interval: float
) -> FloatArray:
    """Expected hours of work that random interruptions set back to the last checkpoint.

    ``T / tau * exp(rate R) * (exp(rate (tau + C)) - 1) / rate`` (Daly, Future Generation Computer
    Systems 22, 2006, his complete model): intervals of ``tau`` hours of work and a checkpoint of
    ``C`` that each start anew until they are through, ``R`` hours later each time.

    Args:
        steps_hours: (draws,) T, hours of work.
        rate: interruptions per hour, during a restart too.
        checkpoint: C, hours to write a checkpoint.
        restart: R, hours from an interruption to the next step.
        interval: tau, hours of work between checkpoints.
    """
    tries = math.expm1(rate * (interval + checkpoint)) * math.exp(rate * restart) / rate
    return np.asarray(steps_hours / interval * tries)


@lru_cache(maxsize=64)
def best_interval(rate: float, checkpoint: float) -> float:
    """Hours of work between checkpoints that minimise ``interrupted_hours``.

    The root of ``(1 - rate tau) exp(rate (tau + C)) = 1``. Near it is Young's ``sqrt(2 C / rate)``
    (Communications of the ACM 17, 1974). It does not depend on the restart.
    """
    if checkpoint == 0.0:
        return 1e-3  # a checkpoint that costs nothing is written continually
    scaled = rate * checkpoint
    low, high = 0.0, math.nextafter(1.0, 0.0)  # of rate * tau; at 1 the logarithm is infinite
    for _ in range(200):
        middle = (low + high) / 2
        is_left = math.log1p(-middle) + middle + scaled > 0
        low, high = (middle, high) if is_left else (low, middle)
    return low / rate


class Billing(NamedTuple):
    """Unit of billed hours, by the second where it is not known, and the fewest."""

    unit: float
    least: float

    def charged(self, hours: Hours) -> Hours:
        """Billed hours: whole units."""
        unit, least = self
        is_in_units = unit > 1.0 / SECONDS_PER_HOUR
        # A millionth is no started unit. NumPy takes ten times as long for a single number.
        if isinstance(hours, float):
            return max(math.ceil(hours / unit - 1e-6) * unit if is_in_units else hours, least)
        return np.maximum(np.ceil(hours / unit - 1e-6) * unit if is_in_units else hours, least)


@lru_cache(maxsize=4096)  # an estimate asks several times for each offer
def billing(offer: Offer) -> Billing:
    """Billing of an offer by its provider's terms."""
    unit = (billed_seconds(offer) or 1.0) / SECONDS_PER_HOUR
    return Billing(unit, minimum_minutes(offer) / MINUTES_PER_HOUR)


def charged_hours(hours: Hours, offer: Offer) -> Hours:
    """Billed hours on an offer."""
    return billing(offer).charged(hours)
