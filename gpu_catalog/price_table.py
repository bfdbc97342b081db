"""Tables of prices: the shipped one, the paper's, and the one that ``catalog refresh`` wrote."""

import contextlib
import csv
import datetime as dt
import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from gpu_catalog.catalog import Catalog, CatalogError, csv_rows, load_catalog, shipped_offers
from gpu_catalog.offer import Offer

SHIPPED, PAPER, REFRESHED = "shipped", "paper", "refreshed"
TABLES = {SHIPPED: "offers.csv", PAPER: "paper_prices.csv"}  # those that come with this package
OLD_DAYS = 30  # prices older than that are told to be
MOST_MISTAKES = 20


def refreshed_path() -> Path:
    """Where refreshed prices are kept: in the user's data folder."""
    told = os.environ.get("XDG_DATA_HOME", "")
    # A relative one is to be ignored, says the specification of these folders.
    base = Path(told) if Path(told).is_absolute() else Path.home() / ".local" / "share"
    return base / "finetune-cost" / "prices.csv"


def written_offers(path: Path) -> list[Offer]:
    """The offers of a table that ``write_offers`` wrote; none where there is no such file.

    Raises:
        CatalogError: it cannot be read; a line for each mistake.
    """
    remedy = f"repair it, write it anew by 'catalog refresh', or delete {path}"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise CatalogError(f"{path}: cannot be read ({reason}): {remedy}") from None
    found, mistakes = [], []
    for number, row in enumerate(csv_rows(text), start=2):
        try:
            found.append(Offer.model_validate(row))
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                where = ".".join(map(str, detail["loc"]))
                mistakes.append(f"{path}:{number}: {where}: {detail['msg']}")
    if mistakes:
        more = len(mistakes) - MOST_MISTAKES
        shown = mistakes[:MOST_MISTAKES] + ([f"{path}: {more} more mistakes"] if more > 0 else [])
        raise CatalogError("\n".join([*shown, f"{path}: {remedy}"]))
    return found


def write_offers(path: Path, offers: Iterable[Offer]) -> None:
    """Replaces a table as a whole: whoever reads it sees the old or the new one.

    Raises:
        CatalogError: it could not be written; the old one is still there.
    """
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(Offer.model_fields), lineterminator="\n")
    writer.writeheader()
    for offer in offers:
        writer.writerow(offer.model_dump(mode="json"))
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w", encoding="utf-8", newline="") as file:
            file.write(buffer.getvalue())
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise CatalogError(f"{path}: cannot be written: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class PriceTable:
    """The shipped GPUs with the prices of a table: shipped, refreshed or paper."""

    name: str
    catalog: Catalog


def price_table(name: str | None = None) -> PriceTable:
    """A table by its name, or the one in use: the refreshed one, where there is one.

    Raises:
        CatalogError: it cannot be read, or was never made.
    """
    shipped = load_catalog()
    if name in TABLES:
        return PriceTable(name, Catalog(shipped.gpus, shipped_offers(TABLES[name])))
    refreshed = written_offers(refreshed_path())
    if not refreshed and name is None:
        return PriceTable(SHIPPED, shipped)
    if not refreshed:
        raise CatalogError(f"{refreshed_path()}: no prices yet: 'catalog refresh' brings them")
    return PriceTable(REFRESHED, Catalog(shipped.gpus, in_use(shipped, refreshed)))


def in_use(shipped: Catalog, refreshed: Sequence[Offer]) -> list[Offer]:
    """Refreshed prices, and the shipped ones of providers and markets that they do not have.

    No refresh brings prices of a ``cpu``: those stay. Refreshed ones of GPUs that the catalog does
    not have, because a user's file had them, are of no use without that file.
    """
    keys = {gpu.key: gpu.kind for gpu in shipped.gpus}
    new = [offer for offer in refreshed if offer.gpu in keys]
    told = {(offer.provider, offer.market) for offer in new}
    kept = [
        offer
        for offer in shipped.all_offers
        if keys[offer.gpu] == "cpu" or (offer.provider, offer.market) not in told
    ]
    return [*new, *kept]


def age_text(offers: Iterable[Offer], today: dt.date) -> str:
    """Of when prices are: ``prices of 2026-11-20, 3 days old``; how many of them are old."""
    dates = sorted(offer.date for offer in offers)
    if not dates:
        return "no prices"
    oldest = max((today - dates[0]).days, 0)
    days = f"{oldest} day{'' if oldest == 1 else 's'} old"
    if dates[0] == dates[-1]:
        text = f"prices of {dates[0]}, {days}"
    else:
        text = f"prices of {dates[0]} to {dates[-1]}, the oldest {days}"
    old = sum((today - date).days > OLD_DAYS for date in dates)
    if not old:
        return text
    of = "all" if old == len(dates) else f"{old} of {len(dates)}"
    return f"{text}; {of} more than {OLD_DAYS} days"
