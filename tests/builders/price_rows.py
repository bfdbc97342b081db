"""Builders of raw offers, offers and price sources."""

import datetime as dt
from collections.abc import Iterable, Sequence
from typing import Any

from gpu_catalog.catalog import load_catalog
from gpu_catalog.live_prices.refresh import Refreshed, refresh
from gpu_catalog.live_prices.sources.raw_offer import RawOffer, SourceError, SourceReply
from gpu_catalog.offer import Offer

TODAY = dt.date(2026, 11, 23)


def raw(**fields: Any) -> RawOffer:
    """An L40S for 1.50 $/h from a made-up provider, with these fields changed."""
    stated: dict[str, Any] = {
        "provider": "acme",
        "region": "moon",
        "instance": "l40s.1",
        "gpus": 1,
        "price": 1.5,
        "market": "on-demand",
        "source": "fake: a test",
        "gpu_name": "L40S",
        "gpu_memory_gib": 48.0,
        "as_of": TODAY,
    }
    return RawOffer(**stated | fields)


def elsewhere(*prices: float, **fields: Any) -> list[RawOffer]:
    """The same GPU at other providers, one for each price."""
    return [
        raw(provider=f"other{number}", price=price, **fields)
        for number, price in enumerate(prices, start=1)
    ]


def offer(**fields: Any) -> Offer:
    """An offer of a refreshed table."""
    stated: dict[str, Any] = {
        "gpu": "L40S",
        "provider": "acme",
        "region": "moon",
        "instance": "l40s.1",
        "usd_per_hour": 1.5,
        "as_of": TODAY,
        "recorded": TODAY,
        "source": "fake: a test",
    }
    return Offer.model_validate(stated | fields)


class FakeSource:
    """A source with a fixed reply, or an error."""

    def __init__(
        self,
        offers: Sequence[RawOffer] = (),
        name: str = "fake",
        fails: str | None = None,
        warnings: Sequence[str] = (),
        *,
        regions_apart: bool = False,
    ) -> None:
        self.name = name
        self._fails = fails
        self._reply = SourceReply(offers, warnings, regions_apart=regions_apart)

    def fetch(self) -> SourceReply:
        if self._fails is not None:
            raise SourceError(self._fails)
        return self._reply


def refreshed(offers: Iterable[RawOffer], last: Sequence[Offer] = ()) -> Refreshed:
    """Result of a refresh with these prices and an empty catalog."""
    catalog = type(load_catalog())(load_catalog().gpus, ())
    return refresh([FakeSource(list(offers))], catalog, last, TODAY)
