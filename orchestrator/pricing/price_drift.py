"""How far prices may have moved since they were noted. Pure."""

import datetime as dt
import hashlib
import math
from functools import cache

import numpy as np

from fitting.numerics.arrays import FloatArray
from fitting.numerics.uncertainty import NORMAL_90
from gpu_catalog.offer import Offer
from orchestrator.pricing.catalog_file import OWN
from orchestrator.spec.job import Overheads

A_MONTH = 30.0  # days that the drift of ``Overheads`` is of
LEAST_DAYS = 1.0  # a price of today is not known to the hour


class PriceDrift:
    """Prices as they may be on the day that a ranking is of.

    What a price has moved since it was noted is a random walk of its logarithm: its standard
    deviation grows with the square root of the days. Each offer's moves by itself.

    Args:
        overheads: how far they move in a month.
        today: the day; absent to take prices as they are quoted.
        seed, draws: of ``errors``.
    """

    def __init__(self, overheads: Overheads, today: dt.date | None, seed: int, draws: int) -> None:
        self._overheads = overheads
        self._today = today
        self._seed = seed
        self._draws = draws
        self.errors = cache(self._errors)

    def sigma(self, offer: Offer) -> float:
        """Standard deviation of the logarithm of a price; that of a GPU of one's own stays."""
        if self._today is None or offer.provider == OWN:
            return 0.0
        of = self._overheads
        drift = of.spot_price_drift if offer.market == "spot" else of.price_drift
        days = max(float((self._today - offer.date).days), LEAST_DAYS)
        return drift * math.sqrt(days / A_MONTH)

    def _errors(self, offer: Offer) -> FloatArray:
        """(draws,): how far the logarithm of a price is off; alike for every job on the offer."""
        name = f"{self._seed}/{offer.identity}"
        random = np.random.default_rng(int(hashlib.sha256(name.encode()).hexdigest()[:15], 16))
        return np.asarray(self.sigma(offer) * random.standard_normal(self._draws))


def widened(value: float, low: float, high: float, sigma: float) -> tuple[float, float]:
    """The 90 % interval of dollars: that of the hours, and of an independent error of the price.

    Distances from the value, of logarithms, add in quadrature on either side.

    Args:
        value: dollars, above zero.
        low: the lower end where the price is as quoted.
        high: the upper end.
        sigma: standard deviation of the logarithm of the price.
    """
    if sigma == 0.0:
        return low, high
    move = NORMAL_90 * sigma
    down, up = math.log(value / low), math.log(high / value)
    return value * math.exp(-math.hypot(down, move)), value * math.exp(math.hypot(up, move))
