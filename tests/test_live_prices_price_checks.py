"""The known lies of price catalogs, each on a small one: caught, told in a line, left out."""

import datetime as dt
from typing import Any

import pytest
from builders.price_rows import TODAY, elsewhere, raw, refreshed, told

from gpu_catalog.catalog import load_catalog
from gpu_catalog.live_prices.price_checks import (
    MARKETPLACES,
    OLDEST_DAYS,
    SourcedOffer,
    rejected_offers,
)

NAMED = "acme l40s.1 moon on demand, L40S"


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"market": "spot", "price": "0.00"},
            "acme l40s.1 moon spot, L40S: spot price 0, which means that it is not known: left out",
        ),
        ({"price": 0}, f"{NAMED}: on demand price 0, which means that it is not known: left out"),
        ({"price": -0.5}, f"{NAMED}: the price -0.5 is less than 0: left out"),
        ({"price": None}, f"{NAMED}: has no price: left out"),
        ({"price": ""}, f"{NAMED}: has no price: left out"),
        ({"price": "on request"}, f"{NAMED}: the price 'on request' is no number: left out"),
        ({"price": "nan"}, f"{NAMED}: the price 'nan' is no number: left out"),
        ({"currency": "CNY"}, f"{NAMED}: the price is in CNY, not in US dollars: left out"),
        ({"gpus": -1}, f"{NAMED}: -1 GPUs: left out"),
        (
            {"as_of": TODAY - dt.timedelta(days=OLDEST_DAYS + 1)},
            f"{NAMED}: the price is of 2026-08-24, 91 days old (at most 90): left out",
        ),
        (
            {"instance": "", "price": 0.9},
            (
                "acme (no instance) moon on demand, L40S: the price is of a GPU alone, its host "
                "stands on another row: left out"
            ),
        ),
        (
            {"host_cpus": 0},
            f"{NAMED}: the price is of a GPU alone, its host stands on another row: left out",
        ),
        (
            {"gpu_memory_gib": 49152},
            f"{NAMED}: memory 49152 GB, where L40S has 48: it is in MiB: left out",
        ),
        (
            {"gpu_memory_gib": 384, "gpus": 8},
            f"{NAMED}: memory 384 GB, where L40S has 48: it is that of all 8 GPUs: left out",
        ),
        (
            {"gpu_memory_gib": 51539607552},
            f"{NAMED}: memory 5.15396e+10 GB, where L40S has 48: it is in bytes: left out",
        ),
        ({"gpu_memory_gib": 60}, f"{NAMED}: memory 60 GB, where L40S has 48: left out"),
    ],
)
def test_what_makes_no_sense_alone_is_told_and_left_out(fields: dict[str, Any], line: str) -> None:
    """And what stands beside it stays."""
    found = refreshed([raw(**fields), raw(instance="l40s.good")])
    assert told(found.doubts) == [line]
    assert [o.instance for o in found.offers] == ["l40s.good"]


@pytest.mark.parametrize(
    "fields",
    [
        {"gpu_memory_gib": 44.7},  # 45776 MiB, as Amazon has it
        {"gpu_memory_gib": None},
        {"gpu_memory_gib": 0},  # how catalogs write that they do not know
        {"as_of": TODAY - dt.timedelta(days=OLDEST_DAYS)},
        {"as_of": None},
        {"currency": "usd"},
        {"price": "1.5000000000"},
    ],
)
def test_what_is_only_written_differently_is_believed(fields: dict[str, Any]) -> None:
    """GB and GiB, with and without what the driver takes; text and numbers."""
    found = refreshed([raw(**fields)])
    assert found.doubts == ()
    assert [o.usd_per_hour for o in found.offers] == [1.5]


def test_spot_that_costs_as_much_as_on_demand_is_no_spot() -> None:
    """The provider has no spot market; what it asks on demand stands."""
    found = refreshed([raw(price=0.44), raw(price=0.44, market="spot")])
    assert [o.market for o in found.offers] == ["on-demand"]
    assert told(found.doubts) == [
        (
            "acme l40s.1 moon spot, L40S, 0.44 $/h: as much as on demand (0.44 $/h): there is no "
            "spot market: left out"
        )
    ]


def test_of_spot_above_on_demand_neither_is_believed() -> None:
    """One of the two is a lie: kept, a wrong price on demand would be the cheapest of all."""
    found = refreshed([raw(price=1.85), raw(price=2.16, market="spot"), raw(instance="l40s.8")])
    assert [o.instance for o in found.offers] == ["l40s.8"]
    assert [line.rpartition(" $/h: ")[2] for line in told(found.doubts)] == [
        "more than on demand (1.85 $/h): one of the two is wrong: left out",
        "less than spot (2.16 $/h): one of the two is wrong: left out",
    ]


def test_spot_is_held_against_on_demand_of_its_own_region() -> None:
    """Where that has none, against the dearest: spot in one may honestly cost more than another."""
    found = refreshed(
        [
            raw(region="us", price=1.0),
            raw(region="br", price=2.0),
            raw(region="br", price=1.2, market="spot"),
            raw(region="za", price=1.9, market="spot"),
            raw(region="au", price=2.1, market="spot"),
        ]
    )
    assert {o.region for o in found.offers if o.market == "spot"} == {"br", "za"}
    assert len(found.doubts) == 1


