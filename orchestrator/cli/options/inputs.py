"""What commands share: where runs are, which prices are in use, what is said."""

import argparse
import datetime as dt
from collections.abc import Iterable
from pathlib import Path

from orchestrator.console import remark
from orchestrator.pricing.prices_in_use import PricesInUse, prices_in_use
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.spec.spec_file import DEFAULT_SPEC, read_spec_text, shipped_specs
from orchestrator.spec.sweep_spec import CatalogRows, SweepSpec
from orchestrator.storage.run_storage import RunPath, run_path


def run_and_prices(folder: RunFolder, options: argparse.Namespace) -> tuple[PricesInUse, SweepSpec]:
    """The prices in use, and a run's specification that goes by them."""
    prices = asked_prices(options, folder.catalog_rows())
    return prices, folder.spec(prices.catalog)


def asked_prices(options: argparse.Namespace, run_rows: CatalogRows | None = None) -> PricesInUse:
    """The prices that ``--prices`` and ``--catalog`` name."""
    return prices_in_use(options.prices or (), options.catalog, run_rows)


def spec_text(spec_path: Path | None) -> tuple[str, str]:
    """The text of a specification, shipped or of a file, and what to call it."""
    if spec_path is None:
        return shipped_specs()[DEFAULT_SPEC], "the default sweep"
    if not spec_path.exists() and str(spec_path) in shipped_specs():
        return shipped_specs()[str(spec_path)], f"the shipped sweep {spec_path}"
    return read_spec_text(spec_path), str(spec_path)


def given_run_path(out: str | None, name: str) -> RunPath:
    """Where the run folder is.

    A Ray job runs in a copy of the working directory that goes away with the job, and would take
    the results along: there, a relative path starts at the home directory.
    """
    path = run_path(out) if out is not None else Path("runs") / name
    if not isinstance(path, Path):
        return path
    in_ray_job = "runtime_resources" in Path.cwd().parts
    return Path.home() / path if in_ray_job else path.absolute()


def tell(lines: Iterable[str]) -> None:
    """Lines beside the results."""
    for line in lines:
        remark(line)


def now() -> dt.datetime:
    """The time, of UTC."""
    return dt.datetime.now(dt.UTC)


def today() -> dt.date:
    """The day, of UTC."""
    return now().date()
