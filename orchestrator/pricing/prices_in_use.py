"""GPUs and prices that a command uses: a table with the user's files merged over it."""

import datetime as dt
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator

from gpu_catalog.catalog import Catalog, CatalogError, load_catalog
from gpu_catalog.price_table import (
    OLD_DAYS,
    PAPER,
    REFRESHED,
    TABLES,
    PriceTable,
    age_text,
    price_table,
)
from gpu_catalog.suggestions import did_you_mean
from orchestrator.pricing.catalog_file import read_catalog_file, read_price_file
from orchestrator.pricing.price_history import (
    PriceCourse,
    price_courses,
    snapshot_of,
    snapshot_offers,
)
from orchestrator.request import PathText, names_in, path_text
from orchestrator.spec.sweep_spec import CatalogRows
from orchestrator.storage.run_storage import S3, RunPath, run_path

NAMES = (REFRESHED, *TABLES)
REFRESH = "'finetune-cost catalog refresh' updates them."


@dataclass(frozen=True, slots=True)
class PricesInUse:
    """Prices chosen by the options ``--catalog`` and ``--prices``.

    Attributes:
        snapshots: folder or bucket of the snapshots that they come from.
    """

    table: str
    catalog: Catalog
    rows: CatalogRows
    files: tuple[Path, ...]
    snapshots: RunPath | None = None

    def over(self, catalog: Catalog) -> Catalog:
        """Catalog with the user's own prices merged over it.

        Raises:
            CatalogError: a price file cannot be read; one line for each mistake.
        """
        for file in self.files:
            catalog = catalog.merged((), read_price_file(file, catalog))
        return catalog

    def courses(self, gpus: Collection[str]) -> list[PriceCourse]:
        """Courses of the prices of GPUs; empty where the prices are not from snapshots.

        Raises:
            CatalogError: a snapshot cannot be read.
        """
        return [] if self.snapshots is None else price_courses(self.snapshots, gpus)

    def age(self, catalog: Catalog, today: dt.date) -> str:
        """Names and age of the prices in use."""
        names = " and ".join([f"{self.table} table", *map(str, self.files)])
        text = f"{names}, {age_text(catalog.all_offers, today)}"
        is_old = any((today - offer.date).days > OLD_DAYS for offer in catalog.all_offers)
        is_outdated = is_old and self.table != PAPER
        return f"{text}.{f' {REFRESH}' * is_outdated}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceOptions:
    """GPUs and prices to go by."""

    catalog: Path | None = None
    prices: Annotated[
        tuple[PathText, ...], BeforeValidator(lambda given: names_in(path_text(given)))
    ] = ()
    as_of: dt.date | None = None

    def in_use(self, run_rows: CatalogRows | None = None) -> PricesInUse:
        """Read them; see ``prices_in_use``."""
        return prices_in_use(self.prices, self.catalog, run_rows, self.as_of)


def prices_in_use(
    given: Sequence[str] = (),
    catalog_file: Path | None = None,
    run_rows: CatalogRows | None = None,
    as_of: dt.date | None = None,
) -> PricesInUse:
    """Read the prices of a table and of files.

    Args:
        given: name of a table or folder of snapshots, and price files, as given to ``--prices``.
        catalog_file: file with the user's GPUs and offers, as given to ``--catalog``.
        run_rows: rows of the file that the run started with; those of ``catalog_file`` override
            them.
        as_of: date of the prices, as given to ``--as-of``; only with a folder of snapshots.

    Raises:
        CatalogError: a table or file does not exist, or a file cannot be read.
    """
    run_rows = run_rows or CatalogRows()
    folders = [name for name in given if name not in NAMES and _is_folder(name)]
    if as_of is not None and not folders:
        raise CatalogError(f"--as-of {as_of}: give --prices a folder of snapshots, too")
    tables = [name for name in given if name in NAMES or name in folders]
    if len(tables) > 1:
        raise CatalogError(
            f"--prices {' and '.join(tables)}: give only one table; files override it"
        )
    files = tuple(Path(name) for name in given if name not in tables)
    for file in files:
        if not file.exists():
            near = did_you_mean(str(file), NAMES) or f": {', '.join(NAMES)}"
            raise CatalogError(f"--prices {file}: no such file or price table{near}")
    snapshots = run_path(folders[0]) if folders else None
    table = price_table(*tables) if snapshots is None else _snapshot(snapshots, as_of)
    catalog = table.catalog.merged(run_rows.gpus, run_rows.offers)
    rows = CatalogRows()
    if catalog_file is not None:
        rows = read_catalog_file(catalog_file, catalog)
        catalog = catalog.merged(rows.gpus, rows.offers)
    return PricesInUse(table.name, catalog, rows, files, snapshots)


def _is_folder(name: str) -> bool:
    return name.startswith(S3) or Path(name).is_dir()


def _snapshot(folder: RunPath, as_of: dt.date | None) -> PriceTable:
    name, shipped = snapshot_of(folder, as_of), load_catalog()
    keys = {gpu.key for gpu in shipped.gpus}
    offers = (offer for offer in snapshot_offers(folder, name) if offer.gpu in keys)
    return PriceTable(name, Catalog(shipped.gpus, offers))
