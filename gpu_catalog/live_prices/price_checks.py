"""The known lies of price catalogs: found, told in a line each, and left out.

What makes no sense alone is told by ``misstated``: no price, zero, less than zero, another
currency, a GPU without its host, too old. What makes no sense beside others is told by ``doubted``:
spot at or above on demand, and prices far under those elsewhere.

A low price is the lie that is hardest to tell from the truth, and the truth is what a user came
for: of the 71 shipped prices a plain "under 60 % of the median elsewhere" leaves out six, all of
them honest as far as is known, and among them the cheapest H100, H200, A100 and L40S. So three are
believed:

- what a provider itself told (``first_hand``): it is not a catalog's mistake;
- a marketplace's: its hosts undercut data centres honestly, and it is no part of what is usual;
- one that the provider asks alike for another number of GPUs in the same region, down to a quarter
  of the median: a price of one GPU on a row of eight does not agree with its neighbours.
"""

import datetime as dt
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from gpu_catalog.live_prices.sources.raw_offer import RawOffer
from gpu_catalog.offer import Identity, Offer

Key = TypeVar("Key", bound=Hashable)

FAR_UNDER = 0.60  # of the median elsewhere
LEAST_CONFIRMED = 0.25  # of it: below, not even a price stated twice is believed
LEAST_ELSEWHERE = 3  # providers, or regions, that make a median
ALIKE = 0.10  # prices per GPU that far apart are the same price
OLDEST_DAYS = 90
MARKETPLACES = frozenset({"vast", "lium", "tensordock", "cloudrift"})


@dataclass(frozen=True, slots=True)
class SourcedOffer:
    """An offer as a source told it.

    Attributes:
        offer: what was made of it.
        first_hand: told by who rents it out.
    """

    offer: Offer
    first_hand: bool


@dataclass(frozen=True, slots=True)
class RejectedOffer:
    """An offer that is left out, and why."""

    what: str
    reason: str

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}: left out"


def invalid_price_reason(raw: RawOffer, today: dt.date) -> str | None:
    """What makes a stated price no price, or None."""
    reason = _no_price(raw)
    if reason is not None:
        return reason
    if not raw.instance.strip() or raw.host_cpus == 0:
        return "the price is of a GPU alone, its host stands on another row"
    if raw.gpus < 1:
        return f"{raw.gpus} GPUs"
    if raw.as_of is not None and (today - raw.as_of).days > OLDEST_DAYS:
        days = (today - raw.as_of).days
        return f"the price is of {raw.as_of}, {days} days old (at most {OLDEST_DAYS})"
    return None


def _no_price(raw: RawOffer) -> str | None:
    """What makes a price none in US dollars per hour, or None."""
    if raw.price is None or raw.price == "":
        return "has no price"
    if raw.currency.upper() != "USD":
        return f"the price is in {raw.currency or 'no currency'}, not in US dollars"
    try:
        price = float(raw.price)
    except ValueError:
        price = math.nan
    if not math.isfinite(price):
        return f"the price {raw.price!r} is no number"
    if price == 0:
        return f"{_words(raw.market)} price 0, which means that it is not known"
    return f"the price {price:g} is less than 0" if price < 0 else None


def _words(market: str) -> str:
    return market.replace("-", " ")


def named(offer: Offer) -> str:
    """What is offered, as a message has it."""
    several = f" ({offer.gpus_per_instance} GPUs)" if offer.gpus_per_instance > 1 else ""
    return (
        f"{offer.provider} {offer.instance}{several} {offer.region} {_words(offer.market)}, "
        f"{offer.gpu}, {offer.usd_per_hour:.4g} $/h"
    )


def rejected_offers(
    told: Sequence[SourcedOffer], others: Iterable[Offer]
) -> tuple[list[Offer], list[RejectedOffer]]:
    """The offers that can be believed, and the others with the reason.

    Args:
        told: to be judged.
        others: believed already: they say what is usual elsewhere.
    """
    doubts = _beside_on_demand([each.offer for each in told])
    left = [each for each in told if each.offer.identity not in doubts]
    doubts |= _far_under(left, [*(each.offer for each in left), *others])
    kept = [each.offer for each in told if each.offer.identity not in doubts]
    return kept, list(doubts.values())


