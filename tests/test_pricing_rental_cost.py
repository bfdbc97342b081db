"""Cost of a rental: against simulated interruptions, and computed by hand."""

import math

import numpy as np
import pytest
from builders.price_rows import offer

from orchestrator.pricing.billing_terms import billing_text
from orchestrator.pricing.rental_cost import best_interval, charged_hours, interrupted_hours, rental
from orchestrator.spec.job import NO_OVERHEADS, Overheads

HOURS = np.array([5.0])


def drawn_hours(rate: float, checkpoint: float, restart: float, interval: float) -> float:
    """Mean hours over random interruptions of a job of five hours of work."""
    random = np.random.default_rng(0)
    total, jobs = 0.0, 4000
    for _ in range(jobs):
        for _ in range(round(5.0 / interval)):
            while (struck := random.exponential(1 / rate)) < interval + checkpoint:
                total += struck
                while (again := random.exponential(1 / rate)) < restart:
                    total += again
                total += restart
            total += interval + checkpoint
    return total / jobs


@pytest.mark.parametrize(
    ("rate", "checkpoint", "restart", "interval"),
    [(0.2, 0.05, 0.2, 0.5), (1.0, 0.05, 0.2, 0.25), (0.02, 0.01, 0.5, 2.5)],
)
def test_expected_hours_match_simulated_interruptions(
    rate: float, checkpoint: float, restart: float, interval: float
) -> None:
    """Interruptions strike work, checkpoints and restarts alike."""
    expected = interrupted_hours(HOURS, rate, checkpoint, restart, interval)
    drawn = drawn_hours(rate, checkpoint, restart, interval)
    assert float(expected[0]) == pytest.approx(drawn, rel=0.02)


@pytest.mark.parametrize("rate", [0.001, 0.05, 2.0])
@pytest.mark.parametrize("checkpoint", [0.001, 0.1])
def test_the_best_interval_costs_least(rate: float, checkpoint: float) -> None:
    """A tenth more or less costs more; where interruptions are rare it is Young's interval."""
    best = best_interval(rate, checkpoint)
    least, shorter, longer = (
        float(interrupted_hours(HOURS, rate, checkpoint, 0.1, best * f)[0]) for f in (1, 0.9, 1.1)
    )
    assert least < min(shorter, longer)
    if rate * checkpoint < 1e-4:
        assert best == pytest.approx(math.sqrt(2 * checkpoint / rate), rel=0.02)


def test_checkpoints_are_never_further_apart_than_interruptions() -> None:
    """Even where a checkpoint takes far longer than the mean time between interruptions."""
    assert best_interval(100.0, 1.0) == pytest.approx(0.01)


def test_a_rental_is_start_up_work_and_checkpoints() -> None:
    """By hand on demand; spot costs at least as much, and equals it without interruptions."""
    overheads = Overheads(startup_minutes=12, checkpoint_seconds=36, interruptions_per_day=2)
    on_demand = rental(HOURS, overheads, spot=False)
    assert on_demand.hours == pytest.approx(0.2 + 5 + 5 * 0.01)
    often = overheads.model_copy(update={"checkpoint_minutes": 30.0})
    assert rental(HOURS, often, spot=False).hours == pytest.approx(0.2 + 5 + 10 * 0.01)
    slow = overheads.model_copy(update={"checkpoint_seconds": 360.0})  # a twentieth of two hours
    assert rental(HOURS, slow, spot=False).checkpoint_minutes == pytest.approx(120)
    assert rental(HOURS, slow, spot=False).hours == pytest.approx(0.2 + 5 + 2.5 * 0.1)
    short = rental(HOURS / 10, overheads, spot=False)
    assert short.hours == pytest.approx(0.2 + 0.5 + 0.01)
    spot = rental(HOURS, overheads, spot=True)
    assert float(spot.hours[0]) > float(on_demand.hours[0])
    assert spot.checkpoint_minutes / 60 == pytest.approx(best_interval(2 / 24, 0.01))
    calm = overheads.model_copy(update={"interruptions_per_day": 0.0})
    assert rental(HOURS, calm, spot=True) == on_demand
    assert rental(HOURS, NO_OVERHEADS, spot=True).hours == pytest.approx(HOURS)


def test_a_job_shorter_than_the_interval_is_one_interval() -> None:
    """The job does not pay for a checkpoint that it never writes."""
    rare = Overheads(startup_minutes=0, interruptions_per_day=0.01)
    none = rental(np.array([0.0]), rare, spot=True)
    assert none.hours == pytest.approx(0)
    bill = rental(np.array([0.1]), rare, spot=True)
    assert bill.checkpoint_minutes == pytest.approx(6)


def test_free_checkpoints_lose_no_work() -> None:
    """Checkpoints are continuous: interruptions cost nothing where a restart is free too."""
    overheads = Overheads(startup_minutes=0, checkpoint_seconds=0, interruptions_per_day=24)
    free = rental(HOURS, overheads, spot=True)
    assert float(free.hours[0]) == pytest.approx(5, rel=1e-3)
    assert free.checkpoint_minutes == pytest.approx(0.06)
    assert best_interval(0.01, 1.0) == pytest.approx(math.sqrt(2 / 0.01), rel=0.1)


def test_a_bill_has_a_minimum() -> None:
    """The minimum applies where the catalog has one."""
    assert charged_hours(0.001, offer(minimum_minutes=1)) == pytest.approx(1 / 60)
    assert charged_hours(0.5, offer(minimum_minutes=1)) == 0.5
    assert charged_hours(0.001, offer()) == 0.001


def test_a_provider_bills_by_its_own_terms() -> None:
    """Amazon by the second for at least a minute, Hugging Face Jobs by started minutes."""
    assert charged_hours(0.001, offer(provider="aws")) == pytest.approx(1 / 60)
    assert charged_hours(0.1 + 1e-4, offer(provider="aws")) == 0.1 + 1e-4
    hours = charged_hours(np.array([0.001, 0.1, 0.1 + 1e-4, 2.0]), offer(provider="hf-jobs"))
    assert hours.tolist() == pytest.approx([1 / 60, 0.1, 7 / 60, 2.0])
    assert charged_hours(0.001, offer(provider="aws", minimum_minutes=5)) == pytest.approx(5 / 60)
    assert billing_text(offer(provider="hf-jobs")) == "by the minute"
    assert billing_text(offer(provider="aws")) == "by the second, at least 1 min"
    assert billing_text(offer(provider="acme")) == ""
