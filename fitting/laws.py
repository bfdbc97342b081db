"""The analytical laws as pure functions of arrays."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]


def max_batch_eq1(  # noqa: PLR0913, PLR0917 - the equation has six symbols
    memory_gb: ArrayLike,
    model_memory_gb: ArrayLike,
    seq_len: ArrayLike,
    sparsity: ArrayLike,
    c0: float,
    c1: float,
) -> FloatArray:
    """Largest batch that fits, in queries, before rounding down (arXiv 2408.04693, Eq. 1).

    ``b = c0 * (memory - model_memory) / (seq_len * ((1 - c1) + c1 * sparsity))``

    The paper's Max_BSZ is ``floor(b)``. It is left out here because a floor has no slope to fit
    along; a caller who wants queries takes ``numpy.floor``. The paper's text gives c0 = 82,
    c1 = 0.95 for Mixtral, but its Fig. 13 was drawn with c0 = 62, c1 = 0.89.

    Args:
        memory_gb: memory of the GPU, in 10**9 bytes.
        model_memory_gb: memory of the weights alone, in 10**9 bytes.
        seq_len: tokens per query.
        sparsity: active experts over experts, 1.0 for a model without experts.
        c0: scaling coefficient, in queries * tokens per GB.
        c1: MoE coefficient, the share of a query's memory that scales with sparsity, 0 to 1.
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
    """Largest batch that fits, in queries, before rounding down: memory affine in padded tokens.

    ``b = (usable - M0) / (seq_len * (p0 + p1 * sparsity))``

    Eq. 1 of the paper has the nominal memory of the GPU and the weights alone; here it is what CUDA
    reports, and all that the model holds: weights, quantisation constants, adapters, gradients,
    optimizer (project findings; 11 of the paper's 12 largest batches, where Eq. 1 has 5 or 6).

    Args:
        usable_gib: memory of the GPU as CUDA reports it, in 2**30 bytes.
        model_gib: M0, what is held whatever the batch, alike.
        seq_len: tokens per query, as padded.
        sparsity: active experts over experts, 1.0 for a model without experts.
        p0: GiB per token whatever the sparsity.
        p1: GiB per token at sparsity 1, on top of p0.
    """
    per_token = p0 + p1 * np.asarray(sparsity, dtype=float)
    free = np.asarray(usable_gib, dtype=float) - model_gib
    return np.asarray(free / (np.asarray(seq_len, dtype=float) * per_token))


def throughput_eq2_printed(
    batch_size: ArrayLike, sparsity: ArrayLike, c2: float, c3: float, c4: float
) -> FloatArray:
    """Queries per second, as the paper prints it (arXiv 2408.04693, Eq. 2).

    ``q = C2 * log(batch / (sparsity * C3)) + C4``. Not what it fitted (``throughput_eq2``): printed
    so, C3 and C4 are one parameter, ``C4 - C2 log C3``, and C4 is not the throughput of one query,
    as its text says it is, unless ``sparsity * C3`` is 1.

    Args:
        batch_size: queries per step.
        sparsity: active experts over experts, 1.0 for a model without experts.
        c2: scaling coefficient, in queries per second per e-fold of the batch.
        c3: MoE attenuation coefficient.
        c4: intercept, in queries per second.
    """
    argument = np.asarray(batch_size, dtype=float) / (np.asarray(sparsity, dtype=float) * c3)
    return np.asarray(c2 * np.log(argument) + c4)


def throughput_eq2(
    batch_size: ArrayLike, sparsity: ArrayLike, c2_over_c3: float, c4: float
) -> FloatArray:
    """Queries per second, in the form the paper really fitted (arXiv 2408.04693, Eq. 2).

    Printed: ``q = C2 * log(batch / (sparsity * C3)) + C4``. Fitted in the paper's artifact:
    ``q = C4 + C2 * ln(batch ** (1 / (sparsity * C3)))``, which is
    ``q = C4 + (C2 / C3) * ln(batch) / sparsity``. C2 and C3 appear only as their ratio, so no
    data can tell them apart: the artifact set C3 by hand (1.8 for Mixtral, 2.5 for BlackMamba).
    Here the ratio is the parameter.

    Args:
        batch_size: queries per step.
        sparsity: active experts over experts, 1.0 for a model without experts.
        c2_over_c3: C2 / C3, in queries per second per e-fold of the batch at sparsity 1.
        c4: throughput at batch size 1, in queries per second.
    """
    return np.asarray(eq2_terms(batch_size, sparsity) @ np.array([c2_over_c3, c4]))


