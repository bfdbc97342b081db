"""Prices of Hugging Face Jobs, from its public API; no account is needed."""

import datetime as dt
from typing import Any

from gpu_catalog.live_prices.sources.http_reply import json_reply
from gpu_catalog.live_prices.sources.raw_offer import RawOffer, SourceError, SourceReply

BASE_URL = "https://huggingface.co"
PER_HOUR = {"second": 3600, "minute": 60, "hour": 1}


class HuggingFaceJobs:
    """The hardware of Hugging Face Jobs as a source."""

    name = "hf-jobs"

    def __init__(self, today: dt.date, base_url: str = BASE_URL) -> None:
        self._today = today
        self._base_url = base_url

    def fetch(self) -> SourceReply:
        """Fetch the prices.

        Raises:
            SourceError: the API does not answer, or not as it used to.
        """
        url = f"{self._base_url}/api/jobs/hardware"
        reply = json_reply(url)
        try:
            return SourceReply([self._offer(flavor) for flavor in reply if flavor["accelerator"]])
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise SourceError(f"{url} answers in another form ({error!r})") from None

    def _offer(self, flavor: dict[str, Any]) -> RawOffer:
        accelerator = flavor["accelerator"]
        gpus = int(accelerator["quantity"])
        return RawOffer(
            provider="hf-jobs",
            region="not stated",
            instance=flavor["name"],
            gpus=gpus,
            price=flavor["unitCostMicroUSD"] / 1e6 * PER_HOUR[flavor["unitLabel"]],
            market="on-demand",
            source="hf-jobs: API",
            gpu_name=accelerator["model"],
            gpu_memory_gib=float(accelerator["vram"].removesuffix("GB")) / gpus,
            as_of=self._today,
            first_hand=True,
        )
