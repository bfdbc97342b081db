"""Value of a measurement: its expected saving for a user who rents the cheapest option.

The logarithm of the cost of each option to do a job is modelled as normal and independent, but for
an error that options share.
"""

import math
from dataclasses import dataclass

import numpy as np

from fitting.numerics.arrays import FloatArray, IntArray

DRAWS = 20_000
INDIFFERENCE = 0.01  # relative difference of costs that does not matter to a choice


@dataclass(frozen=True, slots=True)
class OptionCosts:
    """Uncertain costs of the options to do one job.

    Attributes:
        mean: (options,) mean of the logarithm of the cost.
        sigma: (options,) standard deviation of its independent part.
        shared: (options,) standard deviation of the part that moves all options with one together.
        group: (options,) index of the alternative that each option belongs to, counted from 0.
    """

    mean: FloatArray
    sigma: FloatArray
    shared: FloatArray
    group: IntArray


def expected_value_of_measurement(costs: OptionCosts, noise: FloatArray) -> FloatArray:
    """(options,) expected saving by measuring each option once, relative to the least cost.

    The knowledge gradient for independent normals (Frazier, Powell and Dayanik, 2008): measuring
    with the standard deviation ``noise`` moves the mean by a normal amount of standard deviation
    ``s = sigma**2 / sqrt(sigma**2 + noise**2)``. The choice changes where the mean crosses the best
    of the other options, a distance d away, which saves ``s * phi(d / s) - d * Phi(-d / s)``.

    Args:
        costs: beliefs about the options; the saving is 0 with fewer than two.
        noise: (options,) standard deviation of the logarithm of a measured cost.
    """
    if len(costs.mean) < 2:
        return np.zeros(len(costs.mean))
    # An error that all options share does not change their order. Where some lack it, it does.
    sigma = costs.sigma if (costs.shared > 0).all() else np.hypot(costs.sigma, costs.shared)
    least, second = np.partition(costs.mean, 1)[:2]
    others = np.where(np.arange(len(costs.mean)) == int(costs.mean.argmin()), second, least)
    change = sigma**2 / np.maximum(np.hypot(sigma, noise), 1e-12)
    distance = np.abs(costs.mean - others)
    ratio = distance / np.maximum(change, 1e-12)
    density = np.exp(-(ratio**2) / 2) / np.sqrt(2 * np.pi)
    beyond = np.array([math.erfc(r / math.sqrt(2)) / 2 for r in ratio])
    return np.asarray(np.maximum(change * density - distance * beyond, 0.0))


def probability_cheapest(costs: OptionCosts, seed: int) -> FloatArray:
    """(groups,) probability that each is the cheapest to within ``INDIFFERENCE``.

    A group costs as much as its cheapest option. ``DRAWS`` seeded draws give the probability to
    within one per cent.
    """
    random = np.random.default_rng(seed)
    own, shared = (random.standard_normal((DRAWS, n)) for n in (len(costs.mean), 1))
    drawn = costs.mean + costs.sigma * own + costs.shared * shared
    groups = int(costs.group.max()) + 1
    least = np.stack([drawn[:, costs.group == g].min(axis=1) for g in range(groups)], axis=1)
    limit = least.min(axis=1, keepdims=True) + np.log1p(INDIFFERENCE)
    return np.asarray((least <= limit).mean(axis=0))
