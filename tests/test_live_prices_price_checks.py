"""The known errors of price catalogs are rejected with a reason, and honest low prices are not."""

import datetime as dt
from typing import Any

import pytest
from builders.price_rows import TODAY, elsewhere, raw, refreshed

from gpu_catalog.catalog import load_catalog
from gpu_catalog.live_prices.price_checks import (
    MARKETPLACES,
    OLDEST_DAYS,
    SourcedOffer,
    check_offers,
)
from gpu_catalog.live_prices.refresh import Refreshed


def reasons(refresh: Refreshed) -> list[str]:
    """Reasons of the rejected offers."""
    return [rejected.reason for rejected in refresh.rejected]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"market": "spot", "price": "0.00"}, ["spot price 0", "unknown"]),
        ({"price": 0}, ["on demand price 0", "unknown"]),
        ({"price": -0.5}, ["-0.5", "less than 0"]),
        ({"price": None}, ["no price"]),
        ({"price": ""}, ["no price"]),
        ({"price": "on request"}, ["'on request'", "not a number"]),
        ({"price": "nan"}, ["'nan'", "not a number"]),
        ({"currency": "CNY"}, ["CNY", "US dollars"]),
        ({"gpus": -1}, ["-1 GPUs"]),
        ({"as_of": TODAY - dt.timedelta(days=OLDEST_DAYS + 1)}, ["2026-08-24", "91 days", "90"]),
        ({"instance": "", "price": 0.9}, ["without its host"]),
        ({"host_cpus": 0}, ["without its host"]),
        ({"region": "us-1\nx: y"}, ["us-1\\nx: y", "no name"]),
        ({"provider": "$(touch x)"}, ["$(touch x)", "no name"]),
        ({"instance": "x" * 201}, ["no name"]),
        ({"gpu_memory_gib": 49152}, ["49152 GB", "48", "MiB"]),
        ({"gpu_memory_gib": 384, "gpus": 8}, ["384 GB", "48", "all 8 GPUs"]),
        ({"gpu_memory_gib": 51539607552}, ["5.15396e+10 GB", "48", "bytes"]),
        ({"gpu_memory_gib": 60}, ["60 GB", "48"]),
    ],
)
def test_an_invalid_price_is_rejected_with_its_reason(
    fields: dict[str, Any], words: list[str]
) -> None:
    """The reason quotes the value; a valid price beside it is accepted."""
    result = refreshed([raw(**fields), raw(instance="l40s.good")])
    [rejected] = result.rejected
    assert [word for word in words if word not in rejected.reason] == []
    assert [o.instance for o in result.offers] == ["l40s.good"]


def test_a_rejected_offer_is_described_by_provider_instance_region_market_and_gpu() -> None:
    """An instance without a name is shown as such."""
    result = refreshed([raw(price=0), raw(price=0, instance="", market="spot", gpu_name="A10")])
    named, nameless = (rejected.description for rejected in result.rejected)
    assert named.split() == ["acme", "l40s.1", "moon", "on", "demand,", "L40S"]
    assert nameless.split(" moon ") == ["acme (no instance)", "spot, A10"]
    assert all(": rejected: " in str(rejected) for rejected in result.rejected)


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
def test_a_price_that_is_only_written_differently_is_accepted(fields: dict[str, Any]) -> None:
    """GB and GiB, memory with and without what the driver takes, text and numbers are accepted."""
    result = refreshed([raw(**fields)])
    assert result.rejected == ()
    assert [o.usd_per_hour for o in result.offers] == [1.5]


def test_spot_that_costs_as_much_as_on_demand_is_no_spot() -> None:
    """The provider has no spot market; its on-demand price is accepted."""
    result = refreshed([raw(price=0.44), raw(price=0.44, market="spot")])
    assert [o.market for o in result.offers] == ["on-demand"]
    [reason] = reasons(result)
    assert "on demand (0.44 $/h)" in reason


def test_a_spot_price_above_on_demand_rejects_both() -> None:
    """One of the two is wrong; a wrong on-demand price would be the cheapest of all."""
    result = refreshed([raw(price=1.85), raw(price=2.16, market="spot"), raw(instance="l40s.8")])
    assert [o.instance for o in result.offers] == ["l40s.8"]
    spot, on_demand = reasons(result)
    assert "more" in spot
    assert "less" in on_demand


def test_spot_is_compared_with_on_demand_in_its_own_region() -> None:
    """Without an on-demand price there, the comparison is with the most expensive region."""
    result = refreshed(
        [
            raw(region="us", price=1.0),
            raw(region="br", price=2.0),
            raw(region="br", price=1.2, market="spot"),
            raw(region="za", price=1.9, market="spot"),
            raw(region="au", price=2.1, market="spot"),
        ]
    )
    assert {o.region for o in result.offers if o.market == "spot"} == {"br", "za"}
    assert len(result.rejected) == 1


