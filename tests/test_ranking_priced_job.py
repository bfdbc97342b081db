"""Hours and dollars of one job on one offer, computed by hand."""

import datetime as dt

import numpy as np
import pytest
from builders.rankings import DESK, JOB, LAP, SPEC

from fitting.families.cell_step_time import CellStepTime
from fitting.numerics.arrays import FloatArray
from fitting.numerics.uncertainty import TimeUncertainty
from gpu_catalog.offer import Offer
from orchestrator.datasets.lengths import DataLengths
from orchestrator.pricing.price_drift import PriceDrift
from orchestrator.ranking.job_lengths import of_like_lengths
from orchestrator.ranking.priced_job import DRAWS, CellJob, PricedOffer, job_hours, offer_usd
from orchestrator.spec.job import NO_OVERHEADS, Job, Overheads
from trials.records.cell import Cell
from trials.records.observation import Basis

SPOT, ON_DEMAND = SPEC.merged_catalog().offers("desk")
SHARED = np.random.default_rng(0).standard_normal(DRAWS)
TENTH = TimeUncertainty(0.1)
LONG_MINIMUM = ON_DEMAND.model_copy(update={"minimum_minutes": 600.0})


def priced(
    *offers: Offer,
    job: Job = JOB,
    uncertainty: TimeUncertainty = TENTH,
    days: int | None = None,
    seed: int = 0,
) -> list[PricedOffer]:
    """The job with steps of 1.2 s at a batch size of 1: an hour of them."""
    step = CellStepTime(1, 1.2, uncertainty, "measured steps")
    cell_job = CellJob(job, DESK, "stack", Basis.MEASURED, step, None, seed)
    today = None if days is None else ON_DEMAND.date + dt.timedelta(days=days)
    return list(cell_job.on(offers, SHARED, PriceDrift(job.overheads, today, seed, DRAWS)))


def test_hours_of_steps_are_those_of_whole_epochs() -> None:
    """An epoch has a fraction of a step for its last batch, but one step at least."""
    assert job_hours(JOB, 8, 3.6) == pytest.approx(3 * 125 * 0.001)
    assert job_hours(JOB, 16, 3.6) == pytest.approx(3 * 62.5 * 0.001)
    assert job_hours(JOB, 2000, 3.6) == pytest.approx(3 * 0.001)


def test_dollars_include_start_up_interruptions_and_the_minimum() -> None:
    """Spot work is interrupted; a bill is never below the minimum of the offer."""
    hours = np.array([1.0])
    job = JOB.model_copy(update={"overheads": Overheads(startup_minutes=30, checkpoint_seconds=0)})
    assert offer_usd(job, hours, ON_DEMAND) == pytest.approx(1.5 * 7.2)
    assert offer_usd(job, hours, LONG_MINIMUM) == pytest.approx(10 * 7.2)
    assert offer_usd(job, hours, SPOT) > 1.5 * 3.6 * 1.001


def test_hours_have_the_interval_of_the_step_time() -> None:
    """90 % of a lognormal error of a tenth; the draws have its spread, and repeat with the seed."""
    first, again, other = (priced(ON_DEMAND, seed=seed)[0] for seed in (0, 0, 1))
    assert first.usd == pytest.approx(7.2)
    assert first.rented.hours == pytest.approx(1)
    ends = np.log([first.rented.low, first.rented.high])
    assert ends == pytest.approx([-0.1645, 0.1645], abs=0.02)
    assert first.rented.drawn.shape == (DRAWS,)
    assert [first.rented.low, first.rented.high] == np.percentile(
        first.rented.drawn, [5, 95]
    ).tolist()
    assert first.rented.job.cell == DESK
    assert np.log(first.rented.drawn).std() == pytest.approx(0.1, rel=0.1)
    assert (first.rented.drawn == again.rented.drawn).all()
    assert abs(np.corrcoef(first.rented.drawn, other.rented.drawn)[0, 1]) < 0.1
    assert first.usd_interval == pytest.approx((7.2 * first.rented.low, 7.2 * first.rented.high))


def test_offers_of_one_market_share_their_hours() -> None:
    """A spot job is interrupted, an on-demand one is not."""
    overheads = Overheads(
        startup_minutes=30, checkpoint_seconds=36, checkpoint_minutes=40, interruptions_per_day=24
    )
    job = JOB.model_copy(update={"overheads": overheads})
    first, spot, second = priced(ON_DEMAND, SPOT, LONG_MINIMUM, job=job)
    assert first.rented is second.rented
    assert first.rented.hours == pytest.approx(1.5 + 1.5 * 0.01)
    assert first.rented.checkpoint_minutes == 40
    assert spot.rented.hours > first.rented.hours
    assert spot.rented.checkpoint_minutes < 40
    assert [p.usd for p in (first, spot)] == pytest.approx(
        [7.2 * first.rented.hours, 3.6 * spot.rented.hours]
    )


def test_shared_errors_of_simulated_steps_move_all_draws_together() -> None:
    """Hours rise with the shared error."""
    (simulated,) = priced(ON_DEMAND, uncertainty=TimeUncertainty(0.0, shared_above=0.3))
    expected: FloatArray = np.exp(0.3 * np.maximum(SHARED, 0))
    assert simulated.rented.drawn == pytest.approx(expected)


def test_prices_drift_with_the_days_and_bills_have_a_minimum() -> None:
    """Without a day the dollars are the hours times the price; with one they spread further."""
    overheads = NO_OVERHEADS.model_copy(update={"price_drift": 0.2})
    job = JOB.model_copy(update={"overheads": overheads})
    (quoted,) = priced(ON_DEMAND, job=job)
    assert quoted.price.sigma == 0
    assert quoted.drawn_usd == pytest.approx(7.2 * quoted.rented.drawn)
    (drifted,) = priced(ON_DEMAND, job=job, days=30)
    assert drifted.price.sigma == pytest.approx(0.2)
    errors = drifted.price.drift.errors(ON_DEMAND)
    assert drifted.drawn_usd == pytest.approx(quoted.drawn_usd * np.exp(errors))
    assert drifted.usd_interval[0] < quoted.usd_interval[0]
    assert drifted.usd_interval[1] > quoted.usd_interval[1]
    (minimum,) = priced(LONG_MINIMUM, job=job)
    assert minimum.usd == pytest.approx(72)
    assert minimum.drawn_usd == pytest.approx(np.full(DRAWS, 72.0))


def test_offers_at_the_full_length_are_excluded_beside_offers_at_the_lengths_of_the_data() -> None:
    """Where no offer has a law of lengths, or the job no lengths, all of them are compared."""
    lengths = DataLengths(source="made", histogram=((8, 1000),))
    job = JOB.model_copy(update={"lengths": lengths})

    def offers_of(cell: Cell, tokens: float | None) -> list[PricedOffer]:
        step = CellStepTime(1, 1.2, TENTH, "law", tokens=tokens)
        cell_job = CellJob(job, cell, "stack", Basis.MEASURED, step, None, 0)
        return list(cell_job.on([ON_DEMAND, SPOT], SHARED, PriceDrift(NO_OVERHEADS, None, 0, 9)))

    short, full = offers_of(DESK, 8.0), offers_of(LAP, None)
    kept, others = of_like_lengths(job, [*full, *short])
    assert kept == short
    assert [excluded.cell for excluded in others] == [LAP]
    assert of_like_lengths(job, full) == (full, [])
    assert of_like_lengths(JOB, [*full, *short]) == ([*full, *short], [])
    kept, others = of_like_lengths(job, [*short, *offers_of(DESK, None)])
    assert (kept, others) == (short, [])
