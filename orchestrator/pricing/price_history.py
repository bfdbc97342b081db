"""Snapshots of prices in a folder or bucket, and the course of a GPU's price between them."""

import datetime as dt
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_catalog.catalog import CatalogError
from gpu_catalog.offer import Market, Offer
from gpu_catalog.price_table import offers_text, parsed_offers, write_offers
from orchestrator.storage.run_storage import RunPath
from orchestrator.storage.storages import storage_of

NAME = re.compile(r"prices-(\d{4}-\d{2}-\d{2})\.csv")
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class PriceCourse:
    """Lowest price of a GPU in a market, snapshot by snapshot.

    Attributes:
        points: dates and US dollars per GPU and hour, the oldest first; at least one.
    """

    gpu: str
    market: Market
    points: tuple[tuple[dt.date, float], ...]

    @property
    def change(self) -> float:
        """Last price over the first, less 1."""
        return self.points[-1][1] / self.points[0][1] - 1


def write_snapshot(out: RunPath, offers: Iterable[Offer], today: dt.date) -> RunPath:
    """Write a snapshot: ``prices-DATE.csv`` in a folder or bucket, else the file itself.

    Returns:
        The file.

    Raises:
        CatalogError: it cannot be written.
        StoreError: the bucket does not take it.
    """
    if isinstance(out, Path):
        file = out if out.suffix == ".csv" else out / f"prices-{today}.csv"
        write_offers(file, offers)
        return file
    name = f"prices-{today}.csv"
    storage_of(out).write(name, offers_text(offers).encode())
    return out / name


def snapshots(folder: RunPath) -> list[tuple[dt.date, str]]:
    """Names of the snapshots in a folder or bucket with their dates, the oldest first.

    Raises:
        CatalogError: there are none, or a name has a date that no calendar has.
        StoreError: the folder cannot be read.
    """
    dated = []
    for name in storage_of(folder).names() or ():
        match = NAME.fullmatch(name)
        if match is None:
            continue
        try:
            dated.append((dt.date.fromisoformat(match[1]), name))
        except ValueError:
            raise CatalogError(f"{folder / name}: {match[1]} is not a date: rename it") from None
    if not dated:
        raise CatalogError(
            f"{folder}: no snapshots (prices-YYYY-MM-DD.csv): "
            f"'catalog snapshot --out {folder}' writes one"
        )
    return sorted(dated)


def snapshot_of(folder: RunPath, as_of: dt.date | None) -> str:
    """Name of the last snapshot of a folder, or of the last until a date.

    Raises:
        CatalogError: there is none.
    """
    dated = snapshots(folder)
    until = [name for date, name in dated if as_of is None or date <= as_of]
    if not until:
        raise CatalogError(f"--as-of {as_of}: the first snapshot of {folder} is of {dated[0][0]}")
    return until[-1]


def snapshot_offers(folder: RunPath, name: str) -> list[Offer]:
    """Offers of a snapshot.

    Raises:
        CatalogError: it cannot be read; one line for each mistake.
        StoreError: the folder cannot be read.
    """
    place = str(folder / name)
    try:
        text = (storage_of(folder).read(name) or b"").decode()
    except UnicodeDecodeError:
        raise CatalogError(f"{place}: not UTF-8 text: repair it, or delete it") from None
    return parsed_offers(text, place, "repair it, or delete it")


def price_courses(folder: RunPath, gpus: Collection[str] = ()) -> list[PriceCourse]:
    """Courses of all GPUs of a folder's snapshots, or of some.

    Raises:
        CatalogError: the folder has no snapshots, or one cannot be read.
        StoreError: the folder cannot be read.
    """
    points: dict[tuple[str, Market], list[tuple[dt.date, float]]] = {}
    for date, name in snapshots(folder):
        for key, price in _lowest(snapshot_offers(folder, name)).items():
            points.setdefault(key, []).append((date, price))
    return [
        PriceCourse(gpu, market, tuple(course))
        for (gpu, market), course in sorted(points.items())
        if not gpus or gpu in gpus
    ]


def _lowest(offers: Iterable[Offer]) -> dict[tuple[str, Market], float]:
    lowest: dict[tuple[str, Market], float] = {}
    for offer in offers:
        key = offer.gpu, offer.market
        lowest[key] = min(lowest.get(key, offer.usd_per_gpu_hour), offer.usd_per_gpu_hour)
    return lowest


def sparkline(values: Sequence[float]) -> str:
    """A bar for each value, from the lowest to the highest; equal values are low bars."""
    low, high = min(values), max(values)
    steps = len(BARS) - 1
    return "".join(
        BARS[round(steps * (value - low) / (high - low)) if high > low else 0] for value in values
    )