def test_eight_gpus_for_the_price_of_one_are_rejected() -> None:
    """The most common error: the price of one GPU stands on the row of a whole instance."""
    eight = raw(instance="l40s.8", gpus=8, price=1.5)
    result = refreshed([raw(), eight, *elsewhere(1.4, 1.6, 1.8)])
    [rejected] = result.rejected
    assert rejected.description.startswith("acme l40s.8 (8 GPUs)")
    assert rejected.reason.startswith("12% of the median")
    assert "(1.6 $/h)" in rejected.reason
    assert {o.instance for o in result.offers if o.provider == "acme"} == {"l40s.1"}


def test_the_price_of_a_host_without_its_gpu_is_rejected() -> None:
    """Even two rows that agree are rejected below a quarter of the median."""
    hosts = [raw(price=0.2), raw(instance="l40s.2", gpus=2, price=0.4)]
    result = refreshed([*hosts, *elsewhere(1.4, 1.6, 1.8)])
    assert len(result.rejected) == 2
    assert "acme" not in {o.provider for o in result.offers}


def test_a_price_under_60_percent_of_the_median_elsewhere_is_rejected() -> None:
    """A price just above is accepted."""
    result = refreshed([raw(price=0.95), *elsewhere(1.6, 1.6, 1.6)])
    [reason] = reasons(result)
    assert reason.startswith("59% of the median")
    assert refreshed([raw(price=0.97), *elsewhere(1.6, 1.6, 1.6)]).rejected == ()


def test_two_prices_elsewhere_make_no_median() -> None:
    """Nor do the hundred regions of one provider count for more than one."""
    assert refreshed([raw(price=0.5), *elsewhere(1.6, 1.6)]).rejected == ()
    regions = [raw(provider="big", region=f"r{number}", price=9.0) for number in range(100)]
    result = refreshed([raw(price=1.3), *regions, *elsewhere(1.5, 1.6)])
    assert result.rejected == ()


def test_a_low_price_that_the_provider_asks_alike_for_two_sizes_is_accepted() -> None:
    """Young providers ask half the price of big ones, for one GPU as for eight."""
    cheap = [raw(price=0.8), raw(instance="l40s.8", gpus=8, price=6.4)]
    result = refreshed([*cheap, *elsewhere(1.4, 1.6, 1.8)])
    assert result.rejected == ()
    far = [raw(price=0.8), raw(instance="l40s.8", gpus=8, price=6.4, region="mars")]
    assert len(refreshed([*far, *elsewhere(1.4, 1.6, 1.8)]).rejected) == 2


@pytest.mark.parametrize(("times", "rejected"), [(1.09, 0), (1.15, 2), (0.91, 0), (0.89, 2)])
def test_prices_of_two_sizes_confirm_each_other_within_ten_percent(
    times: float, rejected: int
) -> None:
    """The limit holds per GPU, to either side; farther apart, both prices are rejected."""
    cheap = [raw(price=0.8), raw(instance="l40s.8", gpus=8, price=8 * 0.8 * times)]
    assert len(refreshed([*cheap, *elsewhere(1.6, 1.6, 1.6)]).rejected) == rejected


def test_a_marketplace_may_be_cheaper_and_does_not_count_in_the_median() -> None:
    """Its prices are accepted, and do not lower the median that others are compared with."""
    market = [
        raw(provider=name, price=0.4, instance=f"{name}{number}")
        for name in sorted(MARKETPLACES)
        for number in range(5)
    ]
    result = refreshed([raw(price=0.5), *market, *elsewhere(1.4, 1.6, 1.8)])
    assert len(result.rejected) == 1
    assert result.rejected[0].description.startswith("acme ")
    assert {o.provider for o in result.offers} >= MARKETPLACES


def test_a_price_from_the_provider_itself_is_accepted() -> None:
    """Its own reply is no catalog's mistake; zero is still rejected."""
    offers = [raw(price=0.2, first_hand=True), raw(instance="x", price=0, first_hand=True)]
    result = refreshed([*offers, *elsewhere(1.4, 1.6, 1.8)])
    assert len(result.rejected) == 1
    assert "acme" in {o.provider for o in result.offers}


def test_a_region_at_half_the_price_of_the_others_is_rejected() -> None:
    """Reservation prices appear among on-demand ones that way, in all sizes alike."""
    regions = [raw(region=region, price=3.6) for region in ("us", "eu", "jp")]
    odd = [raw(region="kr", price=1.6), raw(region="kr", instance="l40s.2", gpus=2, price=3.2)]
    result = refreshed([*regions, *odd])
    assert all(reason.startswith("44% of the median") for reason in reasons(result))
    assert len(result.rejected) == 1
    spot = [
        raw(region=region, price=price, market="spot")
        for region, price in (("us", 1.0), ("eu", 1.1), ("jp", 1.2), ("kr", 0.4))
    ]
    assert refreshed(spot).rejected == ()


def test_a_plain_limit_would_reject_the_cheapest_of_the_shipped_prices() -> None:
    """This is why the exceptions exist: as rows of another's catalog, some are rejected."""
    offers = load_catalog().all_offers
    _, rejected = check_offers([SourcedOffer(o, first_hand=False) for o in offers], ())
    gpus = {offer.description.split(", ")[1] for offer in rejected}
    assert gpus >= {"A100-80GB-SXM", "H100-SXM", "L40S"}
    assert check_offers([SourcedOffer(o, first_hand=True) for o in offers], ())[1] == []
