"""Asks of the marketplace Vast.ai, from its public search; no account is needed.

gpuhunt asks Vast.ai, too, but its names of GPUs do not tell SXM from PCIe.
"""

import datetime as dt
from collections.abc import Iterator
from typing import Any

from gpu_catalog.live_prices.sources.http_reply import json_reply
from gpu_catalog.live_prices.sources.raw_offer import RawOffer, SourceError, SourceReply

BASE_URL = "https://console.vast.ai"
MOST_ASKS = 3000  # of some 2000 that are open at a time
SEARCH = {
    "rentable": {"eq": True},
    "rented": {"eq": False},
    "verified": {"eq": True},
    "order": [["dph_total", "asc"]],
    "limit": MOST_ASKS,
}


class Vast:
    """Vast.ai's search as a source: asks of verified hosts, on demand and interruptible."""

    name = "vast"

    def __init__(self, today: dt.date, base_url: str = BASE_URL) -> None:
        self._today = today
        self._base_url = base_url

    def fetch(self) -> SourceReply:
        """Fetch the asks.

        Raises:
            SourceError: the search does not answer, or not as it used to.
        """
        url = f"{self._base_url}/api/v0/bundles/"
        reply = json_reply(url, SEARCH)
        try:
            return SourceReply([raw for ask in reply["offers"] for raw in self._offers(ask)])
        except (KeyError, TypeError, ValueError) as error:
            raise SourceError(f"{url} answers in another form ({error!r})") from None

    def _offers(self, ask: dict[str, Any]) -> Iterator[RawOffer]:
        gpus = int(ask["num_gpus"])
        base, total = float(ask["dph_base"]), float(ask["dph_total"])
        prices = {"on-demand": total}
        if ask.get("min_bid"):
            prices["spot"] = float(ask["min_bid"]) + total - base  # the disk costs the same
        for market, price in prices.items():
            yield RawOffer(
                provider="vast",
                region=str(ask["geolocation"]),
                instance=f"{gpus}x {ask['gpu_name']}",
                gpus=gpus,
                price=price,
                market="spot" if market == "spot" else "on-demand",
                source="vast: search",
                gpu_name=str(ask["gpu_name"]),
                gpu_memory_gib=float(ask["gpu_ram"]) / 1024,
                as_of=self._today,
                first_hand=True,
                note="a marketplace: the lowest ask at one moment",
            )
