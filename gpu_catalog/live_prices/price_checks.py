"""Checks of listed prices against the known errors of price catalogs.

``invalid_price_reason`` looks at one price: missing, zero, negative, in another currency, of a GPU
without its host, or too old. ``check_offers`` compares prices: spot at or above on demand, and
prices far below those elsewhere.

A low price may be an error or the best offer. A plain limit of 60 % of the median elsewhere rejects
six of the 73 shipped prices, among them the cheapest H100, H200, A100 and L40S, and none of the six
is known to be wrong. So three kinds of low price are accepted:

- a provider's own (``first_hand``): no catalog can have garbled it;
- a marketplace's: its hosts do undercut data centres, and they do not count in the median;
- one that the provider also asks per GPU for another number of GPUs in the same region, down to a
  quarter of the median: the price of one GPU on a row of eight disagrees with its neighbours.
"""

import datetime as dt
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from gpu_catalog.live_prices.sources.raw_offer import RawOffer
from gpu_catalog.number_text import short
from gpu_catalog.offer import Name, Offer

Key = TypeVar("Key", bound=Hashable)

FAR_BELOW = 0.60  # of the median elsewhere
LEAST_CONFIRMED = 0.25  # of the median: lower prices are rejected even if confirmed
LEAST_ELSEWHERE = 3  # providers, or regions, that make a median
EQUAL_WITHIN = 0.10  # relative difference of prices per GPU that count as equal
OLDEST_DAYS = 90
NAME: TypeAdapter[str] = TypeAdapter(Name)
MARKETPLACES = frozenset({"vast", "lium", "tensordock", "cloudrift"})


@dataclass(frozen=True, slots=True)
class SourcedOffer:
    """An offer, and whether the provider itself stated it (``first_hand``)."""

    offer: Offer
    first_hand: bool


@dataclass(frozen=True, slots=True)
class RejectedOffer:
    """An offer that is not used: its description and the reason."""

    description: str
    reason: str

    def __str__(self) -> str:
        return f"{self.description}: rejected: {self.reason}"


def invalid_price_reason(raw: RawOffer, today: dt.date) -> str | None:
    """Reason why a listed price is invalid by itself, or None."""
    reason = _invalid_amount_reason(raw)
    if reason is not None:
        return reason
    if not raw.instance.strip() or raw.host_cpus == 0:
        return "the price is for the GPU alone, without its host"
    if raw.gpus < 1:
        return f"{raw.gpus} GPUs"
    if raw.as_of is not None and (today - raw.as_of).days > OLDEST_DAYS:
        return f"the price is of {age_of(raw.as_of, today)}"
    return next(filter(None, map(_no_name, (raw.provider, raw.region, raw.instance))), None)


def _no_name(text: str) -> str | None:
    """Reason why an offer may not have this name; None where it may, or has none."""
    try:
        NAME.validate_python(text or "not stated")
    except ValidationError:
        return f"{text!r} is no name of a provider, region or instance"
    return None


def age_of(date: dt.date, today: dt.date) -> str:
    """Date of a price that is too old, and its age."""
    return f"{date}, {(today - date).days} days old (at most {OLDEST_DAYS})"


def _invalid_amount_reason(raw: RawOffer) -> str | None:
    """Reason why a price is no amount of US dollars per hour, or None."""
    if raw.price is None or raw.price == "":
        return "no price"
    if raw.currency.upper() != "USD":
        return f"the price is in {raw.currency or 'no currency'}, not in US dollars"
    try:
        price = float(raw.price)
    except ValueError:
        price = math.nan
    if not math.isfinite(price):
        return f"the price {raw.price!r} is not a number"
    if price == 0:
        return f"{market_text(raw.market)} price 0, which means that it is unknown"
    return f"the price {price:g} is less than 0" if price < 0 else None


def market_text(market: str) -> str:
    """Name of a market in messages."""
    return market.replace("-", " ")


def offer_text(offer: Offer) -> str:
    """Description of an offer in messages."""
    several = f" ({offer.gpus_per_instance} GPUs)" if offer.gpus_per_instance > 1 else ""
    return (
        f"{offer.provider} {offer.instance}{several} {offer.region} {market_text(offer.market)}, "
        f"{offer.gpu}, {short(offer.usd_per_hour, 4)} $/h"
    )


def check_offers(
    candidates: Sequence[SourcedOffer], references: Iterable[Offer]
) -> tuple[list[Offer], list[RejectedOffer]]:
    """Accepted candidates, and rejected ones; ``references`` count in the medians as well."""
    reasons = _compare_with_on_demand([candidate.offer for candidate in candidates])
    left = [candidate for candidate in candidates if candidate.offer not in reasons]
    reasons |= _far_below(left, [*(candidate.offer for candidate in left), *references])
    accepted = [c.offer for c in candidates if c.offer not in reasons]
    return accepted, [RejectedOffer(offer_text(o), reason) for o, reason in reasons.items()]


