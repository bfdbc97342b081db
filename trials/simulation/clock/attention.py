"""Durations of fused attention, forward, in 16 bits.

A kernel computes at a fraction of the peak, and spends a fixed time on each byte of queries, keys,
values and results that it reads or writes: it fills and empties its pipeline for every block of
queries. This second part decides at short lengths, since FLOPs grow with the square of the length.
"""

from dataclasses import dataclass, fields

from gpu_catalog.gpu import Gpu
from gpu_catalog.kernel_rates import rates_of
from trials.simulation.recording import FloatArray

# Major compute capabilities whose kernels let tensor cores read shared memory asynchronously:
# FlashAttention-3, cuDNN and TensorRT-LLM on Hopper and Blackwell's B200. Others, the RTX form of
# Blackwell among them, run FlashAttention-2.
ASYNCHRONOUS = frozenset({"9", "10"})
FP32_FORWARD = 0.60  # fraction of the peak in fp32, of which no measured kernel was found


@dataclass(frozen=True, slots=True)
class AttentionRates:
    """Numbers of a GPU; those of its generation of kernels but for the last.

    Attributes:
        launch_us: fixed share of each kernel's duration, in microseconds.
        per_byte: FLOPs that take as long as one byte of arguments and results.
        reached: fraction of the peak FLOP/s.
    """

    launch_us: float
    per_byte: float
    reached: float


def prefix_of(capability: str | None) -> str:
    """Start of the names in ``gpu_catalog.kernel_rates``, by the generation of kernels."""
    major = (capability or "").partition(".")[0]
    return "attention_asynchronous_" if major in ASYNCHRONOUS else "attention_"


def attention_rates(gpu: Gpu) -> AttentionRates:
    """Rates of a GPU, by ``gpu_catalog.kernel_rates``."""
    prefix, numbers = prefix_of(gpu.compute_capability), rates_of(gpu)
    return AttentionRates(*(numbers[f"{prefix}{field.name}"] for field in fields(AttentionRates)))


def forward_seconds(
    flops: FloatArray, moved: FloatArray, peaks: FloatArray | float, rates: AttentionRates
) -> FloatArray:
    """(operators,) seconds of fused attention, forward.

    Args:
        flops: (operators,) FLOPs of both products, without masked blocks.
        moved: (operators,) bytes of arguments and results.
        peaks: FLOP/s.
        rates: of the GPU.
    """
    work = flops + rates.per_byte * moved
    seconds: FloatArray = work / (peaks * rates.reached) + 1e-6 * rates.launch_us
    return seconds
