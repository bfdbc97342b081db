"""Random future prices."""

import datetime as dt
import math

import numpy as np
import pytest
from builders.rankings import (
    SPEC,
)

from orchestrator.pricing.price_drift import PriceDrift, widened
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
