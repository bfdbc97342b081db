import math
import statistics
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from trials.records.observation import StopReason
from trials.records.timing_rule import TimingRule, instability, median_interval

SECONDS = st.floats(1e-6, 1e6)


def shuffled(count: int) -> list[float]:
    """The integers from 1 in random order, so that a value is its own rank."""
    values = [float(rank) for rank in range(1, count + 1)]
    Random(count).shuffle(values)
    return values


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [
        (6, 1, 6),
        (7, 1, 7),
        (8, 1, 8),
        (9, 2, 8),
        (10, 2, 9),
        (11, 2, 10),
        (12, 3, 10),
        (15, 4, 12),
        (17, 5, 13),
        (20, 6, 15),
        (25, 8, 18),
        (50, 18, 33),
        (100, 40, 61),
    ],
)
def test_the_interval_has_the_ranks_of_the_published_tables(
    count: int, low: float, high: float
) -> None:
    """The 95 % ranks of the sign test's interval for a median."""
    assert median_interval(shuffled(count)) == (low, high)


@pytest.mark.parametrize("count", range(6))
def test_fewer_than_six_values_have_no_interval(count: int) -> None:
    """The whole range of five values holds the median with 93.75 % only."""
    assert median_interval(shuffled(count)) is None


@pytest.mark.parametrize("count", range(6, 60))
def test_the_ranks_are_the_narrowest_that_hold_the_median_at_95_percent(count: int) -> None:
    """Counted over every way n values can fall on the two sides of their median."""
    interval = median_interval(shuffled(count))
    assert interval is not None
    rank = int(interval[0])
    # The median is below x(k), or above x(n+1-k), when fewer than k values are on one side of it.
    missed = [2 * sum(math.comb(count, i) for i in range(k)) for k in (rank, rank + 1)]
    assert missed[0] / 2**count <= 0.05 < missed[1] / 2**count


@given(st.lists(SECONDS, min_size=6, max_size=40))
def test_the_interval_holds_the_median_of_its_values(values: list[float]) -> None:
    """This holds for any values, however many of them are equal."""
    interval = median_interval(values)
    assert interval is not None
    assert interval[0] <= statistics.median(values) <= interval[1]


def test_no_rule_stops_before_its_fewest_steps() -> None:
    """Five equal steps that exceed the time cap still allow no interval."""
    assert TimingRule().stop_reason([100.0] * 5) is None


def test_equal_steps_are_precise_at_once() -> None:
    """Six values are the fewest with an interval, and its width is zero."""
    assert TimingRule().stop_reason([0.1] * 6) == "precise"


@pytest.mark.parametrize(("spread", "reason"), [(0.25, "precise"), (0.26, None)])
def test_precise_is_half_the_interval_against_the_median(spread: float, reason: str | None) -> None:
    """With six values the interval is their range; half of it over the median decides."""
    steps = [1 - spread, 1.0, 1.0, 1.0, 1.0, 1 + spread]
    rule = TimingRule(relative_half_width=0.25, max_seconds=1000)
    assert rule.stop_reason(steps) == reason


def test_the_step_cap_ends_imprecise_timing() -> None:
    """With one step less, timing continues."""
    wild = [1.0, 2.0] * 10
    rule = TimingRule(max_steps=20, max_seconds=1000)
    assert rule.stop_reason(wild) == "step cap"
    assert rule.stop_reason(wild[:-1]) is None


def test_the_time_cap_ends_long_timing() -> None:
    """The total of the timed steps counts; a moment less continues."""
    wild = [1.0, 2.0] * 4
    assert TimingRule(max_seconds=12.0).stop_reason(wild) == "time cap"
    assert TimingRule(max_seconds=12.1).stop_reason(wild) is None


def test_precise_comes_before_both_caps() -> None:
    """A median that is precise enough is not reported as cut short."""
    assert TimingRule(max_steps=6, max_seconds=0.1).stop_reason([1.0] * 6) == "precise"


