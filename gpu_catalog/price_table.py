"""Price tables: the shipped one, the paper's, and the one written by ``catalog refresh``."""

import contextlib
import csv
import datetime as dt
import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_catalog.catalog import (
    Catalog,
    CatalogError,
    csv_rows,
    load_catalog,
    parse_rows,
    shipped_offers,
)
from gpu_catalog.offer import Offer
from gpu_catalog.safe_text import from_spreadsheet_cell, spreadsheet_cell

SHIPPED, PAPER, REFRESHED = "shipped", "paper", "refreshed"
TABLES = {SHIPPED: "offers.csv", PAPER: "paper_prices.csv"}  # files in this package
OLD_DAYS = 30  # a message counts the prices older than this
MOST_MISTAKES = 20


def refreshed_path() -> Path:
    """Path of the refreshed prices, in the user's data folder."""
    data_home = Path(os.environ.get("XDG_DATA_HOME", ""))
    # The XDG base directory specification has relative paths ignored.
    base = data_home if data_home.is_absolute() else Path.home() / ".local" / "share"
    return base / "finetune-cost" / "prices.csv"


def written_offers(path: Path) -> list[Offer]:
    """Read a table that ``write_offers`` wrote; empty if there is no such file.

    Raises:
        CatalogError: the table cannot be read; one line for each mistake.
    """
    remedy = f"repair it, rewrite it with 'catalog refresh', or delete {path}"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise CatalogError(f"{path}: cannot be read ({reason}): {remedy}") from None
    return parsed_offers(text, str(path), remedy)


def parsed_offers(text: str, place: str, remedy: str) -> list[Offer]:
    """Offers of a table in CSV.

    Args:
        text: the table.
        place: its file, for messages.
        remedy: the last line of a message.

    Raises:
        CatalogError: rows are invalid; one line for each mistake.
    """
    rows = [
        {
            name: from_spreadsheet_cell(cell) if isinstance(cell, str) else cell
            for name, cell in row.items()  # fields beyond the columns are a list
        }
        for row in csv_rows(text)
    ]
    # Line 1 names the columns.
    offers, mistakes = parse_rows(Offer, rows, lambda number: f"{place}:{number + 1}")
    if mistakes:
        more = len(mistakes) - MOST_MISTAKES
        shown = mistakes[:MOST_MISTAKES] + ([f"{place}: {more} more mistakes"] if more > 0 else [])
        raise CatalogError("\n".join([*shown, f"{place}: {remedy}"]))
    return offers


def offers_text(offers: Iterable[Offer]) -> str:
    """A table of offers in CSV."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(Offer.model_fields), lineterminator="\n")
    writer.writeheader()
    for offer in offers:
        values = offer.model_dump(mode="json")
        writer.writerow({name: spreadsheet_cell(value) for name, value in values.items()})
    return buffer.getvalue()


def write_offers(path: Path, offers: Iterable[Offer]) -> None:
    """Replace a table atomically: readers see the old or the new one.

    Raises:
        CatalogError: the table cannot be written; the old one is untouched.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w", encoding="utf-8", newline="") as file:
            file.write(offers_text(offers))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise CatalogError(f"{path}: cannot be written: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class PriceTable:
    """Shipped GPUs with the prices of a table: shipped, refreshed or paper."""

    name: str
    catalog: Catalog


def price_table(name: str | None = None) -> PriceTable:
    """Price table by name; by default the refreshed one if it exists, else the shipped one.

    Raises:
        CatalogError: the table cannot be read, or does not exist.
    """
    shipped = load_catalog()
    if name in TABLES:
        return PriceTable(name, Catalog(shipped.gpus, shipped_offers(TABLES[name])))
    refreshed = written_offers(refreshed_path())
    if refreshed:
        return PriceTable(REFRESHED, Catalog(shipped.gpus, in_use(shipped, refreshed)))
    if name is None:
        return PriceTable(SHIPPED, shipped)
    raise CatalogError(f"{refreshed_path()}: no prices yet: run 'catalog refresh'")


def in_use(shipped: Catalog, refreshed: Sequence[Offer]) -> list[Offer]:
    """Refreshed prices, plus shipped ones of providers and markets that were not refreshed.

    A refresh has no prices of a ``cpu``, so the shipped ones stay. Refreshed prices of GPUs outside
    the catalog are skipped: they came from a user's file that is not given now.
    """
    keys = {gpu.key: gpu.kind for gpu in shipped.gpus}
    new = [offer for offer in refreshed if offer.gpu in keys]
    refreshed_markets = {(offer.provider, offer.market) for offer in new}
    kept = [
        offer
        for offer in shipped.all_offers
        if keys[offer.gpu] == "cpu" or (offer.provider, offer.market) not in refreshed_markets
    ]
    return [*new, *kept]


def age_text(offers: Iterable[Offer], today: dt.date) -> str:
    """Dates of prices, and the number of old ones.

    ``2026-10-14 to 2026-11-20; 2 of 3 are over 30 days old``, or one date.
    """
    dates = sorted(offer.date for offer in offers)
    if not dates:
        return "no prices"
    text = str(dates[0]) if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    old = sum((today - date).days > OLD_DAYS for date in dates)
    if not old:
        return text
    share = "all" if old == len(dates) else f"{old} of {len(dates)}"
    return f"{text}; {share} are over {OLD_DAYS} days old"
