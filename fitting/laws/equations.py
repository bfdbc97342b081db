"""The analytical laws as pure functions of arrays."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fitting.numerics.arrays import FloatArray


def max_batch_eq1(  # noqa: PLR0913, PLR0917 - the equation has six symbols
    memory_gb: ArrayLike,
    model_memory_gb: ArrayLike,
    seq_len: ArrayLike,
    sparsity: ArrayLike,
    c0: float,
    c1: float,
) -> FloatArray:
    """Largest batch that fits, in examples, before rounding down (arXiv 2408.04693, Eq. 1).

    ``b = c0 * (memory - model_memory) / (seq_len * ((1 - c1) + c1 * sparsity))``

    The paper's Max_BSZ is ``floor(b)``. Callers round down: a fit needs the slope, which a floor
    has not. The paper's text gives c0 = 82, c1 = 0.95 for Mixtral, but its Fig. 13 was drawn with
    c0 = 62, c1 = 0.89.

    Args:
        memory_gb: memory of the GPU, in 10**9 bytes.
        model_memory_gb: memory of the weights alone, in 10**9 bytes.
        seq_len: tokens per example.
        sparsity: active experts over experts, 1.0 for a model without experts.
        c0: scaling coefficient, in examples * tokens per GB.
        c1: MoE coefficient, the share of an example's memory that scales with sparsity, 0 to 1.
    """
    free_gb = np.asarray(memory_gb, dtype=float) - np.asarray(model_memory_gb, dtype=float)
    share = (1.0 - c1) + c1 * np.asarray(sparsity, dtype=float)
    return np.asarray(c0 * free_gb / (np.asarray(seq_len, dtype=float) * share))


def max_batch_affine(  # noqa: PLR0913, PLR0917 - the equation has six symbols
    usable_gib: ArrayLike,
    model_gib: float,
    seq_len: ArrayLike,
    sparsity: ArrayLike,
    p0: float,
    p1: float,
) -> FloatArray:
    """Largest batch that fits, in examples, before rounding down: memory affine in padded tokens.

    ``b = (usable - M0) / (seq_len * (p0 + p1 * sparsity))``

    Eq. 1 of the paper takes the nominal memory of the GPU and the weights alone. This law takes the
    memory that CUDA reports and all that the model holds: weights, quantisation constants,
    adapters, gradients, optimizer. It gives 11 of the paper's 12 largest batches, Eq. 1 gives 5 or
    6 of them.

    Args:
        usable_gib: memory of the GPU as CUDA reports it, in 2**30 bytes.
        model_gib: M0, memory held at any batch size, in 2**30 bytes.
        seq_len: padded tokens per example.
        sparsity: active experts over experts, 1.0 for a model without experts.
        p0: GiB per token at any sparsity.
        p1: GiB per token at sparsity 1, on top of p0.
    """
    per_token = p0 + p1 * np.asarray(sparsity, dtype=float)
    free = np.asarray(usable_gib, dtype=float) - model_gib
    return np.asarray(free / (np.asarray(seq_len, dtype=float) * per_token))


def eq2_terms(batch_size: ArrayLike, sparsity: ArrayLike) -> FloatArray:
    """(…, 2) terms of the paper's throughput law, in the form it fitted (arXiv 2408.04693, Eq. 2).

    Printed: ``q = C2 * log(batch / (s * C3)) + C4`` examples per second. Fitted in its artifact:
    ``q = C4 + C2 * ln(batch ** (1 / (s * C3)))``, which is ``q = C4 + (C2 / C3) * ln(batch) / s``.
    C2 and C3 appear only as their ratio, so no data separate them: the artifact set C3 by hand (1.8
    for Mixtral, 2.5 for BlackMamba). Here the ratio is the first parameter and C4, the throughput
    at batch size 1, the second.
    """
    logarithm = np.log(np.asarray(batch_size, dtype=float)) / np.asarray(sparsity, dtype=float)
    return np.stack([logarithm, np.ones_like(logarithm)], axis=-1)


@dataclass(frozen=True, slots=True)
class TransferCoefficients:
    """Coefficients of a step time that hold on every GPU.

    Attributes:
        moved_gb: D, 10**9 bytes that a step moves at any batch size, over the fraction of the
            bandwidth that is reached. Counted from the model, not fitted.
        host_seconds: h, time of the host per step.
        tflop_per_token: F, 10**12 FLOP per token at sparsity 1 and at the full rate.
        exponent: g, exponent of the sparsity.
        power: p, sharpness of the smooth maximum.
    """

    moved_gb: float
    host_seconds: float
    tflop_per_token: float
    exponent: float
    power: float = 1.1


def step_seconds_transferred(
    tokens: ArrayLike,
    sparsity: ArrayLike,
    bandwidth_gb_per_second: ArrayLike,
    dense_tflops: ArrayLike,
    coefficients: TransferCoefficients,
) -> FloatArray:
    """Seconds per optimizer step on a GPU without measurements.

    ``t**p = t0**p + (tokens * k * s**g)**p`` with ``t0 = h + D / bandwidth`` and ``k = F / rate``:
    a smooth maximum of a floor, set by the host and the memory, and of a cost that grows with the
    tokens, set by the tensor cores.

    Args:
        tokens: padded tokens per step.
        sparsity: active experts over experts.
        bandwidth_gb_per_second: bandwidth of the GPU's memory, in 10**9 bytes per second.
        dense_tflops: rate of its tensor cores without structured sparsity, in 10**12 FLOP per
            second.
        coefficients: D, h, F, g and p.
    """
    c = coefficients
    floor = c.host_seconds + c.moved_gb / np.asarray(bandwidth_gb_per_second, dtype=float)
    slope = c.tflop_per_token / np.asarray(dense_tflops, dtype=float)
    grown = (
        np.asarray(tokens, dtype=float) * slope * np.asarray(sparsity, dtype=float) ** c.exponent
    )
    return np.asarray((floor**c.power + grown**c.power) ** (1 / c.power))