def _compare_with_on_demand(offers: Sequence[Offer]) -> dict[Offer, str]:
    """Spot prices at or above on demand, and the on-demand prices below a spot price.

    Of a spot price above on demand and that on-demand price one is wrong, and no source says which.
    """
    on_demand = _grouped((o for o in offers if o.market == "on-demand"), _instance)
    reasons: dict[Offer, str] = {}
    for spot in offers:
        if spot.market != "spot" or _instance(spot) not in on_demand:
            continue
        all_regions = on_demand[_instance(spot)]
        here = [o for o in all_regions if o.region == spot.region]
        full = max(here or all_regions, key=lambda o: o.usd_per_hour)
        on_demand_text = f"on demand ({short(full.usd_per_hour, 4)} $/h)"
        if math.isclose(spot.usd_per_hour, full.usd_per_hour, rel_tol=1e-3):
            reasons[spot] = f"as much as {on_demand_text}: there is no spot market"
        elif spot.usd_per_hour > full.usd_per_hour:
            reasons[spot] = f"more than {on_demand_text}: one of the two is wrong"
            if here:
                usd = f"{short(spot.usd_per_hour, 4)} $/h"
                reasons[full] = f"less than spot ({usd}): one of the two is wrong"
    return reasons


def _far_below(candidates: Sequence[SourcedOffer], usual: Sequence[Offer]) -> dict[Offer, str]:
    markets = {key: _Market(offers) for key, offers in _grouped(usual, _market).items()}
    reasons = {
        c.offer: markets[_market(c.offer)].rejection_reason(c.offer)
        for c in candidates
        if not c.first_hand and c.offer.provider not in MARKETPLACES
    }
    return {offer: reason for offer, reason in reasons.items() if reason is not None}


class _Market:
    """Prices of a GPU, either on demand or spot."""

    def __init__(self, offers: Sequence[Offer]) -> None:
        regular = [o for o in offers if o.provider not in MARKETPLACES]
        # One value per provider: a provider with a hundred regions must not dominate the median.
        self._usd_by_provider = {
            provider: median(o.usd_per_gpu_hour for o in group)
            for provider, group in _grouped(regular, lambda o: o.provider).items()
        }
        self._instances = _grouped(regular, _instance)
        self._neighbours = _grouped(regular, lambda o: (o.provider, o.region))

    def rejection_reason(self, offer: Offer) -> str | None:
        """Reason why a price is too low to be right, or None."""
        usd = offer.usd_per_gpu_hour
        regions = [o for o in self._instances[_instance(offer)] if o.region != offer.region]
        # Spot prices do differ that much between regions.
        if offer.market == "on-demand" and len(regions) >= LEAST_ELSEWHERE:
            usual = median(o.usd_per_gpu_hour for o in regions)
            if usd < FAR_BELOW * usual:
                return f"{_share(usd, usual)} in other regions ({short(usual)} $/h)"
        others = [u for name, u in self._usd_by_provider.items() if name != offer.provider]
        if len(others) < LEAST_ELSEWHERE:
            return None
        usual = median(others)
        if usd >= FAR_BELOW * usual or (
            usd >= LEAST_CONFIRMED * usual and self._is_confirmed(offer)
        ):
            return None
        return f"{_share(usd, usual)} of this GPU elsewhere ({short(usual)} $/h)"

    def _is_confirmed(self, offer: Offer) -> bool:
        """Whether the provider asks the same per GPU for another number of GPUs."""
        return any(
            o.gpus_per_instance != offer.gpus_per_instance
            and abs(o.usd_per_gpu_hour / offer.usd_per_gpu_hour - 1) < EQUAL_WITHIN
            for o in self._neighbours[offer.provider, offer.region]
        )


def _share(usd: float, usual: float) -> str:
    return f"{usd / usual:.0%} of the median price per GPU"


def _market(offer: Offer) -> tuple[str, str]:
    return offer.gpu, offer.market


def _instance(offer: Offer) -> tuple[str, str, str, int]:
    return offer.gpu, offer.provider, offer.instance, offer.gpus_per_instance


def _grouped(offers: Iterable[Offer], key: Callable[[Offer], Key]) -> defaultdict[Key, list[Offer]]:
    groups: defaultdict[Key, list[Offer]] = defaultdict(list)
    for offer in offers:
        groups[key(offer)].append(offer)
    return groups
