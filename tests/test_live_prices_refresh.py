"""A refresh merges live prices with the last table, which is then in use."""

import datetime as dt
from pathlib import Path

import pytest
from builders.price_rows import TODAY, FakeSource, offer, raw, refreshed

from gpu_catalog.catalog import Catalog, CatalogError, load_catalog
from gpu_catalog.live_prices.refresh import refresh
from gpu_catalog.offer import Offer
from gpu_catalog.price_table import (
    PAPER,
    REFRESHED,
    SHIPPED,
    age_text,
    in_use,
    price_table,
    refreshed_path,
    write_offers,
    written_offers,
)

GPUS_ALONE = Catalog(load_catalog().gpus, ())


def days_ago(days: int) -> dt.date:
    """A day before today."""
    return TODAY - dt.timedelta(days=days)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data folder of a user."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path / "finetune-cost"


def test_a_dead_source_costs_a_line_and_keeps_its_last_prices() -> None:
    """Its last prices keep their dates; the other source's are new."""
    last = [
        offer(source="one: a", provider="acme", usd_per_hour=9, as_of=days_ago(9)),
        offer(source="two: b", provider="emca", usd_per_hour=9, as_of=days_ago(9)),
    ]
    one = FakeSource([raw(source="one: c")], name="one")
    two = FakeSource(name="two", fails="is not there")
    result = refresh([one, two], GPUS_ALONE, last, TODAY)
    [warning] = result.warnings
    assert warning.startswith("two: is not there")
    assert "last 1 prices" in warning
    assert [(o.source, o.usd_per_hour, o.date) for o in result.offers] == [
        ("one: c", 1.5, TODAY),
        ("two: b", 9, days_ago(9)),
    ]
    assert (result.live, result.answered) == (1, ("one",))


def test_a_source_that_answers_with_nothing_is_as_good_as_dead() -> None:
    """An empty catalog is a fault of the catalog; the provider still has its offers."""
    last = [offer(source="one: a", as_of=days_ago(1))]
    nothing = FakeSource([raw(gpu_name="MI300X")], name="one")
    result = refresh([nothing], GPUS_ALONE, last, TODAY)
    assert result.offers == tuple(last)
    assert result.answered == ()
    [warning] = result.warnings
    assert warning.startswith("one: no price")


def test_an_offer_that_a_provider_no_longer_has_is_dropped() -> None:
    """Other providers' offers and the provider's spot offers were not refreshed: they are kept."""
    last = [
        offer(instance="gone", source="fake: a"),
        offer(instance="kept", source="fake: a", provider="silent"),
        offer(instance="spot", source="fake: a", market="spot"),
    ]
    result = refreshed([raw()], last)
    assert [o.instance for o in result.offers] == ["l40s.1", "kept", "spot"]


def test_regions_that_were_not_asked_keep_their_prices() -> None:
    """A source that asks region by region covers only regions that answered."""
    last = [
        offer(instance="gone", region="moon", source="fake: a"),
        offer(instance="kept", region="mars", source="fake: a"),
    ]
    source = FakeSource([raw()], regions_apart=True)
    result = refresh([source], GPUS_ALONE, last, TODAY)
    assert [o.instance for o in result.offers] == ["l40s.1", "kept"]


def test_last_prices_are_not_kept_for_ever() -> None:
    """A price that nothing confirmed for 90 days is rejected."""
    last = [offer(source="dead: a", as_of=days_ago(91)), offer(source="dead: a", provider="b")]
    result = refresh([FakeSource([raw(provider="c")])], GPUS_ALONE, last, TODAY)
    assert [o.provider for o in result.offers] == ["c", "b"]
    [rejected] = result.rejected
    assert rejected.description.startswith("acme l40s.1 moon")
    assert "2026-08-24, 91 days" in rejected.reason


def test_the_later_source_is_used() -> None:
    """Of two prices for one identity from one source, the lower is used."""
    far = FakeSource([raw(price=1.4, source="far: a")], name="far")
    near = FakeSource([raw(price=1.6, source="near: b")], name="near")
    result = refresh([far, near], GPUS_ALONE, [], TODAY)
    assert [(o.usd_per_hour, o.source) for o in result.offers] == [(1.6, "near: b")]
    assert [o.usd_per_hour for o in refreshed([raw(price=1.7), raw(price=1.6)]).offers] == [1.6]


def test_catalog_prices_count_in_the_median() -> None:
    """A source with one provider is compared with the other providers' last prices."""
    usual = Catalog(
        load_catalog().gpus,
        [offer(provider=name, usd_per_hour=1.6) for name in ("a", "b", "c")],
    )
    result = refresh([FakeSource([raw(price=0.3)])], usual, [], TODAY)
    assert len(result.rejected) == 1


def test_unidentified_prices_are_counted_by_source_and_reason() -> None:
    """The most frequent names come first; the number of the others follows."""
    names = ["MI250X"] * 3 + ["P100"] * 2 + ["A16", "A30", "K80", "M60", "P4", "T4G"]
    result = refreshed([raw(), *(raw(gpu_name=name) for name in names)])
    [line] = result.unidentified
    assert line.startswith("fake: 11 prices")
    assert "MI250X 3, P100 2, A16 1" in line
    assert line.endswith("2 more")


def test_an_empty_region_is_shown_as_not_stated() -> None:
    """Some catalogs leave the region empty."""
    assert refreshed([raw(region="")]).offers[0].region == "not stated"


