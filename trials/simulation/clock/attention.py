"""Durations of fused attention in 16 bits.

A kernel computes its products at a fraction of the peak, and spends a fixed time on each score and
on each query, or it moves its tensors, whichever takes longer:

- Scores (one for each query and key of a head) go through the exponential, which is not a product:
  the narrower the heads, the larger its share.
- Queries are loaded, rescaled and written block by block. This decides at short lengths, since
  scores grow with the square of the length.
- The blocks on the diagonal of a causal mask are computed whole.
- A multiprocessor works on one block of queries to its end, so the last block, which has the most
  keys, ends later than the mean: most visible with few heads.
- Tensors move at the speed of the L2 cache if all of them fit: the operator before has just written
  them. Otherwise they move at that of the memory.
"""

from dataclasses import dataclass, replace

import numpy as np

from gpu_catalog.gpu import Gpu
from gpu_catalog.kernel_rates import rates_of
from trials.simulation.clock.joined import joined_seconds
from trials.simulation.clock.moving import (
    clocks_per_second,
    l2_bytes,
    moving_constants,
    moving_rates,
)
from trials.simulation.clock.operators import Operators
from trials.simulation.recording import Column, FloatArray, IntArray, Kind, OperatorClass, Rate

# Major compute capabilities whose kernels let tensor cores read shared memory asynchronously:
# FlashAttention-3, cuDNN and TensorRT-LLM on Hopper and Blackwell's B200. Others, the RTX form of
# Blackwell among them, run FlashAttention-2.
ASYNCHRONOUS = frozenset({"9", "10"})
FP32_FORWARD = 0.60  # fraction of the peak in fp32, of which no measured kernel was found
# Fraction of the peak in the backward pass of FlashAttention-2 on Ampere and Ada, at all lengths.
BACKWARD = 0.56
BLOCK = 128  # queries of a block
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5  # for each score (2205.14135)
# Columns of ``AttentionShapes``.
SHAPE_COLUMNS = (
    *(Column.FLOPS, Column.BYTES, Column.ROWS, Column.COLUMNS, Column.INNER),
    Column.PRODUCTS,
)
# Classes of FlashAttention-2's own kernels, by those of PyTorch's.
FLASH2 = {
    OperatorClass.ATTENTION_FORWARD: OperatorClass.FLASH2_FORWARD,
    OperatorClass.ATTENTION_BACKWARD: OperatorClass.FLASH2_BACKWARD,
}


@dataclass(frozen=True, slots=True)
class AttentionRates:
    """Numbers of a GPU and direction; those of its generation of kernels but for the last.

    Attributes:
        launch_us: fixed share of each kernel's duration, in microseconds.
        query_clocks: clocks of a multiprocessor that each query of a head takes beside its scores.
        scores_per_clock: scores that a multiprocessor completes per clock beside the products.
        last_block: share of the longest block of queries that adds to the mean duration of all.
        reached: fraction of the peak FLOP/s.
    """

    launch_us: float
    query_clocks: float
    scores_per_clock: float
    last_block: float
    reached: float


@dataclass(frozen=True, slots=True)
class AttentionShapes:
    """Columns of fused attention, each (operators,).

    Attributes:
        flops: of all products, without masked blocks.
        moved: bytes of arguments and results.
        queries: of a head.
        keys: that each query may see at most.
        width: of a head.
        heads: of all examples.
    """

    flops: FloatArray
    moved: FloatArray
    queries: FloatArray
    keys: FloatArray
    width: FloatArray
    heads: FloatArray


@dataclass(frozen=True, slots=True)
class AttentionPeaks:
    """Facts of a GPU.

    Attributes:
        flops: (operators,) FLOP/s.
        clocks: clocks per second of all multiprocessors; nan where unknown.
        multiprocessors: of the GPU; None where unknown.
        bandwidth: bytes per second that kernels reach.
        cached: bytes per second of what is in the L2 cache.
        cache_bytes: of that cache.
        knee: exponent that joins computing and moving, as ``MovingConstants``.
    """

    flops: FloatArray | float
    clocks: float
    multiprocessors: int | None
    bandwidth: float
    cached: float
    cache_bytes: float
    knee: float


