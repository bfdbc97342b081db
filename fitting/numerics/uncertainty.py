"""Uncertainty of a step time: its own part, and a part shared by all simulated step times."""

import math
from dataclasses import dataclass

import numpy as np

from fitting.numerics.arrays import FloatArray
from fitting.numerics.least_squares import t_quantile

NORMAL_90 = 1.645  # half-width of the normal 90 % interval in standard deviations


@dataclass(frozen=True, slots=True)
class TimeUncertainty:
    """Error of the logarithm of a step time.

    Attributes:
        own: standard deviation of the part that is independent of other step times.
        degrees: degrees of freedom of ``own``, for Student's t; infinite for a normal error.
        shared_below: standard deviation of the error towards shorter times that all simulated step
            times share.
        shared_above: the same towards longer times.
    """

    own: float
    degrees: float = math.inf
    shared_below: float = 0.0
    shared_above: float = 0.0

    def drawn(self, shared: FloatArray, random: np.random.Generator) -> FloatArray:
        """(draws,) errors, for (draws,) standard normal values that all step times share."""
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
        """Standard deviation of a normal distribution with the 90 % interval of the own part."""
        if math.isinf(self.degrees):
            return self.own
        return self.own * t_quantile(0.95, self.degrees) / NORMAL_90

    @property
    def shared(self) -> float:
        """Standard deviation of the shared part, the mean of both sides."""
        return (self.shared_below + self.shared_above) / 2

    @property
    def factors(self) -> tuple[float, float]:
        """Factors from a step time to the ends of its 90 % interval."""
        return (
            math.exp(-NORMAL_90 * math.hypot(self.alone, self.shared_below)),
            math.exp(NORMAL_90 * math.hypot(self.alone, self.shared_above)),
        )


def simulated_uncertainty(below: float, above: float, independent: float) -> TimeUncertainty:
    """Uncertainty of a simulated step time from the relative errors of its 90 % interval's ends.

    ``independent`` is the standard deviation of the part that two simulated times do not share.
    """

    def shared(error: float) -> float:
        whole = math.log1p(error) / NORMAL_90
        return math.sqrt(max(whole**2 - independent**2, 0.0))

    own = min(independent, math.log1p(below) / NORMAL_90)
    return TimeUncertainty(own, math.inf, shared(below), shared(above))
