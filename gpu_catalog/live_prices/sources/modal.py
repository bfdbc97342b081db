"""Prices of Modal, from its page of prices; no account is needed.

Modal bills a GPU, the cores and the memory of its container apart, by the second. A price here is
that of a GPU with a stated container. Functions may be interrupted and are restarted then.
"""

import datetime as dt
import html
import re
from collections.abc import Iterator

from gpu_catalog.live_prices.sources.http_reply import reply_lines
from gpu_catalog.live_prices.sources.raw_offer import RawOffer, SourceError, SourceReply

BASE_URL = "https://modal.com"
CORES, MEMORY_GIB = 4, 32  # of the container, for each GPU
COUNTS = (1, 2, 4, 8)
MOST_GPUS = {"A10": 4}  # of a container; 8 of the others (modal.com/docs/guide/gpu)
TAG = re.compile(r"<(script|style).*?</\1>|<[^>]*>", re.DOTALL)
GPU = re.compile(
    r"Nvidia ((?:[A-Z]+\d+[A-Z]*|RTX PRO \d+)(?:, (?:40|80) GB)?) \$ ?(0\.\d+) / sec", re.IGNORECASE
)
CORE = re.compile(r"\$ ?(0\.\d+) / core / sec")
GIB = re.compile(r"\$ ?(0\.\d+) / GiB / sec")


class Modal:
    """Modal's page of prices as a source."""

    name = "modal"

    def __init__(self, today: dt.date, base_url: str = BASE_URL) -> None:
        self._today = today
        self._base_url = base_url

    def fetch(self) -> SourceReply:
        """Fetch the prices.

        Raises:
            SourceError: the page does not answer, or its prices cannot be read.
        """
        url = f"{self._base_url}/pricing"
        with reply_lines(url) as lines:
            text = " ".join(html.unescape(TAG.sub(" ", lines.read())).split())
        gpus, core, gib = dict(GPU.findall(text)), CORE.search(text), GIB.search(text)
        if not gpus or core is None or gib is None:
            raise SourceError(f"{url} has no prices per second in the form that it used to have")
        container = CORES * float(core[1]) + MEMORY_GIB * float(gib[1])
        offers = [
            raw for name, usd in gpus.items() for raw in self._offers(name, float(usd) + container)
        ]
        return SourceReply(offers)

    def _offers(self, name: str, usd_per_second: float) -> Iterator[RawOffer]:
        model, _, memory = name.partition(", ")
        for gpus in COUNTS:
            if gpus <= MOST_GPUS.get(model, max(COUNTS)):
                yield RawOffer(
                    provider="modal",
                    region="all regions",
                    instance=f"{name.replace(', ', '-').replace(' ', '-')}:{gpus}",
                    gpus=gpus,
                    price=gpus * usd_per_second * 3600,
                    market="on-demand",
                    source="modal: pricing",
                    gpu_name=model,
                    gpu_memory_gib=float(memory.removesuffix(" GB")) if memory else None,
                    host_memory_gib=gpus * MEMORY_GIB,
                    as_of=self._today,
                    first_hand=True,
                    note=f"with {CORES} cores and {MEMORY_GIB} GiB for each GPU; may be "
                    "interrupted and is restarted then",
                )