def eq2_terms(batch_size: ArrayLike, sparsity: ArrayLike) -> FloatArray:
    """What multiplies c2_over_c3 and c4 in ``throughput_eq2``: one column each."""
    logarithm = np.log(np.asarray(batch_size, dtype=float)) / np.asarray(sparsity, dtype=float)
    return np.stack([logarithm, np.ones_like(logarithm)], axis=-1)


def step_seconds_affine(
    work: ArrayLike, sparsity: ArrayLike, t0: float, k0: float, k1: float
) -> FloatArray:
    """Seconds per optimizer step: ``t = t0 + work * (k0 + k1 * s)``.

    What does not depend on the batch (launches, reading the weights, the optimizer), then a cost
    for each query or token, of which the experts' part grows with how many are active.

    Args:
        work: queries or padded tokens per step.
        sparsity: s, active experts over experts, 1.0 for a model without experts.
        t0: seconds per step whatever the work.
        k0: seconds per query or token of all but the experts.
        k1: of all experts, were they all active.
    """
    slope = k0 + k1 * np.asarray(sparsity, dtype=float)
    return np.asarray(t0 + np.asarray(work, dtype=float) * slope)


def step_seconds_smooth(  # noqa: PLR0913, PLR0917 - the equation has six symbols
    work: ArrayLike, sparsity: ArrayLike, t0: float, k: float, exponent: float, power: float
) -> FloatArray:
    """Seconds per optimizer step: ``t**p = t0**p + (work * k * sparsity**g)**p``.

    A smooth maximum of a floor and a cost that grows: their sum at p = 1, the larger of them as p
    grows. In padded tokens, with p = 1.1 and g shared by a model's GPUs, it is the best that is
    known on the paper's points (``fitting.step_times`` fits it).

    Args:
        work: queries or padded tokens per step.
        sparsity: active experts over experts, 1.0 for a model without experts.
        t0: seconds per step whatever the work.
        k: seconds per query or token at sparsity 1.
        exponent: g, 0 to about 1: how much of the work the experts are.
        power: p, 1 or more.
    """
    grown = np.asarray(work, dtype=float) * k * np.asarray(sparsity, dtype=float) ** exponent
    return np.asarray((t0**power + grown**power) ** (1 / power))


def step_seconds_transferred(  # noqa: PLR0913, PLR0917 - what two GPUs differ in, and the law
    tokens: ArrayLike,
    sparsity: ArrayLike,
    bandwidth_gb_per_second: ArrayLike,
    dense_tflops: ArrayLike,
    moved_gb: float,
    host_seconds: float,
    flop_per_token: float,
    exponent: float,
    power: float = 1.1,
) -> FloatArray:
    """Seconds per optimizer step on a GPU that nobody has measured.

    ``step_seconds_smooth`` with ``t0 = h + D / bandwidth`` and ``k = F / rate``: the host's time is
    the same everywhere, what must be read and written whatever the batch takes as long as the
    memory lets it, and a token as long as the tensor cores need. D is counted from the model, not
    fitted; h, F and g are, on any GPU.

    Args:
        tokens: padded tokens per step.
        sparsity: active experts over experts.
        bandwidth_gb_per_second: of the GPU's memory, 10**9 bytes.
        dense_tflops: of its tensor cores, without structured sparsity, 10**12 FLOP per second.
        moved_gb: D, 10**9 bytes that a step moves whatever the batch, over the part of the
            bandwidth that is reached.
        host_seconds: h.
        flop_per_token: F at sparsity 1, in 10**12 FLOP at the full rate.
        exponent: g.
        power: p.
    """
    floor = host_seconds + moved_gb / np.asarray(bandwidth_gb_per_second, dtype=float)
    slope = flop_per_token / np.asarray(dense_tflops, dtype=float)
    grown = np.asarray(tokens, dtype=float) * slope * np.asarray(sparsity, dtype=float) ** exponent
    return np.asarray((floor**power + grown**power) ** (1 / power))
