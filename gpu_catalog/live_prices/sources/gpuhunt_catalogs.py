"""Prices from gpuhunt: the catalogs it publishes daily, and providers it queries live.

gpuhunt is an optional extra. ``GPUHUNT_CATALOG_DIR`` names a folder of catalogs,
``GPUHUNT_CATALOG_URL`` another server. A live provider is queried if it needs no key, or if its key
is in the environment variable that gpuhunt expects.
"""

import datetime as dt
import importlib
import logging
import os
import pkgutil
import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpu_catalog.live_prices.sources.raw_offer import RawOffer, SourceError, SourceReply

# This project's names by gpuhunt's.
PROVIDERS = {"datacrunch": "verda", "digitalocean": "do", "lambdalabs": "lambda", "vastai": "vast"}
# Sold by reservation or as several machines, so a single job cannot rent them.
NOT_RENTED_ALONE = frozenset({"gcp-dws-calendar-mode", "runpod-cluster"})
SECONDS = 30.0  # without a byte, until a request fails; gpuhunt sets no timeout
MOST_WARNINGS = 5
ZONE_OF_GOOGLE = re.compile(r"-[a-z0-9]*[a-z]$")
"""End of a zone's name, as in us-central1-a; what stands before it is the region."""
GIB_OF_LAMBDA = 1.074  # of gpuhunt's "GB"
DATE = re.compile(r"(\d{4})-?(\d{2})-?(\d{2})")


class GpuhuntCatalogs:
    """gpuhunt as a source; ``live`` also queries the providers without a published catalog."""

    name = "gpuhunt"

    def __init__(self, today: dt.date, *, live: bool = True) -> None:
        self._today = today
        self._live = live

    def fetch(self) -> SourceReply:
        """Fetch all prices of GPUs.

        Raises:
            SourceError: gpuhunt is not installed, or no catalog can be loaded.
        """
        try:
            gpuhunt = importlib.import_module("gpuhunt")
        except ImportError:
            raise SourceError("is not installed: pip install '.[prices]'") from None
        folder = os.environ.get("GPUHUNT_CATALOG_DIR")
        with _captured_log() as messages:
            if folder is not None:
                offers = list(self._in_folder(gpuhunt, Path(folder), messages))
            else:
                offers = list(self._published(gpuhunt))
                if self._live:
                    offers += self._live_offers(gpuhunt, messages)
        return SourceReply(offers, _first(messages))

    def _published(self, gpuhunt: Any) -> Iterator[RawOffer]:
        catalog = gpuhunt.Catalog(auto_reload=False)
        try:
            catalog.load()
        except gpuhunt.GPUHuntError:
            raise SourceError(
                "no catalog could be loaded: check the network, or set GPUHUNT_CATALOG_DIR to a "
                "folder of catalogs"
            ) from None
        for provider, published in sorted(catalog.catalog.items()):
            source = f"gpuhunt: {provider} catalog {published.version}"
            yield from _raw(published.items, source, _date_of(published.version))

    def _in_folder(self, gpuhunt: Any, folder: Path, messages: list[str]) -> Iterator[RawOffer]:
        files = sorted(folder.glob("*.csv"))
        if not files:
            raise SourceError(f"GPUHUNT_CATALOG_DIR: {folder} has no catalogs (PROVIDER.csv)")
        catalog = gpuhunt.Catalog(auto_reload=False)
        for file in files:
            try:
                items = catalog.query(provider=file.stem)
            except (OSError, ValueError) as error:
                messages.append(f"{file}: cannot be read ({error})")
                continue
            written = dt.datetime.fromtimestamp(file.stat().st_mtime, tz=dt.UTC).date()
            yield from _raw(items, f"gpuhunt: {file.name}", written)

    def _live_offers(self, gpuhunt: Any, messages: list[str]) -> Iterator[RawOffer]:
        for kind in _live_providers():
            try:
                items = kind.from_env().get(gpuhunt.QueryFilter(min_gpu_count=1))
            except gpuhunt.MissingCredsError:
                continue
            except Exception as error:  # noqa: BLE001 - a provider's code may raise anything
                # Its message may repeat the request, and with it a key.
                messages.append(f"{kind.NAME} does not answer ({type(error).__name__})")
                continue
            yield from _raw(items, f"gpuhunt: {kind.NAME}, queried live", self._today)


def _live_providers() -> Iterator[Any]:
    """Providers that are asked live; Vast.ai is a source of its own."""
    providers = importlib.import_module("gpuhunt.providers")
    online = importlib.import_module("gpuhunt.providers.base").OnlineProvider
    left_out = (online, importlib.import_module("gpuhunt.providers.vastai").VastAIProvider)
    for module in pkgutil.iter_modules(providers.__path__, f"{providers.__name__}."):
        try:
            provider = importlib.import_module(module.name)
        except ImportError:
            continue  # the provider's own library is not installed
        for kind in vars(provider).values():
            if isinstance(kind, type) and issubclass(kind, online) and kind not in left_out:
                yield kind


def _raw(items: Iterable[Any], source: str, as_of: dt.date | None) -> Iterator[RawOffer]:
    for item in items:
        if not item.gpu_count or NOT_RENTED_ALONE & set(item.flags):
            continue
        is_zone = item.provider == "gcp"  # whose prices are those of regions
        yield RawOffer(
            provider=PROVIDERS.get(item.provider, item.provider),
            region=ZONE_OF_GOOGLE.sub("", item.location) if is_zone else item.location,
            instance=item.instance_name,
            gpus=item.gpu_count,
            price=item.price,
            market="spot" if item.spot else "on-demand",
            source=source,
            gpu_name=item.gpu_name,
            gpu_memory_gib=item.gpu_memory,
            host_cpus=item.cpu,
            host_memory_gib=_host_memory(item),
            as_of=as_of,
        )


def _host_memory(item: Any) -> float | None:
    """Memory of an instance in GiB; catalogs write 0 for an unknown one.

    gpuhunt has the figures of the providers, but those of Lambda in 10^9 bytes.
    """
    unit = GIB_OF_LAMBDA if item.provider == "lambdalabs" else 1.0
    return item.memory / unit if item.memory else None


def _date_of(version: str) -> dt.date | None:
    match = DATE.match(version)
    try:
        return None if match is None else dt.date(*map(int, match.groups()))
    except ValueError:
        return None


@contextmanager
def _captured_log() -> Iterator[list[str]]:
    """Warnings that gpuhunt logs, one line each instead of tracebacks; sets a socket timeout."""
    lines: list[str] = []

    class LogCapture(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(" ".join(record.getMessage().split()))

    logger, capture = logging.getLogger("gpuhunt"), LogCapture(logging.WARNING)
    propagate, timeout = logger.propagate, socket.getdefaulttimeout()
    logger.addHandler(capture)
    logger.propagate = False
    socket.setdefaulttimeout(SECONDS)
    try:
        yield lines
    finally:
        socket.setdefaulttimeout(timeout)
        logger.propagate = propagate
        logger.removeHandler(capture)


def _first(lines: list[str]) -> list[str]:
    more = len(lines) - MOST_WARNINGS
    return lines[:MOST_WARNINGS] + ([f"{more} more warnings"] if more > 0 else [])
