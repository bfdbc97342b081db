"""The price table and the user's files that a command uses."""

import datetime as dt
from pathlib import Path

import pytest
from builders.price_rows import TODAY, offer

from gpu_catalog.catalog import Catalog, CatalogError, load_catalog
from gpu_catalog.gpu import Gpu
from gpu_catalog.price_table import refreshed_path, write_offers
from orchestrator.pricing.prices_in_use import REFRESH, PriceOptions, PricesInUse, prices_in_use
from orchestrator.request import request_of
from orchestrator.spec.sweep_spec import CatalogRows

OWN_PRICE = "gpu,usd_per_hour\nA40,0.25\n"
A30 = """\
gpus:
  - {key: A30, kind: cuda, device_names: [NVIDIA A30], marketed_memory_gb: 48, source: a sheet,
     recorded: 2026-11-20}
offers:
  - {gpu: A30, usd_per_hour: 0.31}
"""


@pytest.fixture(autouse=True)
def empty_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refreshed prices of the machine do not count."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def written(path: Path, text: str) -> Path:
    """Write a file."""
    path.write_text(text, encoding="utf-8")
    return path


def prices(offers: Catalog, gpu: str, provider: str) -> list[float]:
    """Prices of a GPU at a provider."""
    return [row.usd_per_hour for row in offers.offers(gpu) if row.provider == provider]


def test_the_shipped_table_is_the_default_until_prices_are_refreshed() -> None:
    """A table can be named; the refreshed one replaces the default once it exists."""
    assert prices_in_use() == PricesInUse("shipped", load_catalog(), CatalogRows(), ())
    assert prices_in_use(["paper"]).table == "paper"
    with pytest.raises(CatalogError, match="catalog refresh"):
        prices_in_use(["refreshed"])
    write_offers(refreshed_path(), [offer()])
    in_use = prices_in_use()
    assert in_use.table == "refreshed"
    assert prices(in_use.catalog, "L40S", "acme") == [1.5]
    assert prices_in_use(["shipped"]).table == "shipped"


def test_price_files_go_over_the_table_in_order(tmp_path: Path) -> None:
    """The last price of an offer counts, and the table itself stays as it is."""
    first = written(tmp_path / "a.csv", OWN_PRICE)
    second = written(tmp_path / "b.csv", OWN_PRICE.replace("0.25", "0.5"))
    in_use = prices_in_use([str(first), "paper", str(second)])
    assert (in_use.table, in_use.files) == ("paper", (first, second))
    assert prices(in_use.catalog, "A40", "own") == []
    assert prices(in_use.over(in_use.catalog), "A40", "own") == [0.5]


def test_two_tables_are_an_error() -> None:
    """The message names both."""
    with pytest.raises(CatalogError, match="shipped and paper"):
        prices_in_use(["shipped", "paper"])


def test_a_price_file_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    """The message names the file, and the table meant or all tables."""
    with pytest.raises(CatalogError, match=r"shiped: .*'shipped'"):
        prices_in_use(["shiped"])
    with pytest.raises(CatalogError, match=r"x\.csv: .*refreshed, shipped, paper"):
        prices_in_use([str(tmp_path / "x.csv")])


def test_a_catalog_file_overrides_the_rows_that_the_run_started_with(tmp_path: Path) -> None:
    """Its rows are kept apart, to be saved with the run."""
    in_use = prices_in_use((), written(tmp_path / "own.yaml", A30))
    assert [gpu.key for gpu in in_use.rows.gpus] == ["A30"]
    assert prices(in_use.catalog, "A30", "own") == [0.31]
    later = prices_in_use(
        (), written(tmp_path / "own.yaml", A30.replace("0.31", "0.4")), in_use.rows
    )
    assert prices(later.catalog, "A30", "own") == [0.4]
    assert prices(prices_in_use(run_rows=in_use.rows).catalog, "A30", "own") == [0.31]
    assert prices_in_use(run_rows=in_use.rows).rows == CatalogRows()


def test_options_name_a_table_and_files(tmp_path: Path) -> None:
    """As text with commas, or as a path; the run's rows and the catalog file reach the prices."""
    file = written(tmp_path / "a.csv", OWN_PRICE)
    own = written(tmp_path / "own.yaml", A30)
    by_text = request_of(PriceOptions, {"prices": f"paper,{file}", "catalog": own}).in_use()
    assert (by_text.table, by_text.files) == ("paper", (file,))
    assert prices(by_text.catalog, "A30", "own") == [0.31]
    by_path = request_of(PriceOptions, {"prices": file}).in_use(by_text.rows)
    assert (by_path.table, by_path.files) == ("shipped", (file,))
    assert prices(by_path.catalog, "A30", "own") == [0.31]


@pytest.mark.parametrize(
    ("table", "days", "is_old"),
    [("shipped", 30, False), ("shipped", 31, True), ("paper", 31, False)],
)
def test_old_prices_ask_for_a_refresh(table: str, days: int, *, is_old: bool) -> None:
    """After more than 30 days; the paper's prices are meant to be old."""
    catalog = Catalog([Gpu.model_validate(GPU)], [offer(gpu="G"), offer(gpu="G", region="mars")])
    in_use = PricesInUse(table, catalog, CatalogRows(), (Path("a.csv"), Path("b.csv")))
    text = in_use.age(catalog, TODAY + dt.timedelta(days=days))
    age = f"; all are over 30 days old.{' ' + REFRESH if is_old else ''}" if days > 30 else "."
    assert text == f"{table} table and a.csv and b.csv, 2026-11-23{age}"


GPU = {
    "key": "G",
    "kind": "cpu",
    "usable_memory_bytes": 10**9,
    "source": "a test",
    "recorded": "2026-01-31",
}