def test_eight_gpus_for_the_price_of_one_are_far_under_what_others_ask() -> None:
    """The commonest lie: the price of a GPU stands on the row of a whole instance."""
    eight = raw(instance="l40s.8", gpus=8, price=1.5)
    found = refreshed([raw(), eight, *elsewhere(1.4, 1.6, 1.8)])
    assert told(found.doubts) == [
        (
            "acme l40s.8 (8 GPUs) moon on demand, L40S, 1.5 $/h: 12% of the median price per GPU "
            "of that GPU elsewhere (1.6 $/h): left out"
        )
    ]
    assert {o.instance for o in found.offers if o.provider == "acme"} == {"l40s.1"}


def test_a_host_without_its_gpu_is_far_under_what_others_ask() -> None:
    """Not even two rows that agree are believed at less than a quarter of the median."""
    hosts = [raw(price=0.2), raw(instance="l40s.2", gpus=2, price=0.4)]
    found = refreshed([*hosts, *elsewhere(1.4, 1.6, 1.8)])
    assert len(found.doubts) == 2
    assert "acme" not in {o.provider for o in found.offers}


def test_a_price_under_60_percent_of_the_median_elsewhere_is_left_out() -> None:
    """Just above, it stays."""
    found = refreshed([raw(price=0.95), *elsewhere(1.6, 1.6, 1.6)])
    assert [line.partition(": ")[2] for line in told(found.doubts)] == [
        "59% of the median price per GPU of that GPU elsewhere (1.6 $/h): left out"
    ]
    assert refreshed([raw(price=0.97), *elsewhere(1.6, 1.6, 1.6)]).doubts == ()


def test_two_prices_elsewhere_make_no_median() -> None:
    """Nor do the hundred regions of one provider count for more than one."""
    assert refreshed([raw(price=0.5), *elsewhere(1.6, 1.6)]).doubts == ()
    regions = [raw(provider="big", region=f"r{number}", price=9.0) for number in range(100)]
    found = refreshed([raw(price=1.3), *regions, *elsewhere(1.5, 1.6)])
    assert found.doubts == ()


def test_a_low_price_that_the_provider_asks_alike_for_two_sizes_is_believed() -> None:
    """Young providers ask half of what the big ones do, for one GPU as for eight."""
    cheap = [raw(price=0.8), raw(instance="l40s.8", gpus=8, price=6.4)]
    found = refreshed([*cheap, *elsewhere(1.4, 1.6, 1.8)])
    assert found.doubts == ()
    far = [raw(price=0.8), raw(instance="l40s.8", gpus=8, price=6.4, region="mars")]
    assert len(refreshed([*far, *elsewhere(1.4, 1.6, 1.8)]).doubts) == 2


@pytest.mark.parametrize(("times", "rejected"), [(1.09, 0), (1.15, 2), (0.91, 0), (0.89, 2)])
def test_prices_of_two_sizes_confirm_each_other_within_ten_percent(
    times: float, rejected: int
) -> None:
    """The limit counts per GPU, to either side; farther apart, neither price is believed."""
    cheap = [raw(price=0.8), raw(instance="l40s.8", gpus=8, price=8 * 0.8 * times)]
    assert len(refreshed([*cheap, *elsewhere(1.6, 1.6, 1.6)]).doubts) == rejected


def test_a_marketplace_is_honestly_cheaper_and_no_part_of_what_is_usual() -> None:
    """Its hosts' prices are believed, and do not pull down the median that others are held to."""
    market = [
        raw(provider=name, price=0.4, instance=f"{name}{number}")
        for name in sorted(MARKETPLACES)
        for number in range(5)
    ]
    found = refreshed([raw(price=0.5), *market, *elsewhere(1.4, 1.6, 1.8)])
    assert len(found.doubts) == 1
    assert "acme" in told(found.doubts)[0]
    assert {o.provider for o in found.offers} >= MARKETPLACES


def test_what_a_provider_tells_itself_is_believed() -> None:
    """Its own answer is not a catalog's mistake; but zero is still no price."""
    mine = [raw(price=0.2, first_hand=True), raw(instance="x", price=0, first_hand=True)]
    found = refreshed([*mine, *elsewhere(1.4, 1.6, 1.8)])
    assert len(found.doubts) == 1
    assert "acme" in {o.provider for o in found.offers}


def test_a_region_at_half_the_price_of_the_others_is_left_out() -> None:
    """Prices by reservation are mixed into on-demand ones so, in all sizes alike."""
    regions = [raw(region=region, price=3.6) for region in ("us", "eu", "jp")]
    odd = [raw(region="kr", price=1.6), raw(region="kr", instance="l40s.2", gpus=2, price=3.2)]
    found = refreshed([*regions, *odd])
    assert [line.partition(": ")[2] for line in told(found.doubts)] == [
        "44% of the median price per GPU of it in other regions (3.6 $/h): left out"
    ]
    spot = [
        raw(region=region, price=price, market="spot")
        for region, price in (("us", 1.0), ("eu", 1.1), ("jp", 1.2), ("kr", 0.4))
    ]
    assert refreshed(spot).doubts == ()


def test_a_plain_rule_would_leave_out_the_cheapest_of_the_shipped_prices() -> None:
    """What the exceptions are for: as single rows of a catalog, these are doubted."""
    offers = load_catalog().all_offers
    _, doubts = rejected_offers([SourcedOffer(each, first_hand=False) for each in offers], ())
    left_out = {str(doubt).split(", ")[1] for doubt in doubts}
    assert (len(doubts), left_out) == (6, {"A100-80GB-SXM", "H100-SXM", "H200-SXM", "L40S"})
    assert rejected_offers([SourcedOffer(each, first_hand=True) for each in offers], ())[1] == []
