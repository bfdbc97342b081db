"""Prices of RunPod's community cloud, from its public API; no account is needed.

gpuhunt lists the secure cloud: RunPod's own data centres. Hosts of the community are others.
"""

import datetime as dt
from collections.abc import Iterator
from typing import Any

from gpu_catalog.live_prices.sources.http_reply import json_reply
from gpu_catalog.live_prices.sources.raw_offer import RawOffer, SourceError, SourceReply

BASE_URL = "https://api.runpod.io"
FIELDS = "id memoryInGb communityCloud communityPrice maxGpuCountCommunityCloud"
PODS = (1, 2, 4, 8)  # GPUs of a pod; RunPod prices in proportion to their number


class RunpodCommunity:
    """RunPod's API as a source."""

    name = "runpod-community"

    def __init__(self, today: dt.date, base_url: str = BASE_URL) -> None:
        self._today = today
        self._base_url = base_url

    def fetch(self) -> SourceReply:
        """Fetch the prices.

        Raises:
            SourceError: the API does not answer, or not as it used to.
        """
        url = f"{self._base_url}/graphql"
        reply = json_reply(url, {"query": f"{{ gpuTypes {{ {FIELDS} }} }}"})
        try:
            kinds = reply["data"]["gpuTypes"]
            return SourceReply([raw for kind in kinds for raw in self._offers(kind)])
        except (KeyError, TypeError, ValueError) as error:
            raise SourceError(f"{url} answers in another form ({error!r})") from None

    def _offers(self, kind: dict[str, Any]) -> Iterator[RawOffer]:
        # The price of a GPU that the community does not have is a placeholder.
        if not kind["communityCloud"]:
            return
        for gpus in PODS:
            if gpus <= int(kind["maxGpuCountCommunityCloud"]):
                yield RawOffer(
                    provider="runpod-community",
                    region="all regions",
                    instance=f"{gpus}x {kind['id']}",
                    gpus=gpus,
                    price=gpus * float(kind["communityPrice"]),
                    market="on-demand",
                    source="runpod-community: API",
                    gpu_name=kind["id"],
                    gpu_memory_gib=float(kind["memoryInGb"]),
                    as_of=self._today,
                    first_hand=True,
                    note="machines of other hosts; RunPod sets the price",
                )
