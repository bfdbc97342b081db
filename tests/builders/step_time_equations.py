"""Equations of step times and throughput, written out plainly: forms are tested against them."""

import numpy as np
from numpy.typing import ArrayLike

from fitting.laws.equations import eq2_terms
from fitting.numerics.arrays import FloatArray


def throughput_eq2_printed(
    batch_size: ArrayLike, sparsity: ArrayLike, c2: float, c3: float, c4: float
) -> FloatArray:
    """Examples per second, ``C2 * log(batch / (s * C3)) + C4`` (arXiv 2408.04693, Eq. 2)."""
    argument = np.asarray(batch_size, dtype=float) / (np.asarray(sparsity, dtype=float) * c3)
    return np.asarray(c2 * np.log(argument) + c4)


def throughput_eq2(
    batch_size: ArrayLike, sparsity: ArrayLike, c2_over_c3: float, c4: float
) -> FloatArray:
    """Examples per second, ``C4 + (C2 / C3) ln(batch) / s``: Eq. 2 as the artifact fits it."""
    return np.asarray(eq2_terms(batch_size, sparsity) @ np.array([c2_over_c3, c4]))


def step_seconds_affine(
    work: ArrayLike, sparsity: ArrayLike, t0: float, k0: float, k1: float
) -> FloatArray:
    """Seconds per step, ``t0 + work * (k0 + k1 * s)``."""
    slope = k0 + k1 * np.asarray(sparsity, dtype=float)
    return np.asarray(t0 + np.asarray(work, dtype=float) * slope)


def step_seconds_smooth(  # noqa: PLR0917 - the equation has six symbols
    work: ArrayLike, sparsity: ArrayLike, t0: float, k: float, exponent: float, power: float
) -> FloatArray:
    """Seconds per step, ``(t0**p + (work * k * s**g)**p) ** (1 / p)``."""
    grown = np.asarray(work, dtype=float) * k * np.asarray(sparsity, dtype=float) ** exponent
    return np.asarray((t0**power + grown**power) ** (1 / power))
