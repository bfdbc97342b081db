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
    batch_size: ArrayLike, sparsity: ArrayLike, t0: float, k0: float, k1: float
) -> FloatArray:
    """Seconds per optimizer step: ``t = t0 + batch * (k0 + k1 * sparsity)``.

    A fixed cost (launches, optimizer, reading the weights) and a cost per query, of which one part
    grows with the experts each token visits. It beats Eq. 2 on most of the paper's series (project
    findings on throughput laws, on the points of arXiv 2408.04693, Figs. 14 and 15).

    Args:
        batch_size: queries per step.
        sparsity: active experts over experts, 1.0 for a model without experts.
        t0: seconds per step whatever the batch.
        k0: seconds per query whatever the sparsity.
        k1: seconds per query at sparsity 1, on top of k0.
    """
    return np.asarray(affine_terms(batch_size, sparsity) @ np.array([t0, k0, k1]))


def affine_terms(batch_size: ArrayLike, sparsity: ArrayLike) -> FloatArray:
    """What multiplies t0, k0 and k1 in ``step_seconds_affine``: one column each.

    The first two columns alone are the law at one sparsity, ``t = t0 + batch * k``.
    """
    batch, share = np.broadcast_arrays(
        np.asarray(batch_size, dtype=float), np.asarray(sparsity, dtype=float)
    )
    return np.stack([np.ones_like(batch), batch, batch * share], axis=-1)
