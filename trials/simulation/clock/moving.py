"""Durations of operators that only move data, by access pattern and width.

A kernel takes the time of its bytes at the bandwidth that the GPU reaches, or that of its access
pattern, whichever is longer, or somewhat more where both are alike:

- Elements that are addressed or converted one by one (strided, broadcast, widened), normalised, or
  added to rows of a table complete at a rate per clock of a multiprocessor.
- A softmax gives each row to a block of threads, which loads, reduces and writes in a fixed time:
  short rows keep too few bytes under way.
- A kernel that reads rows more than once finds them in the L2 cache, if those at work on all
  multiprocessors fit.
- A mean of one picked number a row runs in a single block, row after row.
- The first and the last blocks of a kernel have the memory for themselves: a fixed time for each.
"""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from gpu_catalog.gpu import Gpu
from gpu_catalog.kernel_rates import rates_of
from trials.simulation.clock.joined import joined_seconds
from trials.simulation.recording import Column, FloatArray, IntArray, OperatorClass

BoolArray = npt.NDArray[np.bool_]
PREFIX = "moving_"
# fp32 lanes of a multiprocessor, by compute capability (CUDA's programming guide).
FP32_LANES = {"7.0": 64, "7.5": 64, "8.0": 64}
FP32_LANES_SINCE = 128
# MB of L2 cache for each multiprocessor, by compute capability (NVIDIA's architecture whitepapers;
# where products differ, their mean).
L2_MB = {"7.0": 0.075, "7.5": 0.10, "8.0": 0.37, "8.6": 0.075, "8.9": 0.70, "9.0": 0.38}
L2_MB |= {"10.0": 0.85, "10.3": 0.85, "12.0": 0.65}
L2_MB_ELSE = 0.38
# Threads that a multiprocessor holds (CUDA's programming guide), and those of a block that works on
# a row of a norm (ATen's layer_norm_kernel.cu).
THREADS = {"7.5": 1024, "8.6": 1536, "8.9": 1536, "12.0": 1536}
THREADS_ELSE = 2048
NORM_THREADS = 128
# Softmax by ATen's SoftMax.cu: a warp holds a row of up to so many elements and bytes in its
# registers, a block one of up to so many bytes there or in shared memory. Threads of a block that
# reads rows again load 16 bytes at a time.
WARP, WARP_COLUMNS, WARP_BYTES = 32, 1024, 4096
SOFTMAX_THREADS, HELD_BYTES, LOADED_BYTES = 1024, 48 * 1024, 16
# Rows that a block reads again: a norm its own; a softmax its own twice, to find the largest, to
# add up, and to write; its gradient that of the result, one of two inputs.
READ_AGAIN = {
    OperatorClass.NORM: 1.0,
    OperatorClass.NORM_BACKWARD: 1.0,
    OperatorClass.SOFTMAX: 2.0,
    OperatorClass.SOFTMAX_BACKWARD: 0.5,
}
SOFTMAXES = {
    OperatorClass.SOFTMAX: 1,
    OperatorClass.SOFTMAX_BACKWARD: 2,
}  # rows of input in a block
BY_ELEMENT = (
    OperatorClass.SCATTERED,
    OperatorClass.GATHER,
    OperatorClass.NORM,
    OperatorClass.NORM_BACKWARD,
    OperatorClass.SOFTMAX,
)


@dataclass(frozen=True, slots=True)
class MovingConstants:
    """Numbers of a GPU; all but the first are shared by all GPUs.

    Attributes:
        reached: fraction of the bandwidth that kernels reach.
        launch_us: fixed time of each kernel.
        update: share of that bandwidth which an optimizer's update reaches, with its seven tensors.
        scattered, gather, norm, norm_backward, softmax: elements that a multiprocessor completes
            per clock, by the class of operator.
        softmax_us: time that a block of threads takes for a row of a softmax.
        kept, evicted: share of the L2 cache up to which it holds all of the rows at work, and from
            which it holds none.
        picked_ns: time of each row of a mean of picked numbers.
        knee: exponent that joins the two times: the larger it is, the less they delay each other.
    """

    reached: float
    launch_us: float
    update: float
    scattered: float
    gather: float
    norm: float
    norm_backward: float
    softmax: float
    softmax_us: float
    kept: float
    evicted: float
    picked_ns: float
    knee: float


@dataclass(frozen=True, slots=True)
class MovingRates:
    """Facts of a GPU.

    Attributes:
        bandwidth: bytes per second of its memory, at the peak.
        clocks: clocks per second of all multiprocessors; nan where unknown.
        multiprocessors: their number; None where unknown.
        capability: compute capability.
    """

    bandwidth: float
    clocks: float
    multiprocessors: int | None
    capability: str | None

    @property
    def threads(self) -> int:
        """Threads that a multiprocessor holds."""
        return THREADS.get(self.capability or "", THREADS_ELSE)


def moving_constants(gpu: Gpu) -> MovingConstants:
    """Numbers for a GPU, by ``gpu_catalog.kernel_rates``."""
    numbers = rates_of(gpu)
    return MovingConstants(*(numbers[f"{PREFIX}{field.name}"] for field in fields(MovingConstants)))


def moving_rates(gpu: Gpu) -> MovingRates:
    """Facts of a GPU, by the catalog."""
    bandwidth = (gpu.memory_bandwidth_gb_per_second or np.nan) * 1e9
    clocks = clocks_per_second(gpu)
    return MovingRates(bandwidth, clocks, gpu.multiprocessors, gpu.compute_capability)


