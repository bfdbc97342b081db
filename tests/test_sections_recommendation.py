"""Sentences and cells that name an offer."""

import datetime as dt

import pytest

from fitting.laws.fit_result import Interval
from orchestrator.estimating.estimate_records import Price
from orchestrator.reporting.sections.recommendation import offer_text, rent_text


def price_in(region: str) -> Price:
    """A job on an instance of eight GPUs in a region."""
    return Price(
        provider="aws",
        instance="p5en.48xlarge",
        region=region,
        market="spot",
        gpus_per_instance=8,
        usd_per_hour=8.66,
        price_as_of=None,
        price_recorded=dt.date(2026, 11, 20),
        hours=1.0,
        hours_interval=Interval(low=1.0, high=1.0),
        usd=8.66,
        usd_interval=Interval(low=8.66, high=8.66),
    )


def test_an_offer_of_a_single_region_names_it() -> None:
    """Elsewhere the price may be several times as high."""
    price = price_in("eu-south-2")
    assert offer_text(price) == "aws p5en.48xlarge (8 GPUs) spot in eu-south-2"
    assert offer_text(price, idle=4) == "aws p5en.48xlarge (8 GPUs, 4 idle) spot in eu-south-2"
    assert "from aws in eu-south-2 (p5en.48xlarge, 8 GPUs, spot)" in rent_text("H200-SXM", price)


@pytest.mark.parametrize("region", ["all regions", "not stated", "own"])
def test_an_offer_of_no_single_region_names_none(region: str) -> None:
    """Nor do prices of a user's file without regions."""
    price = price_in(region)
    assert offer_text(price) == "aws p5en.48xlarge (8 GPUs) spot"
    assert "from aws (p5en.48xlarge, 8 GPUs, spot)" in rent_text("H200-SXM", price)
