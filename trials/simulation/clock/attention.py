"""Durations of fused attention in 16 bits.

A kernel computes its products at a fraction of the peak, and spends a fixed time on each score and
on each byte of queries, keys, values and results:

- Scores (one for each query and key of a head) go through the exponential, which is not a product:
  the narrower the heads, the larger its share.
- It fills and empties its pipeline for every block of queries. This decides at short lengths, since
  FLOPs grow with the square of the length.
- A multiprocessor works on one block of queries to its end, so the last block, which has the most
  keys, ends later than the mean: most visible with few heads.
"""

from dataclasses import dataclass, fields, replace

import numpy as np

from gpu_catalog.gpu import Gpu
from gpu_catalog.kernel_rates import rates_of
from trials.simulation.clock.moving import clocks_per_second
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
SHAPE_COLUMNS = (Column.FLOPS, Column.BYTES, Column.COLUMNS, Column.INNER, Column.PRODUCTS)
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
        per_byte: FLOPs that take as long as one byte of arguments and results.
        scores_per_clock: scores that a multiprocessor completes per clock beside the products.
        last_block: share of the longest block of queries that adds to the mean duration of all.
        reached: fraction of the peak FLOP/s.
    """

    launch_us: float
    per_byte: float
    scores_per_clock: float
    last_block: float
    reached: float


@dataclass(frozen=True, slots=True)
class AttentionShapes:
    """Columns of fused attention, each (operators,).

    Attributes:
        flops: of all products, without masked blocks.
        moved: bytes of arguments and results.
        keys: that each query may see at most.
        width: of a head.
        heads: of all examples.
    """

    flops: FloatArray
    moved: FloatArray
    keys: FloatArray
    width: FloatArray
    heads: FloatArray


@dataclass(frozen=True, slots=True)
class AttentionPeaks:
    """Facts of a GPU.

    Attributes:
        flops: (operators,) FLOP/s.
        clocks: clocks per second of all multiprocessors.
        multiprocessors: of the GPU.
    """

    flops: FloatArray | float
    clocks: float
    multiprocessors: int | None


def rate_names(
    capability: str | None, *, is_flash2: bool = False, is_backward: bool = False
) -> tuple[str, ...] | None:
    """Names of ``AttentionRates`` in ``gpu_catalog.kernel_rates``.

    All but the last are those of the generation of kernels, forward.

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
    direction = "backward_" if is_backward else ""
    shared = tuple(f"{kernels}{field.name}" for field in fields(AttentionRates)[:-1])
    return (*shared, f"{kernels}{of_flash2}{direction}reached")


def attention_peaks(gpu: Gpu, flops: FloatArray | float) -> AttentionPeaks:
    """Facts of a GPU, by the catalog and its FLOP/s."""
    return AttentionPeaks(flops, clocks_per_second(gpu), gpu.multiprocessors)


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
        peaks: of the GPU; without a known clock the exponential takes no time, and without
            multiprocessors no block is the last.
        rates: of the GPU.
    """
    flops_per_second = peaks.flops * rates.reached
    scores = shapes.flops / (2 * products * shapes.width)
    computing = shapes.flops / flops_per_second
    if not np.isnan(peaks.clocks):
        computing = computing + scores / (rates.scores_per_clock * peaks.clocks)
    of_longest = np.minimum(BLOCK * shapes.keys / scores, 1 / shapes.heads)
    computing *= 1 + rates.last_block * (peaks.multiprocessors or 0) * of_longest
    moving = rates.per_byte * shapes.moved / flops_per_second
    seconds: FloatArray = computing + moving + 1e-6 * rates.launch_us
    return seconds


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
