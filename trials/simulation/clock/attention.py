"""Durations of fused attention in 16 bits.

A kernel computes at a fraction of the peak, and spends a fixed time on each byte of queries, keys,
values and results that it reads or writes: it fills and empties its pipeline for every block of
queries. This second part decides at short lengths, since FLOPs grow with the square of the length.
"""

from dataclasses import dataclass, replace

import numpy as np

from gpu_catalog.gpu import Gpu
from gpu_catalog.kernel_rates import rates_of
from trials.simulation.recording import (
    Column,
    FloatArray,
    IntArray,
    Kind,
    OperatorClass,
    Operators,
    Rate,
)

# Major compute capabilities whose kernels let tensor cores read shared memory asynchronously:
# FlashAttention-3, cuDNN and TensorRT-LLM on Hopper and Blackwell's B200. Others, the RTX form of
# Blackwell among them, run FlashAttention-2.
ASYNCHRONOUS = frozenset({"9", "10"})
FP32_FORWARD = 0.60  # fraction of the peak in fp32, of which no measured kernel was found
# Fraction of the peak in the backward pass of FlashAttention-2 on Ampere and Ada, at all lengths.
BACKWARD = 0.56
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
        reached: fraction of the peak FLOP/s.
    """

    launch_us: float
    per_byte: float
    reached: float


def rate_names(
    capability: str | None, *, is_flash2: bool = False, is_backward: bool = False
) -> tuple[str, str, str] | None:
    """Names of ``AttentionRates`` in ``gpu_catalog.kernel_rates``.

    Launch and bytes are those of the generation of kernels, forward.

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
    return f"{kernels}launch_us", f"{kernels}per_byte", f"{kernels}{of_flash2}{direction}reached"


def attention_rates(gpu: Gpu, names: tuple[str, str, str]) -> AttentionRates:
    """Rates of a GPU, by their names."""
    numbers = rates_of(gpu)
    return AttentionRates(*(numbers[name] for name in names))


def fused_seconds(
    flops: FloatArray, moved: FloatArray, peaks: FloatArray | float, rates: AttentionRates
) -> FloatArray:
    """(operators,) seconds of fused attention, forward or backward.

    Args:
        flops: (operators,) FLOPs of the two or five products, without masked blocks.
        moved: (operators,) bytes of arguments and results.
        peaks: FLOP/s.
        rates: of the GPU.
    """
    work = flops + rates.per_byte * moved
    seconds: FloatArray = work / (peaks * rates.reached) + 1e-6 * rates.launch_us
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
    peaks: tuple[FloatArray, FloatArray],
) -> FloatArray:
    """(operators,) seconds of fused attention in 16 bits; nan for all others.

    Args:
        work: (operators,) class of each, ``OperatorClass``.
        rate: (operators,) peak rate that applies to each, ``Rate``.
        numbers: (operators, columns) numbers, by ``Column``.
        gpu: GPU that runs them.
        peaks: (rates,) FLOP/s, times the speed of the stack, forward and backward.
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
            moved, flops = numbers[own, Column.BYTES], numbers[own, Column.FLOPS]
            own_peaks, rates = peaks[is_backward][rate[own]], attention_rates(gpu, names)
            seconds[own] = fused_seconds(flops, moved, own_peaks, rates)
    return seconds
