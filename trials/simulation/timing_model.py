"""Roofline model of a step's time: a host launches operators, a GPU runs them in order.

The host takes its time for every operator. A kernel starts once the host has launched it and the
GPU is free. Where the host waits for a result, the two synchronise: a loop over eight experts waits
eight times a layer, so the host determines its time where each expert has little work.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated, Self

import numpy as np
from pydantic import Field

from gpu_catalog.gpu import Gpu
from gpu_catalog.kernel_rates import has_own_products
from gpu_catalog.links.within_nodes import MeasuredLink
from gpu_catalog.record import Record
from trials.recipes.parallel import Parallel
from trials.simulation.clock.attention import BACKWARD, FP32_FORWARD, attention_seconds
from trials.simulation.clock.copies import two_stream_seconds
from trials.simulation.clock.moving import (
    clocks_per_second,
    moving_constants,
    moving_rates,
    moving_seconds,
)
from trials.simulation.clock.operators import Operators
from trials.simulation.clock.products import matrix_product_seconds
from trials.simulation.clock.time_error import TimeError90, time_errors
from trials.simulation.ranks.rank_timeline import collective_seconds, links_of, rank_seconds
from trials.simulation.ranks.stream_events import FIRST
from trials.simulation.recording import (
    Collective,
    Column,
    FloatArray,
    IntArray,
    Kind,
    OperatorClass,
    Rate,
)

# Major compute capabilities of GPUs with a kernel for grouped products in bf16.
GROUPED_SINCE = ("9", "10")
VIEWS_A_GROUP = 3  # slices of a group's tokens, matrix and result
# GB/s of 16 PCIe lanes in one direction (PCI-SIG), by major compute capability: generations 3, 4
# and 5, as on NVIDIA's data sheets. Copies are assumed to reach the fraction PCIE_REACHED.
PCIE_GB_PER_SECOND = {"7": 15.75, "8": 31.5}
PCIE_SINCE = 63.0
PCIE_REACHED = 0.8
# Memory of a node that DeepSpeed's AdamW on the CPU reads and writes, for all of its GPUs together:
# 11.6 billion weights of 28 bytes in 8.2 s (its pull request 735). A node with Qwen-72B's update on
# four of them took about 10 s, 51 GB/s, if it has 8 GPUs (its issue 6834).
HOST_MEMORY_BYTES_PER_SECOND = 40e9
MOST_FRACTION = 1.5
# Least load of a step that the GPU limits.
GPU_BOUND = 3.0
Fraction = Annotated[float, Field(gt=0, le=MOST_FRACTION)]
Microseconds = Annotated[float, Field(ge=0)]
Error = Annotated[float, Field(gt=0)]


class EfficiencyConstants(Record):
    """Fractions of a GPU's peak rates that a stack reaches, and host times of its operators.

    One set holds for all GPUs. The defaults come from a prototype fitted on published single-GPU
    runs of several stacks; ``calibrate`` fits them to measured observations.

    Attributes:
        product_speed, attention_speed, memory_speed: speed of matrix products, of fused attention,
            forward, and of memory-bound operators, relative to the published ones that
            ``gpu_catalog.kernel_rates`` is fitted to.
        attention_backward: fraction of the peak in fused attention, backward. Hopper and the B200
            have measured rates instead, times this fraction over its default.
        dequantisation: 4-bit weights that a multiprocessor unpacks per clock: bitsandbytes 0.50 on
            an H100 (``tests/benchmarks/kernels``). Bandwidth alone would make an A40 three times as
            slow as an A100, while the paper's points (2408.04693, Fig. 14 and 15) show 1.4 times,
            as multiprocessors and clock do; the older library behind them took three times as long.
        scan: fraction of the fp32 rate without tensor cores in Mamba's selective scan.
        kernel_floor_us: duration of the shortest kernel.
        host_kernel_us: host time of an operator that launches a kernel.
        host_view_us: host time of an operator that launches none.
        host_four_bit_us: host time that bitsandbytes adds to each dequantisation.
        host_wait_us: host time of a wait for a result.
        host_factor: host time relative to the host that the constants were fitted on.
        overlapped: whether the host continues while the GPU works. False for code that waits for
            every operator, as instrumented code does.
        links: measured speeds of collectives, which come before the catalog's.
        error: lower half of the relative 90 % interval of a step time; None for the intervals of
            measured steps (``TimeErrors``).
        error_above: upper half of it; None for the same as ``error``.
        source: origin of the constants.
    """

    product_speed: Fraction = 1.0
    attention_speed: Fraction = 1.0
    attention_backward: Fraction = BACKWARD
    memory_speed: Fraction = 1.0
    dequantisation: Annotated[float, Field(gt=0)] = 3.2
    scan: Fraction = 0.30
    kernel_floor_us: Microseconds = 2.0
    host_kernel_us: Microseconds = 6.8
    host_view_us: Microseconds = 2.3
    host_four_bit_us: Microseconds = 39.0
    host_wait_us: Microseconds = 10.0
    host_factor: Annotated[float, Field(gt=0)] = 1.0
    overlapped: bool = True
    links: tuple[MeasuredLink, ...] = ()
    error: Error | None = None
    error_above: Error | None = None
    source: str = "starting values, not confirmed on your GPUs ('calibrate' fits them)"

    def measured_error(self, step: "SimulatedStepTime") -> TimeError90 | None:
        """Measured steps that the interval of a step comes from; None where ``error`` is given."""
        if self.error is not None:
            return None
        return time_errors().of_gpu if step.is_of_gpu else time_errors().of_host

    def relative_errors(self, step: "SimulatedStepTime") -> tuple[float, float]:
        """Lower and upper half of the relative 90 % interval of a step."""
        measured = self.measured_error(step)
        if measured is not None:
            return measured.below, measured.above
        assert self.error is not None
        return self.error, self.error_above or self.error

    def interval(self, step: "SimulatedStepTime") -> tuple[float, float]:
        """Ends of the 90 % interval of a step, in seconds."""
        below, above = self.relative_errors(step)
        return step.seconds / (1 + below), step.seconds * (1 + above)


class NoSpeedError(ValueError):
    """The catalog lacks a rate of the GPU, so that its memory can be simulated but not its time."""


@dataclass(frozen=True, slots=True)
class SimulatedStepTime:
    """Simulated duration of one step.

    Attributes:
        seconds: from start to end.
        busy_seconds: (operator classes,) seconds the GPU works, by ``OperatorClass``.
        exposed_seconds: part of the duration that collectives add to the rest.
        is_of_gpu: whether one GPU limits it, by operators like those of measured steps.
        collectives: (kinds, 2) number of collectives and bytes of their buffers by ``Collective``.
    """

    seconds: float
    busy_seconds: FloatArray
    exposed_seconds: float = 0.0
    is_of_gpu: bool = False
    collectives: FloatArray = field(default_factory=lambda: np.zeros((len(Collective), 2)))


@dataclass(frozen=True, slots=True)
class HostDeviceTimeline:
    """Durations on host and GPU of every event of a step.

    Attributes:
        work: (events,) class of operator, ``OperatorClass``.
        host: (events,) seconds on the host.
        device: (events,) seconds on the GPU.
        waits: (waits,) indices of the events at which the host waits for the GPU.
        overlapped: whether the host continues while the GPU works between waits.
        streams: (events,) ``Wait`` of each event, 0 for none; absent where one stream does all.
        links: (events,) link of each collective, 0 for other events; absent for one process.
    """

    work: IntArray
    host: FloatArray
    device: FloatArray
    waits: IntArray
    overlapped: bool
    streams: IntArray | None = None
    links: IntArray | None = None

    @property
    def load(self) -> float:
        """Seconds of the GPU for each of the host."""
        return float(self.device.sum() / self.host.sum())

    def seconds(self, host_factor: float = 1.0) -> float:
        """Seconds from start to end, with all host times multiplied by ``host_factor``."""
        host = self.host * host_factor
        if self.overlapped and self.streams is not None:
            if int(self.streams.max()) >= FIRST:  # of a rank among several GPUs
                assert self.links is not None
                return rank_seconds(host, self.device, self.links, self.streams, self.waits)
            is_copy = self.work == OperatorClass.HOST_COPY
            return two_stream_seconds(host, self.device, is_copy, self.streams, self.waits)
        if self.overlapped:
            return overlapped_seconds(host, self.device, self.waits)
        return float(host.sum() + self.device.sum())

    def without_collectives(self) -> Self:
        """The same step with collectives that take no time."""
        return replace(self, device=self.device * (self.work != OperatorClass.COLLECTIVE))


def step_time(
    operators: Operators,
    gpu: Gpu,
    constants: EfficiencyConstants,
    layout: Parallel | None = None,
) -> SimulatedStepTime:
    """Simulate the duration of a step.

    Args:
        operators: operators of the step.
        gpu: GPU, or that of every rank.
        constants: constants of the model.
        layout: layout of the ranks; without it all are on one node.

    Raises:
        NoSpeedError: the catalog lacks a rate or the memory bandwidth of the GPU.
    """
    timeline = timeline_of(operators, gpu, constants, layout)
    busy = np.bincount(timeline.work, weights=timeline.device, minlength=len(OperatorClass))
    seconds = timeline.seconds()
    is_alone, is_plain = timeline.links is None, timeline.streams is None
    exposed = 0.0 if is_alone else seconds - timeline.without_collectives().seconds()
    is_of_gpu = timeline.load >= GPU_BOUND and is_alone and is_plain and has_own_products(gpu)
    return SimulatedStepTime(
        seconds,
        busy.astype(np.float64),
        exposed,
        is_of_gpu and not busy[OperatorClass.SCAN],
        operators.collective_sums,
    )


def timeline_of(
    operators: Operators,
    gpu: Gpu,
    constants: EfficiencyConstants,
    layout: Parallel | None = None,
) -> HostDeviceTimeline:
    """Durations of a step's events; arguments and errors are those of ``step_time``."""
    operators = with_grouped_fallback(operators, gpu)
    kinds, numbers = operators.kinds, operators.numbers
    runs = kinds == Kind.RUN
    work = np.where(runs, operators.names // 4, int(OperatorClass.VIEW))
    kernels = (work != OperatorClass.VIEW) & (work != OperatorClass.HOST_MEMORY)
    device = np.zeros(len(work))
    device[kernels] = _device_seconds(
        work[kernels], operators.names[kernels] % 4, numbers[kernels], gpu, constants
    )
    moves = work == OperatorClass.COLLECTIVE
    names = operators.names[moves] % 4
    device[moves] = np.maximum(
        device[moves], collective_seconds(names, numbers[moves], gpu, layout, constants.links)
    )
    links = np.zeros(len(work), np.int64)
    links[moves] = links_of(names, numbers[moves], layout)
    streams = np.where(kinds == Kind.STREAM, operators.names, 0)
    moved = np.where(work == OperatorClass.HOST_MEMORY, numbers[:, Column.BYTES], 0.0)
    sharers = 1 if layout is None else layout.gpus_per_node
    updating = moved * sharers / HOST_MEMORY_BYTES_PER_SECOND
    at = operators.events
    return HostDeviceTimeline(
        work=work[at],
        host=(_host_seconds(kinds, work, numbers, constants) + updating)[at],
        device=device[at],
        waits=np.flatnonzero((kinds == Kind.WAITED)[at]),
        overlapped=constants.overlapped,
        streams=streams[at] if streams.any() else None,
        links=links[at] if layout is not None or moves.any() else None,
    )


def with_grouped_fallback(operators: Operators, gpu: Gpu) -> Operators:
    """Operators with grouped products replaced where the GPU has no kernel for them.

    There PyTorch copies the group bounds to the host, waits for them, and multiplies the slices of
    one group after another (``_grouped_mm_fallback`` in ATen's GroupedMMUtils.h).
    """
    kinds, names = operators.kinds, operators.names
    work, rate = names // 4, names % 4
    grouped = (kinds == Kind.RUN) & (work == OperatorClass.GROUPED_PRODUCT)
    capability = gpu.compute_capability
    if capability is None or capability.partition(".")[0] in GROUPED_SINCE:
        grouped &= rate != Rate.BF16
    if not grouped.any():
        return operators
    numbers = operators.numbers.copy()
    numbers[grouped, Column.LAUNCHES] = numbers[grouped, Column.PRODUCTS]
    events = operators.events
    return Operators(
        kinds=np.append(kinds, Kind.WAITED),
        names=np.append(np.where(grouped, 4 * OperatorClass.MATRIX_PRODUCT + rate, names), 0),
        numbers=np.pad(numbers, ((0, 1), (0, 0))),
        order=np.insert(events, np.flatnonzero(grouped[events]), len(kinds)),
    )


def _device_seconds(
    work: IntArray, rate: IntArray, numbers: FloatArray, gpu: Gpu, constants: EfficiencyConstants
) -> FloatArray:
    """GPU seconds per operator, (operators,): the longest of compute, transfer and launch."""
    if gpu.memory_bandwidth_gb_per_second is None:
        raise NoSpeedError(f"the catalog has no memory bandwidth for {gpu.key}")
    peaks, clocks = peaks_of(gpu), clocks_per_second(gpu)
    reached, speeds = np.ones(len(OperatorClass)), np.ones(len(OperatorClass))
    for forward in (OperatorClass.ATTENTION_FORWARD, OperatorClass.FLASH2_FORWARD):
        reached[forward] = FP32_FORWARD * constants.attention_speed
        speeds[forward] = constants.attention_speed
    for backward in (OperatorClass.ATTENTION_BACKWARD, OperatorClass.FLASH2_BACKWARD):
        reached[backward] = constants.attention_backward
        speeds[backward] = constants.attention_backward / BACKWARD
    reached[OperatorClass.SCAN] = constants.scan
    reached[OperatorClass.DEQUANTISATION] = constants.dequantisation
    flops = numbers[:, Column.FLOPS]
    needed = np.where(work == OperatorClass.DEQUANTISATION, clocks, peaks[rate])
    if np.isnan(needed[flops > 0]).any():
        raise NoSpeedError(f"the catalog has no rate for {gpu.key} in one of the step's dtypes")
    computing = np.where(flops > 0, flops / (needed * reached[work]), 0.0)
    transfer = moving_seconds(work, numbers, moving_rates(gpu), moving_constants(gpu))
    transfer /= constants.memory_speed
    copied = work == OperatorClass.HOST_COPY
    transfer[work == OperatorClass.COLLECTIVE] = 0.0  # timeline_of knows their links
    transfer[copied] = numbers[copied, Column.BYTES] / host_link_bytes_per_second(gpu)
    seconds = np.maximum(np.maximum(computing, transfer), floor_seconds(numbers, constants))
    products = (work == OperatorClass.MATRIX_PRODUCT) | (work == OperatorClass.GROUPED_PRODUCT)
    seconds[products] = matrix_product_seconds(rate[products], numbers[products], gpu, peaks)
    seconds[products] /= constants.product_speed
    attention = attention_seconds(work, rate, numbers, gpu, peaks) / speeds[work]
    return np.where(np.isnan(attention), seconds, attention)


def floor_seconds(numbers: FloatArray, constants: EfficiencyConstants) -> FloatArray:
    """(operators,) seconds that the kernels of each operator take at least."""
    seconds: FloatArray = np.maximum(numbers[:, Column.LAUNCHES], 1.0) * constants.kernel_floor_us
    return seconds * 1e-6


def host_link_bytes_per_second(gpu: Gpu) -> float:
    """Bytes per second of copies between GPU and host, in one direction."""
    major = (gpu.compute_capability or "").partition(".")[0]
    return PCIE_GB_PER_SECOND.get(major, PCIE_SINCE) * 1e9 * PCIE_REACHED


def peaks_of(gpu: Gpu) -> FloatArray:
    """FLOP/s by ``Rate``, nan where the catalog has none; bf16 and fp16 replace each other."""
    bf16 = gpu.bf16_dense_tflops
    fp16 = gpu.fp16_dense_tflops or bf16
    rates = {Rate.BF16: bf16 or fp16, Rate.FP16: fp16, Rate.FP32: gpu.fp32_tflops}
    return np.array([(rates[r] or np.nan) * 1e12 for r in Rate] + [np.nan])


def _host_seconds(
    kinds: IntArray, work: IntArray, numbers: FloatArray, constants: EfficiencyConstants
) -> FloatArray:
    """Seconds of each event on the host, (events,)."""
    micros = np.where(work == OperatorClass.VIEW, constants.host_view_us, constants.host_kernel_us)
    # An operator launches its further kernels without another dispatch, at half the cost. The
    # products of a group without a grouped kernel are dispatched one by one, with their slices.
    further = np.maximum(numbers[:, Column.LAUNCHES] - 1, 0)
    launch_us = 0.5 * constants.host_kernel_us
    group_us = constants.host_kernel_us + VIEWS_A_GROUP * constants.host_view_us
    micros += np.where(work == OperatorClass.MATRIX_PRODUCT, group_us, launch_us) * further
    micros += np.where(work == OperatorClass.DEQUANTISATION, constants.host_four_bit_us, 0.0)
    micros = np.where(kinds == Kind.WAITED, constants.host_wait_us, micros)
    return micros * constants.host_factor * 1e-6


def overlapped_seconds(host: FloatArray, device: FloatArray, waits: IntArray) -> float:
    """Time in seconds at which host and GPU have both finished.

    Operator j ends on the GPU at ``end_j = max(end_(j-1), launched_j) + d_j``. Between two waits
    the closed form is ``end_j = D_j + max(end_0, max_(i<=j)(launched_i - D_(i-1)))``, with D the
    running sum of the durations d.

    Args:
        host: (events,) seconds on the host.
        device: (events,) seconds on the GPU; 0 for events that launch nothing.
        waits: indices of the events at which the host waits for the GPU.
    """
    now = free = 0.0
    start = 0
    for end in (*waits.tolist(), len(host)):
        if end > start:
            launched = host[start:end].cumsum()
            launched += now
            total = device[start:end].cumsum()
            ready = launched - (total - device[start:end])
            free = float(total[-1]) + max(free, float(ready.max()))
            now = float(launched[-1])
        if end < len(host):  # the wait itself
            now = max(now, free) + float(host[end])
        start = end + 1
    return max(now, free)