def rate_names(
    capability: str | None, *, is_flash2: bool = False, is_backward: bool = False
) -> tuple[str, ...] | None:
    """Names of ``AttentionRates`` in ``gpu_catalog.kernel_rates``.

    All but the last are those of the generation of kernels; queries of the backward pass, which
    writes sums of gradients, have a number of their own.

    Args:
        capability: compute capability of the GPU.
        is_flash2: whether FlashAttention-2 runs where PyTorch has a faster kernel.
        is_backward: whether it is the backward pass.

    Returns:
        None for kernels of which too few were measured.
    """
    is_asynchronous = (capability or "").partition(".")[0] in ASYNCHRONOUS
    if is_backward and not is_asynchronous:
        return None
    kernels = "attention_asynchronous_" if is_asynchronous and not is_flash2 else "attention_"
    of_flash2 = "flash2_" if is_asynchronous and is_flash2 else ""
    own = f"{kernels}{of_flash2}backward_" if is_backward else kernels
    return (
        f"{kernels}launch_us",
        f"{own}query_clocks",
        f"{kernels}scores_per_clock",
        f"{kernels}last_block",
        f"{own if is_backward else kernels + of_flash2}reached",
    )


def attention_peaks(gpu: Gpu, flops: FloatArray | float) -> AttentionPeaks:
    """Facts of a GPU, by the catalog, the rates of other operators, and its FLOP/s."""
    moving, clocks = moving_constants(gpu), clocks_per_second(gpu)
    bandwidth = moving_rates(gpu).bandwidth * moving.reached
    cached = np.fmax(rates_of(gpu)["product_cached"] * clocks, bandwidth)
    size = l2_bytes(gpu)
    return AttentionPeaks(
        flops, clocks, gpu.multiprocessors, bandwidth, float(cached), size, moving.knee
    )


def attention_rates(gpu: Gpu, names: tuple[str, ...]) -> AttentionRates:
    """Rates of a GPU, by their names."""
    numbers = rates_of(gpu)
    return AttentionRates(*(numbers[name] for name in names))


def fused_seconds(
    shapes: AttentionShapes, products: int, peaks: AttentionPeaks, rates: AttentionRates
) -> FloatArray:
    """(operators,) seconds of fused attention, forward or backward.

    Args:
        shapes: of the operators.
        products: matrix products for each score: ``FORWARD_PRODUCTS`` or ``BACKWARD_PRODUCTS``.
        peaks: of the GPU; without a known clock the exponential and the queries take no time, and
            without multiprocessors no block is the last.
        rates: of the GPU.
    """
    rows = shapes.heads * shapes.queries
    unmasked = shapes.flops / (2 * products * shapes.width)
    # A causal mask leaves half of the scores, and half of each block on its diagonal, which is
    # computed all the same.
    scores = np.minimum(unmasked + rows * BLOCK / 2, np.maximum(rows * shapes.keys, unmasked))
    computing = 2 * products * scores * shapes.width / (peaks.flops * rates.reached)
    if not np.isnan(peaks.clocks):
        clocks = scores / rates.scores_per_clock + rows * rates.query_clocks
        computing = computing + clocks / peaks.clocks
    of_longest = np.minimum(BLOCK * shapes.keys / scores, 1 / shapes.heads)
    computing *= 1 + rates.last_block * (peaks.multiprocessors or 0) * of_longest
    is_cached = shapes.moved <= peaks.cache_bytes
    moving = shapes.moved / np.where(is_cached, peaks.cached, peaks.bandwidth)
    return joined_seconds(moving, computing, peaks.knee) + 1e-6 * rates.launch_us


def by_flash2(operators: Operators) -> Operators:
    """The same operators with attention by FlashAttention-2's own kernels."""
    names = operators.names.copy()
    for fused, flash2 in FLASH2.items():
        own = (operators.kinds == Kind.RUN) & (names // 4 == fused)
        names[own] += 4 * (flash2 - fused)
    return replace(operators, names=names)


def attention_seconds(
    work: IntArray,
    rate: IntArray,
    numbers: FloatArray,
    gpu: Gpu,
    peaks: FloatArray,
) -> FloatArray:
    """(operators,) seconds of fused attention in 16 bits; nan for all others.

    Args:
        work: (operators,) class of each, ``OperatorClass``.
        rate: (operators,) peak rate that applies to each, ``Rate``.
        numbers: (operators, columns) numbers, by ``Column``.
        gpu: GPU that runs them.
        peaks: (rates,) FLOP/s.
    """
    seconds = np.full(len(work), np.nan)
    for fused, flash2 in FLASH2.items():
        is_backward = fused is OperatorClass.ATTENTION_BACKWARD
        for kernel in (fused, flash2):
            names = rate_names(
                gpu.compute_capability, is_flash2=kernel is flash2, is_backward=is_backward
            )
            if names is None:
                continue
            own = (work == kernel) & (rate != Rate.FP32)
            shapes = AttentionShapes(*(numbers[own, column] for column in SHAPE_COLUMNS))
            products = BACKWARD_PRODUCTS if is_backward else FORWARD_PRODUCTS
            facts, rates = attention_peaks(gpu, peaks[rate[own]]), attention_rates(gpu, names)
            seconds[own] = fused_seconds(shapes, products, facts, rates)
    return seconds
