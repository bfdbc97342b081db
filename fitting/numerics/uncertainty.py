"""How far a step time may be off: of its own, and together with all others that were simulated."""

import math
from dataclasses import dataclass

import numpy as np

from fitting.numerics.arrays import FloatArray
from fitting.numerics.least_squares import t_quantile

NORMAL_90 = 1.645  # half the 90 % interval of a normal distribution, in standard deviations


@dataclass(frozen=True, slots=True)
class TimeUncertainty:
    """The error of the logarithm of a step time.

    Attributes:
        own: standard deviation of what is this one's alone.
        degrees: of freedom that it is known by: Student's t of as many; infinite where it is known.
        shared_below: standard deviation, below, of what all simulated step times have in common.
        shared_above: above.
    """

    own: float
    degrees: float = math.inf
    shared_below: float = 0.0
    shared_above: float = 0.0

    def drawn(self, shared: FloatArray, random: np.random.Generator) -> FloatArray:
        """(draws,) errors, for draws of a standard normal that all have in common."""
        count = len(shared)
        alone = (
            random.standard_normal(count)
            if math.isinf(self.degrees)
            else random.standard_t(self.degrees, count)
        )
        together = np.where(shared > 0, self.shared_above, self.shared_below) * shared
        return np.asarray(self.own * alone + together)

    @property
    def alone(self) -> float:
        """Standard deviation of a normal distribution with the 90 % interval of its own part."""
        if math.isinf(self.degrees):
            return self.own
        return self.own * t_quantile(0.95, self.degrees) / NORMAL_90

    @property
    def shared(self) -> float:
        """That of the other part."""
        return (self.shared_below + self.shared_above) / 2

    @property
    def factors(self) -> tuple[float, float]:
        """What a step time times these is the 90 % interval of it."""
        return (
            math.exp(-NORMAL_90 * math.hypot(self.alone, self.shared_below)),
            math.exp(NORMAL_90 * math.hypot(self.alone, self.shared_above)),
        )


def simulated(below: float, above: float, apart: float) -> TimeUncertainty:
    """The doubt of a simulated step time by its 90 % interval.

    Args:
        below: how much shorter it may be, as a part.
        above: how much longer.
        apart: standard deviation of the ratio of two, of its logarithm: what they do not share.
    """

    def shared(part: float) -> float:
        whole = math.log1p(part) / NORMAL_90
        return math.sqrt(max(whole**2 - apart**2, 0.0))

    return TimeUncertainty(
        min(apart, math.log1p(below) / NORMAL_90), math.inf, shared(below), shared(above)
    )
