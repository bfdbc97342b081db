"""How long a step takes on a GPU: a host that launches operators, a GPU that runs them in order.

The host needs its time for each operator; a kernel starts when it is launched and the GPU is free;
where the host waits for a result, the two meet. A loop over experts waits eight times a layer, so
its time is the host's where the work of each expert is small.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from gpu_catalog.gpu import Gpu
from gpu_catalog.record import Record
from trials.simulation.recording import (
    Column,
    FloatArray,
    IntArray,
    Kind,
    OperatorClass,
    Operators,
    Rate,
)

TILE = 128  # rows and columns of a matrix product that one multiprocessor computes at a time
STEP = 64  # the libraries have tiles of half the height or width, for what is left over
# fp32 lanes of a multiprocessor, by compute capability (CUDA's programming guide).
FP32_LANES = {"7.0": 64, "7.5": 64, "8.0": 64}
FP32_LANES_SINCE = 128
# Compute capabilities, their first number, of GPUs with a kernel for grouped products in bf16.
GROUPED_SINCE = ("9", "10")
VIEWS_A_GROUP = 3  # of its tokens, its matrix and its result
SPLIT = 4  # parts that the inner dimension is split into where there are too few tiles
Fraction = Annotated[float, Field(gt=0, le=1.5)]
Microseconds = Annotated[float, Field(ge=0)]


class EfficiencyConstants(Record):
    """What a stack reaches of a GPU's peaks, and what it costs the host: of all GPUs alike.

    The starting points are a prototype's, fitted on published single-GPU runs of several stacks;
    ``calibrate`` fits them to measured observations.

    Attributes:
        matrix_product: of the dense rate of the tensor cores.
        attention_forward: alike.
        attention_backward: alike.
        memory: of the memory's bandwidth, kernels that only move data.
        dequantisation: 4-bit weights that a multiprocessor unpacks in a clock. The prototype took a
            part of the bandwidth (0.21, on A100s alone); but the kernel looks each weight up, and
            by bandwidth an A40 would be three times as slow as an A100, where the paper's points
            (2408.04693, Fig. 14 and 15) have it 1.4 times: as by multiprocessors and clock.
        scan: of the rate without tensor cores, Mamba's selective scan.
        kernel_floor_us: the shortest kernel.
        host_kernel_us: the host's time for an operator that launches a kernel.
        host_view_us: for one that launches none.
        host_four_bit_us: what bitsandbytes adds for each dequantisation.
        host_wait_us: for a result that the host waits for.
        host_factor: how much slower a machine's host is: 1 for the one these were fitted on.
        overlapped: whether the host goes on while the GPU works; not where code waits for every
            operator, as instrumented code does.
        error: how much shorter than told a step may be, of the 90 % interval, as a part of it. At
            the start, the worst that the prototype missed published runs by.
        error_above: how much longer; absent for as much. At the start, three times as long: hosts
            differ, and code that waits in every block, as that behind the paper's points, takes 1.4
            to 3.5 times what is told.
        source: where they come from.
    """

    matrix_product: Fraction = 0.81
    attention_forward: Fraction = 0.60
    attention_backward: Fraction = 0.56
    memory: Fraction = 0.74
    dequantisation: Annotated[float, Field(gt=0)] = 1.1
    scan: Fraction = 0.30
    kernel_floor_us: Microseconds = 2.0
    host_kernel_us: Microseconds = 6.8
    host_view_us: Microseconds = 2.3
    host_four_bit_us: Microseconds = 39.0
    host_wait_us: Microseconds = 10.0
    host_factor: Annotated[float, Field(gt=0)] = 1.0
    overlapped: bool = True
    error: Annotated[float, Field(gt=0)] = 0.30
    error_above: Annotated[float, Field(gt=0)] | None = 2.0
    source: str = "starting points that no GPU of yours has confirmed (calibrate does)"


class NoSpeedError(ValueError):
    """Of a GPU without known rates there is memory to tell, and no time."""


@dataclass(frozen=True, slots=True)
class SimulatedStepTime:
    """One step.

    Attributes:
        seconds: from start to end.
        busy_seconds: (kinds of work,) the GPU's, by ``OperatorClass``.
    """

    seconds: float
    busy_seconds: FloatArray


@dataclass(frozen=True, slots=True)
class HostDeviceTimeline:
    """What a step asks of host and GPU, event by event.

    Attributes:
        work: (events,) of ``OperatorClass``.
        host: (events,) the host's seconds.
        device: (events,) the GPU's.
        waits: the events at which the host waits for the GPU.
        overlapped: whether it goes on elsewhere.
    """

    work: IntArray
    host: FloatArray
    device: FloatArray
    waits: IntArray
    overlapped: bool

    def seconds(self, slower: float = 1.0) -> float:
        """From start to end, on a host that takes so many times as long."""
        host = self.host * slower
        if self.overlapped:
            return overlapped_seconds(host, self.device, self.waits)
        return float(host.sum() + self.device.sum())


def step_time(operators: Operators, gpu: Gpu, constants: EfficiencyConstants) -> SimulatedStepTime:
    """The time of a step.

    Args:
        operators: what it runs and waits for.
        gpu: whose peaks.
        constants: what is reached of them.

    Raises:
        NoSpeedError: the catalog does not know its rates or its bandwidth.
    """
    lanes = lanes_of(operators, gpu, constants)
    busy = np.bincount(lanes.work, weights=lanes.device, minlength=len(OperatorClass))
    return SimulatedStepTime(
        seconds=lanes.seconds(),
        busy_seconds=busy.astype(np.float64),
    )


def lanes_of(operators: Operators, gpu: Gpu, constants: EfficiencyConstants) -> HostDeviceTimeline:
    """What a step asks of host and GPU; arguments and errors are those of ``step_time``."""
    operators = _with_groups_one_by_one(operators, gpu)
    kinds, numbers = operators.kinds, operators.numbers
    runs = kinds == Kind.RUN
    work = np.where(runs, operators.names // 4, int(OperatorClass.VIEW))
    kernels = work != OperatorClass.VIEW
    device = np.zeros(len(work))
    device[kernels] = _device_seconds(
        work[kernels], operators.names[kernels] % 4, numbers[kernels], gpu, constants
    )
    return HostDeviceTimeline(
        work=work,
        host=_host_seconds(kinds, work, numbers, constants),
        device=device,
        waits=np.flatnonzero(kinds == Kind.WAITED),
        overlapped=constants.overlapped,
    )


def _with_groups_one_by_one(operators: Operators, gpu: Gpu) -> Operators:
    """The operators as a GPU runs them that has no kernel for a grouped product.

    There PyTorch copies the groups' bounds to the host, which waits for them, then takes the slices
    of each group and multiplies them (ATen's GroupedMMUtils.h, ``_grouped_mm_fallback``).
    """
    work, rate = operators.names // 4, operators.names % 4
    grouped = (operators.kinds == Kind.RUN) & (work == OperatorClass.GROUPED_PRODUCT)
    capability = gpu.compute_capability
    if capability is None or capability.partition(".")[0] in GROUPED_SINCE:
        grouped &= rate != Rate.BF16
    at = np.flatnonzero(grouped)
    if not len(at):
        return operators
    numbers = operators.numbers.copy()
    numbers[at, Column.LAUNCHES] = numbers[at, Column.PRODUCTS]
    names = operators.names.copy()
    names[at] = 4 * OperatorClass.MATRIX_PRODUCT + rate[at]
    return Operators(
        kinds=np.insert(operators.kinds, at, Kind.WAITED),
        names=np.insert(names, at, 0),
        numbers=np.insert(numbers, at, 0.0, axis=0),
        segments=np.insert(operators.segments, at, operators.segments[at]),
    )


def _device_seconds(
    work: IntArray, rate: IntArray, numbers: FloatArray, gpu: Gpu, constants: EfficiencyConstants
) -> FloatArray:
    """Seconds of each operator on the GPU: the slower of computing and moving, never none."""
    if gpu.memory_bandwidth_gb_per_second is None:
        raise NoSpeedError(f"{gpu.key}: its memory bandwidth is not known")
    peaks = _peaks(gpu)
    reached = np.ones(len(OperatorClass))
    reached[[OperatorClass.MATRIX_PRODUCT, OperatorClass.GROUPED_PRODUCT]] = (
        constants.matrix_product
    )
    reached[OperatorClass.ATTENTION_FORWARD] = constants.attention_forward
    reached[OperatorClass.ATTENTION_BACKWARD] = constants.attention_backward
    reached[OperatorClass.SCAN] = constants.scan
    reached[OperatorClass.DEQUANTISATION] = constants.dequantisation
    flops = numbers[:, Column.FLOPS] * _tile_waste(work, numbers, gpu)
    needed = np.where(work == OperatorClass.DEQUANTISATION, _clocks(gpu), peaks[rate])
    if np.isnan(needed[flops > 0]).any():
        raise NoSpeedError(f"{gpu.key}: its rate for one of the step's dtypes is not known")
    computing = np.where(flops > 0, flops / (needed * reached[work]), 0.0)
    bandwidth = gpu.memory_bandwidth_gb_per_second * 1e9
    transfer = numbers[:, Column.BYTES] / (bandwidth * constants.memory)
    floor = np.maximum(numbers[:, Column.LAUNCHES], 1.0) * constants.kernel_floor_us * 1e-6
    return np.maximum(np.maximum(computing, transfer), floor)


def _peaks(gpu: Gpu) -> FloatArray:
    """FLOP/s by ``Rate``; nan where the catalog has none. bf16 and fp16 stand in for each other."""
    bf16 = gpu.bf16_dense_tflops
    fp16 = gpu.fp16_dense_tflops or bf16
    rates = {Rate.BF16: bf16 or fp16, Rate.FP16: fp16, Rate.FP32: gpu.fp32_tflops}
    return np.array([(rates[r] or np.nan) * 1e12 for r in Rate] + [np.nan])


def _clocks(gpu: Gpu) -> float:
    """Clocks of all multiprocessors a second, by the rate of their fp32 lanes; nan if unknown."""
    if gpu.fp32_tflops is None or gpu.compute_capability is None:
        return float("nan")
    lanes = FP32_LANES.get(gpu.compute_capability, FP32_LANES_SINCE)
    return gpu.fp32_tflops * 1e12 / (2 * lanes)


def _tile_waste(work: IntArray, numbers: FloatArray, gpu: Gpu) -> FloatArray:
    """What is computed over what is asked: products come in tiles, tiles in waves."""
    products = (work == OperatorClass.MATRIX_PRODUCT) | (work == OperatorClass.GROUPED_PRODUCT)
    waste = np.ones(len(work))
    if not products.any() or gpu.multiprocessors is None:
        return waste
    rows, columns, many = (
        numbers[products, column] for column in (Column.ROWS, Column.COLUMNS, Column.PRODUCTS)
    )
    whole_rows, whole_columns = (np.ceil(n / STEP) * STEP for n in (rows, columns))
    tiles = whole_rows * whole_columns * many / TILE**2
    waves = tiles / gpu.multiprocessors
    whole = np.where(waves >= 1, np.ceil(waves), np.maximum(waves, 1 / SPLIT))
    asked = np.maximum(rows * columns * many, 1.0)
    waste[products] = whole * gpu.multiprocessors * TILE * TILE / asked
    return waste


def _host_seconds(
    kinds: IntArray, work: IntArray, numbers: FloatArray, constants: EfficiencyConstants
) -> FloatArray:
    """The host's seconds for each event."""
    micros = np.where(work == OperatorClass.VIEW, constants.host_view_us, constants.host_kernel_us)
    # Further kernels of one operator are launched from within it; further products of a group one
    # by one, each with the slices that it takes.
    further = np.maximum(numbers[:, Column.LAUNCHES] - 1, 0)
    each = 0.5 * constants.host_kernel_us
    of_group = constants.host_kernel_us + VIEWS_A_GROUP * constants.host_view_us
    is_group = (work == OperatorClass.MATRIX_PRODUCT) & (further > 0)
    micros += np.where(is_group, of_group, each) * further
    micros += np.where(work == OperatorClass.DEQUANTISATION, constants.host_four_bit_us, 0.0)
    micros = np.where(kinds == Kind.WAITED, constants.host_wait_us, micros)
    return micros * constants.host_factor * 1e-6


def overlapped_seconds(host: FloatArray, device: FloatArray, waits: IntArray) -> float:
    """When both are done.

    ``end_j = max(end_(j-1), launched_j) + d_j``, between waits in closed form
    ``D_j + max(end_0, max_(i<=j)(launched_i - D_(i-1)))``, D the running sum of the durations d.
    """
    now = free = 0.0
    start = 0
    idle = np.where(device > 0, 0.0, -np.inf)
    for end in (*waits.tolist(), len(host)):
        if end > start:
            launched = host[start:end].cumsum()
            launched += now
            total = device[start:end].cumsum()
            ready = launched - (total - device[start:end])
            ready += idle[start:end]
            free = float(total[-1]) + max(free, float(ready.max()))
            now = float(launched[-1])
        if end < len(host):  # the wait itself
            now = max(now, free) + float(host[end])
        start = end + 1
    return max(now, free)
