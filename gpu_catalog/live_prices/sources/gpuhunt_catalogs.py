"""Prices by gpuhunt: catalogs it publishes each day, and providers it asks live.

gpuhunt is an optional extra. It reads a folder of catalogs where ``GPUHUNT_CATALOG_DIR`` names one,
or another address by ``GPUHUNT_CATALOG_URL``. Providers it asks live are asked when that needs no
key, or when the key is in the environment, as gpuhunt wants it.
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

# What this project calls them.
PROVIDERS = {"datacrunch": "verda", "digitalocean": "do", "lambdalabs": "lambda", "vastai": "vast"}
# Sold by reservation, or several machines at a time: nothing that one job rents.
NOT_RENTED_ALONE = frozenset({"gcp-dws-calendar-mode", "runpod-cluster"})
SECONDS = 30.0  # without a byte, before an address counts as dead; gpuhunt itself waits for ever
MOST_WARNINGS = 5
DATE = re.compile(r"(\d{4})-?(\d{2})-?(\d{2})")


class GpuhuntCatalogs:
    """gpuhunt as a source.

    Args:
        today: the day it is asked.
        live: whether providers are asked that have no published catalog.
    """

    name = "gpuhunt"

    def __init__(self, today: dt.date, *, live: bool = True) -> None:
        self._today = today
        self._live = live

    def fetch(self) -> SourceReply:
        """Every price of a GPU that gpuhunt knows.

        Raises:
            SourceError: it is not installed, or nothing could be loaded.
        """
        try:
            gpuhunt = importlib.import_module("gpuhunt")
        except ImportError:
            raise SourceError("is not installed: pip install '.[prices]'") from None
        folder = os.environ.get("GPUHUNT_CATALOG_DIR")
        with _heard() as heard:
            if folder is not None:
                offers = list(self._in_folder(gpuhunt, Path(folder), heard))
            else:
                offers = list(self._published(gpuhunt))
                if self._live:
                    offers += self._asked_live(gpuhunt, heard)
        return SourceReply(offers, _first(heard))

    def _published(self, gpuhunt: Any) -> Iterator[RawOffer]:
        catalog = gpuhunt.Catalog(auto_reload=False)
        try:
            catalog.load()
        except gpuhunt.GPUHuntError:
            raise SourceError(
                "no catalog could be loaded: look at the network, or name a folder of catalogs by "
                "GPUHUNT_CATALOG_DIR"
            ) from None
        for provider, found in sorted(catalog.catalog.items()):
            source = f"gpuhunt: {provider} catalog {found.version}"
            yield from _raw(found.items, source, _date_of(found.version))

    def _in_folder(self, gpuhunt: Any, folder: Path, heard: list[str]) -> Iterator[RawOffer]:
        files = sorted(folder.glob("*.csv"))
        if not files:
            raise SourceError(f"GPUHUNT_CATALOG_DIR: {folder} has no catalogs (PROVIDER.csv)")
        catalog = gpuhunt.Catalog(auto_reload=False)
        for file in files:
            try:
                items = catalog.query(provider=file.stem)
            except (OSError, ValueError) as error:
                heard.append(f"{file}: cannot be read ({error})")
                continue
            written = dt.datetime.fromtimestamp(file.stat().st_mtime, tz=dt.UTC).date()
            yield from _raw(items, f"gpuhunt: {file.name}", written)

    def _asked_live(self, gpuhunt: Any, heard: list[str]) -> Iterator[RawOffer]:
        for kind in _live_providers():
            try:
                items = kind.from_env().get(gpuhunt.QueryFilter(min_gpu_count=1))
            except gpuhunt.MissingCredsError:
                continue
            except Exception as error:  # noqa: BLE001 - whatever another's code raises is one dead provider
                # Its message may hold the request, and with it a key.
                heard.append(f"{kind.NAME} does not answer ({type(error).__name__})")
                continue
            yield from _raw(items, f"gpuhunt: {kind.NAME}, asked live", self._today)


def _live_providers() -> Iterator[Any]:
    providers = importlib.import_module("gpuhunt.providers")
    online = importlib.import_module("gpuhunt.providers.base").OnlineProvider
    for module in pkgutil.iter_modules(providers.__path__, f"{providers.__name__}."):
        try:
            found = importlib.import_module(module.name)
        except ImportError:
            continue  # its provider's own library is not installed
        for kind in vars(found).values():
            if isinstance(kind, type) and issubclass(kind, online) and kind is not online:
                yield kind


def _raw(items: Iterable[Any], source: str, as_of: dt.date | None) -> Iterator[RawOffer]:
    for item in items:
        if not item.gpu_count or NOT_RENTED_ALONE & set(item.flags):
            continue
        yield RawOffer(
            provider=PROVIDERS.get(item.provider, item.provider),
            region=item.location,
            instance=item.instance_name,
            gpus=item.gpu_count,
            price=item.price,
            market="spot" if item.spot else "on-demand",
            source=source,
            gpu_name=item.gpu_name,
            gpu_memory_gib=item.gpu_memory,
            host_cpus=item.cpu,
            as_of=as_of,
        )


def _date_of(version: str) -> dt.date | None:
    found = DATE.match(version)
    try:
        return None if found is None else dt.date(*map(int, found.groups()))
    except ValueError:
        return None


@contextmanager
def _heard() -> Iterator[list[str]]:
    """What gpuhunt logs, as lines instead of tracebacks on the terminal; no endless waiting."""
    lines: list[str] = []

    class LogCapture(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(" ".join(record.getMessage().split()))

    logger, listener = logging.getLogger("gpuhunt"), LogCapture(logging.WARNING)
    propagate, timeout = logger.propagate, socket.getdefaulttimeout()
    logger.addHandler(listener)
    logger.propagate = False
    socket.setdefaulttimeout(SECONDS)
    try:
        yield lines
    finally:
        socket.setdefaulttimeout(timeout)
        logger.propagate = propagate
        logger.removeHandler(listener)


def _first(lines: list[str]) -> list[str]:
    more = len(lines) - MOST_WARNINGS
    return lines[:MOST_WARNINGS] + ([f"{more} more warnings"] if more > 0 else [])
