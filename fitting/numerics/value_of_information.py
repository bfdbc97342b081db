"""Which measurement is worth its price: what it may save whoever rents by the ranking.

Of several ways to do one job the cheapest is to be found. What each costs is known to a part of it:
the logarithm of the cost is taken for normal, and the ways for independent.
"""

import math
from dataclasses import dataclass

import numpy as np

from fitting.numerics.arrays import FloatArray, IntArray

DRAWS = 20_000
ALIKE = 0.01  # of the cost: whoever pays so much more has not chosen wrong


@dataclass(frozen=True, slots=True)
class Ways:
    """Ways to do one job.

    Attributes:
        mean: (ways,) of the logarithm of the cost.
        sigma: (ways,) its standard deviation, of what is each one's alone.
        shared: (ways,) that of what all have in common whose is not 0: it moves them together.
        group: (ways,) which of the things to choose between each is a way of, counted from 0.
    """

    mean: FloatArray
    sigma: FloatArray
    shared: FloatArray
    group: IntArray


def expected_value_of_measurement(ways: Ways, noise: FloatArray) -> FloatArray:
    """(ways,) what measuring each way once is expected to save, as a part of the least cost.

    The knowledge gradient of independent normals (Gupta and Miescke, 1996; Frazier, Powell and
    Dayanik, 2008): a measurement with the standard deviation ``noise`` moves the mean by
    ``s = sigma**2 / sqrt(sigma**2 + noise**2)`` in expectation, and with it the choice where it
    crosses the best of the others, ``d`` away: ``s * phi(d / s) - d * Phi(-d / s)``.

    Args:
        ways: two or more; of one there is nothing to choose, and nothing to save.
        noise: (ways,) standard deviation of the logarithm of what would be measured.
    """
    if len(ways.mean) < 2:
        return np.zeros(len(ways.mean))
    # What all have in common does not move one past another; beside others it is each one's own.
    apart = ways.sigma if (ways.shared > 0).all() else np.hypot(ways.sigma, ways.shared)
    least, second = np.partition(ways.mean, 1)[:2]
    others = np.where(np.arange(len(ways.mean)) == int(ways.mean.argmin()), second, least)
    moved = apart**2 / np.maximum(np.hypot(apart, noise), 1e-12)
    away = np.abs(ways.mean - others)
    ratio = away / np.maximum(moved, 1e-12)
    density = np.exp(-(ratio**2) / 2) / np.sqrt(2 * np.pi)
    beyond = np.array([math.erfc(r / math.sqrt(2)) / 2 for r in ratio])
    return np.asarray(np.maximum(moved * density - away * beyond, 0.0))


def probability_right(ways: Ways, seed: int) -> FloatArray:
    """(groups,) how likely each is the cheapest, or dearer by no more than ``ALIKE``.

    By so many seeded draws: to within a per cent. A group costs what its cheapest way does.
    """
    random = np.random.default_rng(seed)
    alone, together = (random.standard_normal((DRAWS, n)) for n in (len(ways.mean), 1))
    drawn = ways.mean + ways.sigma * alone + ways.shared * together
    groups = int(ways.group.max()) + 1
    costs = np.stack([drawn[:, ways.group == g].min(axis=1) for g in range(groups)], axis=1)
    return np.asarray((costs <= costs.min(axis=1, keepdims=True) + np.log1p(ALIKE)).mean(axis=0))