def test_a_table_is_read_as_it_was_written(folder: Path) -> None:
    """Every field returns; the folder is created for the table."""
    offers = [
        offer(),
        offer(market="spot", gpus_per_instance=8, minimum_minutes=1, as_of=None, note='a "b", c'),
    ]
    write_offers(refreshed_path(), offers)
    assert written_offers(refreshed_path()) == offers
    assert [path.name for path in folder.iterdir()] == ["prices.csv"]
    head = refreshed_path().read_text(encoding="utf-8").splitlines()[0]
    assert head == ",".join(Offer.model_fields)


def test_a_table_that_cannot_be_written_leaves_the_old_one(folder: Path) -> None:
    """Whoever reads sees the old table or the new one, never half of it."""
    write_offers(refreshed_path(), [offer()])
    part = folder / ".prices.csv.part"
    part.mkdir()
    with pytest.raises(CatalogError, match=r"prices\.csv: cannot be written: Is a directory"):
        write_offers(refreshed_path(), [])
    assert written_offers(refreshed_path()) == [offer()]


def test_a_data_folder_that_is_no_absolute_path_is_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The XDG specification requires absolute paths."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for data_home in ("", "relative/folder"):
        monkeypatch.setenv("XDG_DATA_HOME", data_home)
        assert refreshed_path() == tmp_path / ".local/share/finetune-cost/prices.csv"


def test_mistakes_in_a_table_are_reported_with_a_remedy(folder: Path) -> None:
    """Each has its line and value; beyond twenty they are counted."""
    write_offers(refreshed_path(), [offer()])
    text = refreshed_path().read_text(encoding="utf-8")
    refreshed_path().write_text(text.replace("1.5", "cheap"), encoding="utf-8")
    with pytest.raises(CatalogError) as error:
        price_table()
    first, last = str(error.value).splitlines()
    assert first.startswith(f"{refreshed_path()}:2: usd_per_hour: ")
    assert first.endswith("'cheap'")
    assert "'catalog refresh'" in last
    refreshed_path().write_text(text + "x\n" * 100, encoding="utf-8")
    with pytest.raises(CatalogError) as error:
        price_table()
    assert len(str(error.value).splitlines()) == 22
    refreshed_path().write_bytes(b"\xff\xfe")
    with pytest.raises(CatalogError, match=r"cannot be read \(not UTF-8 text\)"):
        price_table()
    assert folder.exists()


def test_without_a_refresh_the_shipped_table_is_in_use(folder: Path) -> None:
    """A missing refreshed table is an error only where it is requested by name."""
    assert not folder.exists()
    table = price_table()
    assert (table.name, table.catalog.all_offers) == (SHIPPED, load_catalog().all_offers)
    with pytest.raises(CatalogError, match=r"no prices yet: .*'catalog refresh'"):
        price_table(REFRESHED)


def test_a_refreshed_table_is_in_use_from_then_on(folder: Path) -> None:
    """The other tables are available by name."""
    write_offers(refreshed_path(), [offer(provider="lambda", instance="new")])
    assert folder.exists()
    table = price_table()
    assert table.name == REFRESHED
    assert "new" in {o.instance for o in table.catalog.offers("L40S")}
    assert price_table(SHIPPED).catalog.all_offers == load_catalog().all_offers
    assert {o.usd_per_hour for o in price_table(PAPER).catalog.all_offers} == {0.79, 1.67, 2.1}


def test_refreshed_prices_take_the_place_of_their_providers_shipped_ones() -> None:
    """Market by market; those of a CPU stay, and those of providers that have no new one."""
    shipped = load_catalog()
    new = [offer(gpu="A10G", provider="aws", market="on-demand", instance="g5.xlarge")]
    mixed = in_use(shipped, new)
    of_aws = [o for o in mixed if o.provider == "aws"]
    assert new[0] in mixed
    assert {o.gpu for o in of_aws if o.market == "on-demand"} == {"A10G", "cpu"}
    assert {o for o in of_aws if o.market == "spot"} == {
        o for o in shipped.all_offers if o.provider == "aws" and o.market == "spot"
    }
    assert {o for o in mixed if o.provider != "aws"} == {
        o for o in shipped.all_offers if o.provider != "aws"
    }


def test_prices_of_a_gpu_outside_the_catalog_are_skipped() -> None:
    """They came from a user's file that is not given now."""
    mixed = in_use(load_catalog(), [offer(gpu="L40")])
    assert {o.gpu for o in mixed} <= {gpu.key for gpu in load_catalog().gpus}


@pytest.mark.parametrize(
    ("ages", "text"),
    [
        ([], "no prices"),
        ([0], "2026-11-23"),
        ([3, 3], "2026-11-20"),
        ([-1], "2026-11-24"),
        ([3, 30], "2026-10-24 to 2026-11-20"),
        ([31], "2026-10-23; all are over 30 days old"),
        ([3, 31, 40], "2026-10-14 to 2026-11-20; 2 of 3 are over 30 days old"),
    ],
)
def test_the_age_of_prices_is_shown(ages: list[int], text: str) -> None:
    """The age is that of the source's date, else of the record's."""
    offers = [offer(as_of=days_ago(age), recorded=days_ago(0)) for age in ages]
    assert age_text(offers, TODAY) == text


def test_thousands_of_prices_are_checked_at_once() -> None:
    """A dozen providers have that many prices in all regions."""
    many = [
        raw(
            provider=f"p{provider}",
            region=f"r{region}",
            instance=f"i{instance}",
            price=1 + 0.01 * provider if market == "on-demand" else 0.5,
            market=market,
        )
        for provider in range(10)
        for region in range(50)
        for instance in range(10)
        for market in ("on-demand", "spot")
    ]
    result = refreshed(many)
    assert (len(result.offers), result.rejected) == (10_000, ())
