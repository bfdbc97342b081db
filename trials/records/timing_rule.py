"""When enough steps have been timed, and how sure their median is. Pure."""

import math
import statistics
from collections.abc import Sequence
from typing import Annotated, Self

from pydantic import Field, model_validator

from gpu_catalog.record import Record
from trials.records.observation import StopReason
from trials.records.recipe import PositiveInt

CONFIDENCE = 0.95
PositiveFloat = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]


class TimingRule(Record):
    """How long to warm up, and when to stop timing steps.

    Attributes:
        warmup_steps: steps before timing starts; those in which memory was counted are not among
            them.
        warmup_seconds: warm up at least this long, however many steps that takes.
        min_steps: never fewer; six is the least that gives the median a 95 % interval.
        max_steps: never more.
        max_seconds: no further step once this much time was spent on timed steps.
        relative_half_width: stop when half the 95 % interval is this part of the median.
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
        """Whether these steps were enough of a warm-up."""
        return (
            len(warmup_seconds) >= self.warmup_steps and sum(warmup_seconds) >= self.warmup_seconds
        )

    def stop_reason(self, step_seconds: Sequence[float]) -> StopReason | None:
        """Why to stop after these steps, or None to time another."""
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
    """Why the median of these steps is less sure than it was asked to be; None when it is not.

    A trend is told where the medians of the first and the last third lie apart by more than five
    times the rule's width, and by more than noise alone makes likely (``_halves_differ``); an
    outlier where a step took more than half as long again as the median.
    """
    if not step_seconds:
        return None
    median = statistics.median(step_seconds)
    reasons = []
    if stop_reason != "precise":
        ended = "" if stop_reason is None else f", timing ended at the {stop_reason}"
        reasons.append(f"{_known_to(step_seconds, median)}{ended}")
    if _halves_differ(step_seconds):
        third = len(step_seconds) // 3
        first, last = (statistics.median(s) for s in (step_seconds[:third], step_seconds[-third:]))
        drift = last / first - 1
        if abs(drift) > 5 * rule.relative_half_width:
            reasons.append(f"steps became {abs(drift):.0%} {'slower' if drift > 0 else 'faster'}")
    slow = sum(seconds > 1.5 * median for seconds in step_seconds)
    if slow:
        reasons.append(f"{slow} of {len(step_seconds)} steps took half as long again or more")
    return "; ".join(reasons) or None


def _known_to(step_seconds: Sequence[float], median: float) -> str:
    interval = median_interval(step_seconds)
    if interval is None:
        return "there were too few steps for an interval of the median"
    return f"the median is known to ±{(interval[1] - interval[0]) / 2 / median:.1%} only"


def _halves_differ(values: Sequence[float]) -> bool:
    """Whether the later half is from another distribution than the earlier, at 95 % confidence.

    The rank-sum test (Mann and Whitney 1947) with its normal approximation: the number U of pairs
    in which the later value is larger has mean ``n^2 / 2`` and variance ``n^2 (2 n + 1) / 12`` for
    two halves of n; 1/2 off its distance from the mean is for U being whole. Fewer than eight
    values never suffice.
    """
    half = len(values) // 2
    early, late = values[:half], values[-half:]
    later_larger = sum((x < y) + (x == y) / 2 for x in early for y in late)
    distance = abs(later_larger - half**2 / 2) - 1 / 2
    deviation = math.sqrt(half**2 * (2 * half + 1) / 12)
    return distance > statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * deviation


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """An interval that holds the median with at least 95 % confidence, whatever the distribution.

    The order statistics x(k) and x(n+1-k) enclose the median with probability
    ``1 - 2 P(Binomial(n, 1/2) < k)``; the largest k that keeps it at 95 % is taken.

    Returns:
        (low, high), or None for fewer than six values, which allow no such interval.
    """
    ordered = sorted(values)
    count = len(ordered)
    tail, rank = 0.0, 0
    while rank < count // 2:
        tail += math.comb(count, rank) / 2**count
        if 1 - 2 * tail < CONFIDENCE:
            break
        rank += 1
    return None if rank == 0 else (ordered[rank - 1], ordered[count - rank])
