"""Change of prices since they were recorded. Pure."""

import datetime as dt
import hashlib
import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache

import numpy as np

from fitting.numerics.arrays import FloatArray
from fitting.numerics.uncertainty import NORMAL_90
from gpu_catalog.catalog import Catalog
from gpu_catalog.live_prices.price_checks import MARKETPLACES
from gpu_catalog.offer import Offer
from orchestrator.pricing.catalog_file import OWN
from orchestrator.pricing.rental_cost import Billing, Hours, billing
from orchestrator.spec.job import Overheads

# Multiples of ``Overheads.price_drift``. That of a marketplace's asks is estimated as it is, from
# prices of 2026-07-23 and 2026-10-01 (tests/benchmarks/price_drift.py).
MARKETPLACE_FACTOR = 3.5
# Architectures whose GPUs were first rented in 2025. In those ten weeks their price lists moved as
# those of older GPUs, but nearly all of them upwards, and some doubled within a year: that is the
# upper end of a 90 % interval. An assumption, not an estimate.
YOUNG = frozenset({"Blackwell", "CDNA 4"})
YOUNG_FACTOR = 2.4
A_MONTH = 30.0  # days in which a price changes by the drift of ``Overheads``
LEAST_DAYS = 1.0  # age of a price of today, whose hour is unknown


def young_gpus(catalog: Catalog) -> frozenset[str]:
    """Keys of the GPUs of the newest generations."""
    return frozenset(gpu.key for gpu in catalog.gpus if gpu.architecture in YOUNG)


class PriceDrift:
    """Distribution of prices on the day of a ranking.

    The logarithm of each price follows a random walk of its own since the price was recorded, so
    its standard deviation grows with the square root of the days.

    Args:
        overheads: change of prices in a month.
        today: day of the ranking; None to take prices as they are quoted.
        seed, draws: seed and number of the draws of ``errors``.
        young: keys of the GPUs whose prices move more, as those of a new generation do.
    """

    def __init__(
        self,
        overheads: Overheads,
        today: dt.date | None,
        seed: int,
        draws: int,
        *,
        young: Collection[str] = (),
    ) -> None:
        self._overheads = overheads
        self._young = young
        self._today = today
        self._seed = seed
        self._draws = draws
        self.sigma = cache(self._sigma)
        self.errors = cache(self._errors)
        self.factors = cache(self._factors)
        self.price = cache(self._price)

    def _sigma(self, offer: Offer) -> float:
        """Standard deviation of the logarithm of a price; 0 for a machine that the user owns."""
        if self._today is None or offer.provider == OWN:
            return 0.0
        overheads = self._overheads
        is_spot = offer.market == "spot"
        drift = overheads.spot_price_drift if is_spot else overheads.price_drift
        if offer.gpu in self._young:
            drift = max(drift, YOUNG_FACTOR * overheads.price_drift)
        if offer.provider in MARKETPLACES:
            drift = max(drift, MARKETPLACE_FACTOR * overheads.price_drift)
        days = max(float((self._today - offer.date).days), LEAST_DAYS)
        return drift * math.sqrt(days / A_MONTH)

    def _errors(self, offer: Offer) -> FloatArray:
        """(draws,) errors of the logarithm of a price, the same for every job on the offer."""
        name = f"{self._seed}/{offer.identity}"
        random = np.random.default_rng(int(hashlib.sha256(name.encode()).hexdigest()[:15], 16))
        return np.asarray(self.sigma(offer) * random.standard_normal(self._draws))

    def _factors(self, offer: Offer) -> FloatArray | None:
        """(draws,) factors of a price; None for one that does not change."""
        return np.exp(self.errors(offer)) if self.sigma(offer) else None

    def _price(self, offer: Offer) -> "OfferPrice":
        """Price of an offer, with its change."""
        return OfferPrice(offer, billing(offer), self.sigma(offer), self)


@dataclass(frozen=True, slots=True)
class OfferPrice:
    """Price of an offer. Thousands of jobs ask for its parts, and each look-up by an offer is slow.

    Attributes:
        sigma: standard deviation of the logarithm of the price since it was recorded.
    """

    offer: Offer
    billing: Billing
    sigma: float
    drift: PriceDrift

    def usd(self, hours: Hours) -> Hours:
        """Dollars for hours, as they are billed."""
        return self.billing.charged(hours) * self.offer.usd_per_hour


def sigma_of(error: float) -> float:
    """Standard deviation of the logarithm of a value whose 90 % interval is a relative error."""
    return math.log1p(error) / NORMAL_90


def widened(value: float, low: float, high: float, sigma: float) -> tuple[float, float]:
    """90 % interval of a value with a further, independent error, such as that of a price.

    Distances of the ends from the value, in logarithms, add in quadrature on either side.

    Args:
        value: the value, above zero.
        low: lower end without the further error.
        high: upper end without the further error.
        sigma: standard deviation of the logarithm of the further error.
    """
    if sigma == 0.0:
        return low, high
    move = NORMAL_90 * sigma
    down, up = math.log(value / low), math.log(high / value)
    return value * math.exp(-math.hypot(down, move)), value * math.exp(math.hypot(up, move))