@pytest.mark.parametrize(
    "wrong", [{"min_steps": 5}, {"max_steps": 0}, {"max_seconds": 0}, {"relative_half_width": 0}]
)
def test_a_rule_that_can_give_no_interval_is_refused(wrong: dict[str, float]) -> None:
    """Fewer than six steps, and caps of zero, are mistakes of a specification."""
    with pytest.raises(ValidationError):
        TimingRule.model_validate(wrong)


def test_a_warm_up_takes_both_its_steps_and_its_seconds() -> None:
    """Few slow steps are not enough, nor are many instant ones."""
    rule = TimingRule(warmup_steps=3, warmup_seconds=1.0)
    assert not rule.is_warm([])
    assert not rule.is_warm([2.0, 2.0])
    assert not rule.is_warm([0.1] * 9)
    assert rule.is_warm([0.4] * 3)
    assert TimingRule(warmup_steps=0, warmup_seconds=0.0).is_warm([])


@given(st.lists(st.floats(0.0990, 0.1010), min_size=6, max_size=40))
def test_steady_noise_is_called_stable(seconds: list[float]) -> None:
    """One percent of noise in any order is no trend and no outlier."""
    assert instability(seconds, "precise", TimingRule()) is None


@pytest.mark.parametrize(
    ("seconds", "stop_reason", "expected"),
    [
        (
            [0.1, 0.2] * 5,
            "step cap",
            "the median is known to ±33.3% only, timing ended at the step",
        ),
        ([0.1 + 0.01 * n for n in range(12)], "precise", "steps became 70% slower"),
        ([0.2 - 0.01 * n for n in range(12)], "precise", "steps became 43% faster"),
        ([0.1] * 11 + [0.4], "precise", "1 of 12 steps took half as long again or more"),
    ],
)
def test_an_unstable_series_has_a_reason(
    seconds: list[float], stop_reason: StopReason, expected: str
) -> None:
    """The interval is too wide, there is a trend, or steps lie far above the rest."""
    reason = instability(seconds, stop_reason, TimingRule())
    assert reason is not None
    assert expected in reason


# Wider noise makes a trend of one series in a hundred thousand, which no test should wait for.
@given(st.floats(0.001, 0.015), st.integers(0, 2**32))
def test_series_that_end_precise_are_stable(deviation: float, seed: int) -> None:
    """At any noise level, timing ends when the median is precise."""
    random = Random(seed)
    seconds: list[float] = []
    rule = TimingRule()
    while (reason := rule.stop_reason(seconds)) is None:
        seconds.append(0.1 * math.exp(random.gauss(0, deviation)))
    verdict = instability(seconds, reason, rule)
    assert verdict is None if reason == "precise" else verdict is not None


@pytest.mark.parametrize("deviation", [0.05, 0.1, 0.2])
@pytest.mark.parametrize("steps", [9, 30])
def test_wide_noise_is_seldom_called_a_trend(deviation: float, steps: int) -> None:
    """The reason is an imprecise median, not that steps became slower."""
    random = Random(steps)
    series = [
        [0.1 * math.exp(random.gauss(0, deviation)) for _ in range(steps)] for _ in range(1000)
    ]
    verdicts = [instability(seconds, "step cap", TimingRule()) or "" for seconds in series]
    assert sum("became" in text for text in verdicts) < 0.07 * len(verdicts)


@given(st.integers(8, 30), st.sampled_from([1.2, 1.4]), st.integers(0, 2**32))
def test_a_step_up_under_little_noise_is_a_trend(steps: int, factor: float, seed: int) -> None:
    """The clock is throttled from the middle on, in any order of the noise."""
    random = Random(seed)
    seconds = [
        0.1 * random.uniform(0.99, 1.01) * (factor if at >= steps // 2 else 1)
        for at in range(steps)
    ]
    assert "slower" in (instability(seconds, "step cap", TimingRule()) or "")


@pytest.mark.parametrize("steps", range(1, 6))
def test_a_series_too_short_for_an_interval_says_so(steps: int) -> None:
    """No statistic is computed from too few steps."""
    verdict = instability([0.1] * steps, "time cap", TimingRule())
    assert verdict is not None
    assert "too few steps" in verdict
    assert "time cap" in verdict


def test_nothing_timed_is_not_unstable() -> None:
    """The probe measured memory alone."""
    assert instability([], None, TimingRule()) is None
