"""Random future prices."""

import datetime as dt
import math

import numpy as np
import pytest
from benchmarks.price_drift import monthly_drift, moves
from builders.rankings import SPEC

from gpu_catalog.offer import Offer
from orchestrator.pricing.price_drift import MARKETPLACE_FACTOR, PriceDrift, widened, young_gpus
from orchestrator.spec.job import Overheads


def test_drawn_prices_repeat_with_the_seed_and_differ_between_offers() -> None:
    """Two runs of one ranking agree; prices of two offers vary independently."""
    first, second, *_ = SPEC.merged_catalog().offers("desk")
    day = first.recorded + dt.timedelta(days=30)
    overheads = Overheads(price_drift=0.1, spot_price_drift=0.1)
    draws = [PriceDrift(overheads, day, seed, 2000).errors(first) for seed in (0, 0, 1)]
    drift = PriceDrift(overheads, day, 0, 2000)
    other = drift.errors(second)
    assert draws[0].tolist() == draws[1].tolist()
    for unlike in (draws[2], other):
        assert abs(np.corrcoef(draws[0], unlike)[0, 1]) < 0.1
    for offer, drawn in ((first, draws[0]), (second, other)):
        assert drawn.std() == pytest.approx(drift.sigma(offer), rel=0.1)
    # Prices that e-fold within a standard deviation, too, widen what hours alone make of it.
    low, high = widened(2.0, 2.0, 2.0, 1.0)
    assert (math.log(2 / low), math.log(high / 2)) == pytest.approx((1.645, 1.645), abs=1e-3)


def test_the_error_of_a_price_grows_with_the_root_of_its_age() -> None:
    """By market; a price of today is a day old, and a machine of one's own has no drift."""
    offers = {offer.market: offer for offer in SPEC.merged_catalog().offers("desk")}
    spot, on_demand = offers["spot"], offers["on-demand"]
    overheads = Overheads(price_drift=0.1, spot_price_drift=0.3)

    def sigma(offer: Offer, days: int) -> float:
        today = offer.date + dt.timedelta(days=days)
        return PriceDrift(overheads, today, 0, 10).sigma(offer)

    assert sigma(on_demand, 30) == pytest.approx(0.1)
    assert sigma(spot, 30) == pytest.approx(0.3)
    assert sigma(on_demand, 120) == pytest.approx(0.2)
    assert sigma(on_demand, 0) == sigma(on_demand, 1) == pytest.approx(0.1 / math.sqrt(30))
    assert sigma(on_demand.model_copy(update={"provider": "own"}), 30) == 0
    assert PriceDrift(overheads, None, 0, 10).sigma(spot) == 0


def test_prices_of_the_newest_generation_move_more() -> None:
    """By default, a doubling within a year is at the end of the interval."""
    catalog = SPEC.merged_catalog()
    young = young_gpus(catalog)
    assert {"B200", "B300", "RTX-5090", "GB200"} <= young
    assert not {"H100-SXM", "L40S", "A40", "cpu"} & young
    offer = next(o for o in catalog.offers("B200") if o.market == "on-demand")
    day = offer.date + dt.timedelta(days=365)
    sigma = PriceDrift(Overheads(), day, 0, 10, young=young).sigma(offer)
    assert math.exp(1.645 * sigma) == pytest.approx(2.0, abs=0.05)
    assert PriceDrift(Overheads(), day, 0, 10).sigma(offer) == pytest.approx(sigma / 2.4)


def test_the_defaults_are_what_two_days_of_public_prices_show() -> None:
    """Price lists of older GPUs, and asks of a marketplace; Blackwell's lists moved no more."""
    drift = {key: monthly_drift(changes) for key, changes in moves().items()}
    lists, asks = drift[False, False], drift[True, False]
    assert Overheads().price_drift == pytest.approx(lists, rel=0.1)
    assert pytest.approx(asks / lists, rel=0.1) == MARKETPLACE_FACTOR
    assert drift[False, True] < lists
    assert drift[True, True] < asks
    upwards = [change >= 0 for change in moves()[False, True]]
    assert sum(upwards) >= len(upwards) - 1


def test_asks_of_a_marketplace_move_more() -> None:
    """Also at the shipped spot drift, which is that of providers."""
    offer = next(o for o in SPEC.merged_catalog().offers("desk") if o.market == "on-demand")
    day = offer.date + dt.timedelta(days=30)
    drift = PriceDrift(Overheads(), day, 0, 10)
    ask = offer.model_copy(update={"provider": "vast"})
    assert drift.sigma(ask) == pytest.approx(MARKETPLACE_FACTOR * drift.sigma(offer))
    assert drift.sigma(ask.model_copy(update={"market": "spot"})) == drift.sigma(ask)


def test_errors_of_hours_and_price_add_in_quadrature() -> None:
    """On either side, in logarithms; a price without an error changes nothing."""
    assert widened(2.0, 1.5, 3.0, 0.0) == (1.5, 3.0)
    low, high = widened(2.0, 2 * math.exp(-0.3), 2 * math.exp(0.6), 0.4 / 1.645)
    assert (math.log(2 / low), math.log(high / 2)) == pytest.approx((0.5, math.sqrt(0.52)))
