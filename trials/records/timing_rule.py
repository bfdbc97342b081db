"""Stopping rule for timed steps, and the uncertainty of their median. Pure."""

import math
import statistics
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Self

from pydantic import Field, model_validator

from gpu_catalog.record import Record
from trials.recipes.fields import PositiveInt
from trials.records.observation import StopReason

CONFIDENCE = 0.95
PositiveFloat = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]


class TimingRule(Record):
    """Length of the warm-up and stopping rule for timed steps.

    Attributes:
        warmup_steps: fewest steps before timing starts, in addition to those that measure memory.
        warmup_seconds: shortest duration of the warm-up.
        min_steps: fewest timed steps; the median needs six for a 95 % interval.
        max_steps: most timed steps.
        max_seconds: total time of the timed steps after which no further step is timed.
        relative_half_width: timing stops when half the width of the median's 95 % interval is at
            most this fraction of the median.
    """

    warmup_steps: Annotated[int, Field(strict=True, ge=0)] = 2
    warmup_seconds: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 1.0
    min_steps: Annotated[int, Field(strict=True, ge=6)] = 6
    max_steps: PositiveInt = 30
    max_seconds: PositiveFloat = 20.0
    relative_half_width: PositiveFloat = 0.01

    @model_validator(mode="after")
    def _caps_leave_room(self) -> Self:
        if self.max_steps < self.min_steps:
            raise ValueError(
                f"max_steps {self.max_steps} is below min_steps {self.min_steps}: raise it"
            )
        return self

    def is_warm(self, warmup_seconds: Sequence[float]) -> bool:
        """Whether these steps complete the warm-up."""
        return (
            len(warmup_seconds) >= self.warmup_steps and sum(warmup_seconds) >= self.warmup_seconds
        )

    def stop_reason(self, step_seconds: Sequence[float]) -> StopReason | None:
        """Reason to stop after these steps; None to time another."""
        if len(step_seconds) < self.min_steps:
            return None
        interval = median_interval(step_seconds)
        assert interval is not None
        low, high = interval
        if (high - low) / 2 <= self.relative_half_width * statistics.median(step_seconds):
            return "precise"
        if len(step_seconds) >= self.max_steps:
            return "step cap"
        return "time cap" if sum(step_seconds) >= self.max_seconds else None


def instability(
    step_seconds: Sequence[float], stop_reason: StopReason | None, rule: TimingRule
) -> str | None:
    """Reasons why the median of these steps is less certain than the rule requires; None for none.

    A trend is reported when the medians of the first and the last third differ by more than five
    times the rule's half width and the two halves differ significantly (``_halves_differ``). An
    outlier is a step longer than 1.5 medians.
    """
    if not step_seconds:
        return None
    median = statistics.median(step_seconds)
    reasons = []
    if stop_reason != "precise":
        ended = "" if stop_reason is None else f", timing ended at the {stop_reason}"
        reasons.append(f"{_precision_text(step_seconds, median)}{ended}")
    if third := len(step_seconds) // 3:
        first, last = (statistics.median(s) for s in (step_seconds[:third], step_seconds[-third:]))
        drift = last / first - 1
        # The test takes longer than all the rest.
        if abs(drift) > 5 * rule.relative_half_width and _halves_differ(step_seconds):
            reasons.append(f"steps became {abs(drift):.0%} {'slower' if drift > 0 else 'faster'}")
    if max(step_seconds) > 1.5 * median:
        slow = sum(seconds > 1.5 * median for seconds in step_seconds)
        reasons.append(f"{slow} of {len(step_seconds)} steps took half as long again or more")
    return "; ".join(reasons) or None


def _precision_text(step_seconds: Sequence[float], median: float) -> str:
    interval = median_interval(step_seconds)
    if interval is None:
        return "there were too few steps for an interval of the median"
    return f"the median is known to ±{(interval[1] - interval[0]) / 2 / median:.1%} only"


def _halves_differ(values: Sequence[float]) -> bool:
    """Whether earlier and later half differ in distribution, at 95 % confidence.

    The rank-sum test (Mann and Whitney 1947) in its normal approximation: the number U of pairs
    with a larger later value has mean ``n^2 / 2`` and variance ``n^2 (2 n + 1) / 12`` for two
    halves of n; the distance from the mean is reduced by 1/2 as a continuity correction. Fewer than
    eight values never differ significantly.
    """
    half = len(values) // 2
    early, late = values[:half], values[-half:]
    later_larger = sum((x < y) + (x == y) / 2 for x in early for y in late)
    distance = abs(later_larger - half**2 / 2) - 1 / 2
    deviation = math.sqrt(half**2 * (2 * half + 1) / 12)
    return distance > statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * deviation


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Distribution-free confidence interval of the median, at 95 % or more.

    The order statistics x(k) and x(n+1-k) enclose the median with probability
    ``1 - 2 P(Binomial(n, 1/2) < k)``; k is the largest for which that is at least 95 %.

    Returns:
        (low, high), or None for fewer than six values, which have no such interval.
    """
    ordered, rank = sorted(values), _least_rank(len(values))
    return None if rank == 0 else (ordered[rank - 1], ordered[-rank])


@cache
def _least_rank(count: int) -> int:
    """The k of ``median_interval`` for so many values; 0 for none."""
    tail, rank = 0.0, 0
    while rank < count // 2:
        tail += math.comb(count, rank) / 2**count
        if 1 - 2 * tail < CONFIDENCE:
            break
        rank += 1
    return rank
