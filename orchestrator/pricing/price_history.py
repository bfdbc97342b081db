"""Snapshots of prices in a folder, and how the price of a GPU moved between them."""

import datetime as dt
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_catalog.catalog import CatalogError
from gpu_catalog.offer import Market, Offer
from gpu_catalog.price_table import written_offers

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


def snapshot_path(out: Path, today: dt.date) -> Path:
    """File of today's snapshot: ``prices-DATE.csv`` in a folder, else the file itself."""
    return out if out.suffix == ".csv" else out / f"prices-{today}.csv"


def snapshots(folder: Path) -> list[tuple[dt.date, Path]]:
    """Snapshots in a folder with their dates, the oldest first.

    Raises:
        CatalogError: the folder has none, or a name has a date that no calendar has.
    """
    dated = []
    for path in folder.glob("prices-*.csv"):
        match = NAME.fullmatch(path.name)
        if match is None:
            continue
        try:
            dated.append((dt.date.fromisoformat(match[1]), path))
        except ValueError:
            raise CatalogError(f"{path}: {match[1]} is not a date: rename it") from None
    if not dated:
        raise CatalogError(
            f"{folder}: no snapshots (prices-YYYY-MM-DD.csv): "
            f"'catalog snapshot --out {folder}' writes one"
        )
    return sorted(dated)


def snapshot_of(folder: Path, as_of: dt.date | None) -> Path:
    """Last snapshot of a folder, or the last until a date.

    Raises:
        CatalogError: there is none.
    """
    dated = snapshots(folder)
    until = [path for date, path in dated if as_of is None or date <= as_of]
    if not until:
        raise CatalogError(f"--as-of {as_of}: the first snapshot of {folder} is of {dated[0][0]}")
    return until[-1]


def price_courses(folder: Path, gpus: Sequence[str] = ()) -> list[PriceCourse]:
    """Courses of all GPUs of a folder's snapshots, or of some.

    Raises:
        CatalogError: the folder has no snapshots, or one cannot be read.
    """
    points: dict[tuple[str, Market], list[tuple[dt.date, float]]] = {}
    for date, path in snapshots(folder):
        for key, price in _lowest(written_offers(path)).items():
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