def clocks_per_second(gpu: Gpu) -> float:
    """Clocks per second of all multiprocessors, from their fp32 rate; nan if that is unknown.

    A lane completes one multiplication and one addition per clock, so a multiprocessor runs
    ``2 * lanes`` FLOPs per clock.
    """
    if gpu.fp32_tflops is None or gpu.compute_capability is None:
        return float("nan")
    lanes = FP32_LANES.get(gpu.compute_capability, FP32_LANES_SINCE)
    return gpu.fp32_tflops * 1e12 / (2 * lanes)


def l2_bytes(gpu: Gpu) -> float:
    """Bytes of a GPU's L2 cache; 0 without its number of multiprocessors."""
    return _l2_bytes_of_one(gpu.compute_capability) * (gpu.multiprocessors or 0)


def _l2_bytes_of_one(capability: str | None) -> float:
    return 1e6 * L2_MB.get(capability or "", L2_MB_ELSE)


def moving_seconds(
    work: IntArray,
    numbers: FloatArray,
    rates: MovingRates,
    constants: MovingConstants,
    *,
    by_former_softmax: bool = False,
) -> FloatArray:
    """(operators,) seconds of operators that move data.

    Args:
        work: (operators,) class of each, ``OperatorClass``.
        numbers: (operators, columns) numbers, by ``Column``.
        rates: of the GPU.
        constants: of the GPU.
        by_former_softmax: whether a softmax reads long rows three times, as PyTorch's did until
            2023.
    """
    threads = _block_threads(work, numbers, by_former_softmax=by_former_softmax)
    again = _read_again(work, numbers, by_former_softmax=by_former_softmax)
    moved = numbers[:, Column.BYTES] + again * _missed(numbers, threads, rates, constants)
    seconds = moved / (rates.bandwidth * constants.reached)
    seconds[work == OperatorClass.UPDATE] /= constants.update
    elements = numbers[:, Column.ROWS] * numbers[:, Column.COLUMNS]
    for pattern in BY_ELEMENT:
        own = work == pattern
        rate = getattr(constants, pattern.name.lower()) * rates.clocks
        seconds[own] = joined_seconds(seconds[own], elements[own] / rate, constants.knee)
    own = work == OperatorClass.SOFTMAX
    at_once = (rates.multiprocessors or np.nan) * rates.threads / threads[own]
    waiting = 1e-6 * constants.softmax_us * numbers[own, Column.ROWS] / at_once
    seconds[own] = joined_seconds(seconds[own], waiting, constants.knee)
    picked = work == OperatorClass.PICKED_LOSS
    seconds[picked] += 1e-9 * constants.picked_ns * numbers[picked, Column.ROWS]
    return seconds + 1e-6 * constants.launch_us * numbers[:, Column.LAUNCHES]


def _is_of_warp(work: IntArray, numbers: FloatArray) -> BoolArray:
    """(operators,) whether a warp has a row in its registers."""
    is_short = np.zeros(len(work), np.bool_)
    for pattern, inputs in SOFTMAXES.items():
        is_short |= (work == pattern) & (numbers[:, Column.INNER] <= inputs * WARP_BYTES)
    return is_short & (numbers[:, Column.COLUMNS] <= WARP_COLUMNS)


def _block_threads(work: IntArray, numbers: FloatArray, *, by_former_softmax: bool) -> FloatArray:
    """(operators,) threads of the block or warp that works on a row."""
    threads = np.full(len(work), float(NORM_THREADS))
    for pattern, inputs in SOFTMAXES.items():
        own = work == pattern
        if pattern is OperatorClass.SOFTMAX and not by_former_softmax:
            threads[own] = SOFTMAX_THREADS
            continue
        # At least half of the loads find a thread, of a power of two.
        loads = np.minimum(numbers[own, Column.INNER] / inputs // LOADED_BYTES, SOFTMAX_THREADS)
        threads[own] = np.maximum(2 ** np.ceil(np.log2(np.maximum(loads / 2, 1))), WARP)
    threads[_is_of_warp(work, numbers)] = WARP
    return threads


def _read_again(work: IntArray, numbers: FloatArray, *, by_former_softmax: bool) -> FloatArray:
    """(operators,) bytes of rows that are read once more, from the cache or from memory."""
    times = np.zeros(len(work))
    for pattern, further in READ_AGAIN.items():
        times[work == pattern] = further
    times[_is_of_warp(work, numbers)] = 0
    if not by_former_softmax:
        held = numbers[:, Column.INNER] <= HELD_BYTES
        times[(work == OperatorClass.SOFTMAX) & held] = 0
    again: FloatArray = times * numbers[:, Column.ROWS] * numbers[:, Column.INNER]
    return again


def _missed(
    numbers: FloatArray, threads: FloatArray, rates: MovingRates, constants: MovingConstants
) -> FloatArray:
    """(operators,) share of rows at work that the L2 cache does not hold."""
    cache_bytes = _l2_bytes_of_one(rates.capability)
    share = numbers[:, Column.INNER] * np.floor(rates.threads / threads) / cache_bytes
    missed: FloatArray = np.clip(
        (share - constants.kept) / (constants.evicted - constants.kept), 0.0, 1.0
    )
    return missed