def _beside_on_demand(offers: Sequence[Offer]) -> dict[Identity, RejectedOffer]:
    """Spot prices at or above on demand. Where above, nobody says which of the two is wrong."""
    regular = _by((o for o in offers if o.market == "on-demand"), _instance)
    doubts: dict[Identity, RejectedOffer] = {}
    for spot in offers:
        if spot.market != "spot" or _instance(spot) not in regular:
            continue
        all_regions = regular[_instance(spot)]
        here = [o for o in all_regions if o.region == spot.region]
        full = max(here or all_regions, key=lambda o: o.usd_per_hour)
        if math.isclose(spot.usd_per_hour, full.usd_per_hour, rel_tol=1e-3):
            reason = f"as much as on demand ({full.usd_per_hour:.4g} $/h): there is no spot market"
            doubts[spot.identity] = RejectedOffer(named(spot), reason)
        elif spot.usd_per_hour > full.usd_per_hour:
            reason = f"more than on demand ({full.usd_per_hour:.4g} $/h): one of the two is wrong"
            doubts[spot.identity] = RejectedOffer(named(spot), reason)
            if here:
                reason = f"less than spot ({spot.usd_per_hour:.4g} $/h): one of the two is wrong"
                doubts[full.identity] = RejectedOffer(named(full), reason)
    return doubts


def _far_under(
    told: Sequence[SourcedOffer], usual: Sequence[Offer]
) -> dict[Identity, RejectedOffer]:
    markets = {key: _Market(offers) for key, offers in _by(usual, _market).items()}
    doubts: dict[Identity, RejectedOffer] = {}
    for each in told:
        offer = each.offer
        if each.first_hand or offer.provider in MARKETPLACES:
            continue
        reason = markets[_market(offer)].doubt(offer)
        if reason is not None:
            doubts[offer.identity] = RejectedOffer(named(offer), reason)
    return doubts


class _Market:
    """What a GPU costs, on demand or spot."""

    def __init__(self, offers: Sequence[Offer]) -> None:
        regular = [o for o in offers if o.provider not in MARKETPLACES]
        # A provider with a hundred regions says no more of what is usual than one with two.
        self._of_providers = {
            provider: median(o.usd_per_gpu_hour for o in mine)
            for provider, mine in _by(regular, lambda o: o.provider).items()
        }
        self._instances = _by(regular, _instance)
        self._neighbours = _by(regular, lambda o: (o.provider, o.region))

    def doubt(self, offer: Offer) -> str | None:
        """Why a price is not believed, or None."""
        here = offer.usd_per_gpu_hour
        regions = [o for o in self._instances[_instance(offer)] if o.region != offer.region]
        # Spot prices of regions differ that much honestly.
        if offer.market == "on-demand" and len(regions) >= LEAST_ELSEWHERE:
            usual = median(o.usd_per_gpu_hour for o in regions)
            if here < FAR_UNDER * usual:
                return f"{_share(here, usual)} of it in other regions ({usual:.3g} $/h)"
        others = [usd for name, usd in self._of_providers.items() if name != offer.provider]
        if len(others) < LEAST_ELSEWHERE:
            return None
        usual = median(others)
        if here >= FAR_UNDER * usual or (
            here >= LEAST_CONFIRMED * usual and self._is_confirmed(offer)
        ):
            return None
        return f"{_share(here, usual)} of that GPU elsewhere ({usual:.3g} $/h)"

    def _is_confirmed(self, offer: Offer) -> bool:
        """Whether the provider asks the same per GPU for another number of them."""
        return any(
            o.gpus_per_instance != offer.gpus_per_instance
            and abs(o.usd_per_gpu_hour / offer.usd_per_gpu_hour - 1) < ALIKE
            for o in self._neighbours[offer.provider, offer.region]
        )


def _share(here: float, usual: float) -> str:
    return f"{here / usual:.0%} of the median price per GPU"


def _market(offer: Offer) -> tuple[str, str]:
    return offer.gpu, offer.market


def _instance(offer: Offer) -> tuple[str, str, str, int]:
    return offer.gpu, offer.provider, offer.instance, offer.gpus_per_instance


def _by(offers: Iterable[Offer], key: Callable[[Offer], Key]) -> defaultdict[Key, list[Offer]]:
    groups: defaultdict[Key, list[Offer]] = defaultdict(list)
    for offer in offers:
        groups[key(offer)].append(offer)
    return groups
