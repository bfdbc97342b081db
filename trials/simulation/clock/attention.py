"""Durations of fused attention in 16 bits.

A kernel computes its products at a fraction of the peak and its exponentials beside them, and
spends a fixed time on each query, or it moves its tensors, whichever takes longer:

- Scores (one for each query and key of a head) go through the exponential, which other units of a
  multiprocessor compute while its tensor cores work on products of other blocks. The narrower the
  heads, the more it delays them.
- Queries are loaded, rescaled and written block by block. This decides at short lengths, since
  scores grow with the square of the length.
- The blocks on the diagonal of a causal mask are computed whole.
- A multiprocessor works on one block of queries to its end, so the last block, which has the most
  keys, ends later than the mean: most visible with few heads.
- Tensors move at the speed of the L2 cache if all of them fit: the operator before has just written
  them. Otherwise they move at that of the memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

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

# Compute capabilities, or their major part, of each generation of kernels, by how the names of its
# rates begin. FlashAttention-2 has larger blocks on the A100 and A30, for their shared memory, than
# on ``OTHERS``: GeForce and its kin of each generation, Blackwell's among them. FlashAttention-3 on
# Hopper, and the kernels of cuDNN and TensorRT-LLM for Hopper and B200, let tensor cores read
# shared memory asynchronously.
A100, HOPPER, B200, OTHERS = (f"attention_{name}" for name in ("a100_", "hopper_", "b200_", ""))
GENERATIONS = {"8.0": A100, "9": HOPPER, "10": B200}
ASYNCHRONOUS = frozenset({"9", "10"})
OVERLAP = 2.0  # exponent that joins products and exponentials
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
        wide_query_clocks: those that it takes more for each 128 elements of a head's width.
        scores_per_clock: scores that a multiprocessor completes per clock.
        last_block: share of the longest block of queries that delays the end of all.
        last_block_knee: exponent that joins that share to the mean duration of all: 1 adds it, and
            a larger one is that of a kernel which begins with the longest blocks.
        reached: fraction of the peak FLOP/s.
    """

    launch_us: float
    query_clocks: float
    wide_query_clocks: float
    scores_per_clock: float
    last_block: float
    last_block_knee: float
    reached: float


class RateNames(NamedTuple):
    """Names of ``AttentionRates`` in ``gpu_catalog.kernel_rates``; None for a number that is 0."""

    launch_us: str
    query_clocks: str | None
    wide_query_clocks: str | None
    scores_per_clock: str
    last_block: str
    last_block_knee: str
    reached: str


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
) -> RateNames | None:
    """Names of the rates of a GPU's kernels.

    All but the last are those of the generation of kernels. The time of a query depends on the
    width of its head where kernels are asynchronous, and in the backward pass, which writes sums of
    gradients, on that alone.

    Args:
        capability: compute capability of the GPU.
        is_flash2: whether FlashAttention-2 runs where PyTorch has a faster kernel.
        is_backward: whether it is the backward pass.

    Returns:
        None for kernels of which too few were measured.
    """
    major = (capability or "").partition(".")[0]
    is_asynchronous = major in ASYNCHRONOUS
    if is_backward and not is_asynchronous:
        return None
    generation = GENERATIONS.get(capability or "", GENERATIONS.get(major, OTHERS))
    own = "attention_asynchronous_" if is_backward else generation
    has_width = is_backward or (is_asynchronous and not is_flash2)
    if is_asynchronous and is_flash2:
        generation, own = A100, "attention_flash2_"
    own += "backward_" if is_backward else ""
    return RateNames(
        launch_us=f"{generation}launch_us",
        query_clocks=None if is_backward else f"{generation}query_clocks",
        wide_query_clocks=f"{own}wide_query_clocks" if has_width else None,
        # One number of all exponential units but those of ``OTHERS``.
        scores_per_clock=f"{OTHERS if generation == OTHERS else HOPPER}scores_per_clock",
        last_block=f"{generation}last_block",
        last_block_knee=f"{generation}last_block_knee",
        reached=f"{own}reached",
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


def rates_by_names(names: RateNames, number: Callable[[str], float]) -> AttentionRates:
    """Rates by their names; those that a kernel lacks are 0."""
    return AttentionRates(*(0.0 if name is None else number(name) for name in names))


def attention_rates(gpu: Gpu, names: RateNames) -> AttentionRates:
    """Rates of a GPU, by their names."""
    return rates_by_names(names, rates_of(gpu).__getitem__)


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
        exponentials = scores / rates.scores_per_clock / peaks.clocks
        clocks = rates.query_clocks + rates.wide_query_clocks * shapes.width / 128
        computing = joined_seconds(computing, exponentials, OVERLAP) + rows * clocks / peaks.clocks
    of_longest = np.minimum(BLOCK * shapes.keys / scores, 1 / shapes.heads)
    last = computing * rates.last_block * (peaks.multiprocessors or 0) * of_longest
    computing = joined_seconds(computing, last, rates.last_block_knee)
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
