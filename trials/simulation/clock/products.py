"""Durations of matrix products: tiles of the result, in waves over the multiprocessors.

A library cuts the result into tiles and gives each to a multiprocessor. The duration is that of the
waves of tiles, or of reading and writing the matrices, whichever is longer, or somewhat more where
both are alike, and a fixed overhead. A partial last wave takes less than a full one, since the
clock rises and tiles of several waves overlap. The library picks the best of several tile shapes;
here the model does. Matrices move at the bandwidth of the L2 cache if they are still there.
"""

from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import numpy.typing as npt

from gpu_catalog.gpu import Gpu
from gpu_catalog.kernel_rates import rates_of
from trials.simulation.clock.joined import joined_seconds
from trials.simulation.clock.moving import clocks_per_second, l2_bytes
from trials.simulation.recording import Column, FloatArray, IntArray, Rate

BoolArray = npt.NDArray[np.bool_]
# Rows and columns of the tiles of cuBLAS and CUTLASS, from the largest down.
TILES = ((256, 128), (128, 256), (128, 128), (64, 128), (128, 64), (64, 64))
# Parts of the inner dimension (split-K), where the parts of all tiles fit one wave.
SPLITS = (2, 4, 8, 16, 32)
PARTIAL_BYTES = 8  # of an element of each part's result in fp32, written and read
NEVER = 1e9  # more matrices than any cache holds
# Seconds of a product between which its rate falls from the short one to the sustained one.
SUSTAINED_FROM, SUSTAINED_AT = 0.3e-3, 3e-3


# In the order of ``ProductShapes``.
PRODUCT_COLUMNS = (
    *(Column.ROWS, Column.INNER, Column.COLUMNS, Column.PRODUCTS),
    *(Column.BYTES, Column.LAUNCHES),
)


@dataclass(frozen=True, slots=True)
class ProductConstants:
    """Rates of products, for 16 bits and for fp32 without tensor cores.

    Attributes:
        overhead_us: fixed part of each product's duration, in microseconds.
        bandwidth: fraction of the memory bandwidth at which matrices are read and written.
        cached: bytes per clock of a multiprocessor at which they move in the L2 cache.
        ramp: prologue and epilogue of a tile, in elements of the inner dimension.
        rest: share of the empty part of the last wave that takes time all the same.
        middle, small, least: rate of tiles of 128 x 128, 64 x 128 and 64 x 64, relative to the
            largest.
        exponent: joins the times of tiles and of matrices (``joined_seconds``).
    """

    overhead_us: float
    bandwidth: float
    cached: float
    ramp: float
    rest: float
    middle: float
    small: float
    least: float
    exponent: float

    @property
    def rates(self) -> tuple[float, ...]:
        """Relative rate of each of ``TILES``."""
        return (1.0, 1.0, self.middle, self.small, self.small, self.least)


NAMES = tuple(field.name for field in fields(ProductConstants))


@dataclass(frozen=True, slots=True)
class ProductShapes:
    """Shapes of products (rows, inner) x (inner, columns); all arrays are (operators,).

    Attributes:
        count: products in one operator.
        moved: bytes of all their matrices.
        launches: kernels of one operator; 0 counts as one.
    """

    rows: FloatArray
    inner: FloatArray
    columns: FloatArray
    count: FloatArray
    moved: FloatArray
    launches: FloatArray


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Work around a product, in which benchmarks and steps differ.

    Attributes:
        inputs, weights, results: matrices of each kind that the work cycles through, one number or
            (operators,); ``NEVER`` for those that it does not reuse.
        has_values: whether the matrices are initialised. Products of zeros draw so little power
            that their rate does not fall.
    """

    inputs: float | FloatArray = 1.0
    weights: float | FloatArray = NEVER
    results: float | FloatArray = NEVER
    has_values: bool | BoolArray = True

    def where(self, at: BoolArray) -> Self:
        """Those of chosen operators."""
        values = (getattr(self, field.name) for field in fields(self))
        return type(self)(*(v[at] if isinstance(v, np.ndarray) else v for v in values))


# The operator before has just written the input; weights are read once, results are new memory.
STEP = Surroundings()


@dataclass(frozen=True, slots=True)
class ProductRates:
    """Rates of a GPU.

    Attributes:
        short, sustained: FLOP/s in short and in sustained work.
        bandwidth: peak bytes per second of the memory.
        clocks: clocks per second of all multiprocessors; nan where unknown.
        cache_bytes: of the L2 cache.
    """

    short: float
    sustained: float
    bandwidth: float
    clocks: float = np.nan
    cache_bytes: float = 0.0


def quantity_of(name: str, rate: int) -> str:
    """Name in ``gpu_catalog.kernel_rates`` of a number; both precisions share the cache's speed."""
    is_fp32 = rate == Rate.FP32 and name != "cached"
    return f"{'product_fp32_' if is_fp32 else 'product_'}{name}"


def matrix_product_seconds(
    rate: IntArray,
    numbers: FloatArray,
    gpu: Gpu,
    peaks: FloatArray,
    surroundings: Surroundings = STEP,
) -> FloatArray:
    """(operators,) seconds of matrix products on a GPU, by ``gpu_catalog.kernel_rates``.

    Args:
        rate: (operators,) ``Rate`` of each.
        numbers: (operators, columns) numbers, by ``Column``.
        gpu: the GPU.
        peaks: its FLOP/s, by ``Rate``.
        surroundings: work around the products.
    """
    reached = rates_of(gpu)
    bandwidth = (gpu.memory_bandwidth_gb_per_second or np.nan) * 1e9
    clocks = clocks_per_second(gpu)
    seconds = np.zeros(len(rate))
    for peak in np.unique(rate):
        own = rate == peak
        shapes = ProductShapes(*(numbers[own, column] for column in PRODUCT_COLUMNS))
        named = {name: reached[quantity_of(name, peak)] for name in NAMES}
        rates = ProductRates(
            short=peaks[peak] * reached[quantity_of("short", peak)],
            sustained=peaks[peak] * reached[quantity_of("sustained", peak)],
            bandwidth=bandwidth,
            clocks=clocks,
            cache_bytes=l2_bytes(gpu),
        )
        seconds[own] = product_seconds(
            shapes, ProductConstants(**named), gpu.multiprocessors, rates, surroundings.where(own)
        )
    return seconds


def product_seconds(
    shapes: ProductShapes,
    constants: ProductConstants,
    multiprocessors: int | None,
    rates: ProductRates,
    surroundings: Surroundings = STEP,
) -> FloatArray:
    """(operators,) seconds of products.

    Args:
        shapes: the products.
        constants: rates of products.
        multiprocessors: of the GPU; without them no product has tiles.
        rates: of the GPU.
        surroundings: work around the products.
    """
    memory = rates.bandwidth * constants.bandwidth
    cache = np.fmax(memory, constants.cached * rates.clocks)
    missed = shapes.moved - _cached_bytes(shapes, rates.cache_bytes, surroundings)
    moving = missed / memory + (shapes.moved - missed) / cache
    if multiprocessors is None:
        first = 2.0 * shapes.rows * shapes.inner * shapes.columns * shapes.count / rates.short
    else:
        rate = rates.short / multiprocessors
        first = _tiles_seconds(shapes, constants, multiprocessors, rate, cache)
    # The rate falls with the logarithm of the duration: power and heat throttle long work alone.
    span = np.log(SUSTAINED_AT / SUSTAINED_FROM)
    long = np.clip(np.log(np.maximum(first, SUSTAINED_FROM) / SUSTAINED_FROM) / span, 0.0, 1.0)
    long = np.where(surroundings.has_values, long, 0.0)
    computing = first * (rates.short / rates.sustained) ** long
    launching = constants.overhead_us * 1e-6 * np.maximum(shapes.launches, 1.0)
    seconds: FloatArray = joined_seconds(moving, computing, constants.exponent) + launching
    return seconds


def _cached_bytes(shapes: ProductShapes, cache_bytes: float, amid: Surroundings) -> FloatArray:
    """(operators,) bytes of the matrices that are still in the L2 cache.

    A matrix is, if all that the work moves between two uses of it fits: the reuse distance of an
    LRU cache.
    """
    elements = (
        shapes.rows * shapes.inner,
        shapes.inner * shapes.columns,
        shapes.rows * shapes.columns,
    )
    width = shapes.moved / np.maximum(sum(elements), 1.0)
    sizes = [width * one for one in elements]
    turns = (amid.inputs, amid.weights, amid.results)
    cached = np.zeros(len(shapes.rows))
    for size, turn in zip(sizes, turns, strict=True):
        pairs = zip(sizes, turns, strict=True)
        between = sum(other * np.minimum(times, turn) for other, times in pairs)
        cached += np.where(between <= cache_bytes, size, 0.0)
    return cached


def _tiles_seconds(
    shapes: ProductShapes,
    constants: ProductConstants,
    multiprocessors: int,
    rate: float,
    cache: float,
) -> FloatArray:
    """(operators,) seconds of all tiles in waves, by the best tile.

    Args:
        shapes: the products.
        constants: rates of products.
        multiprocessors: of the GPU.
        rate: FLOP/s of a multiprocessor in the largest tile.
        cache: bytes per second at which parts of the inner dimension are added up.
    """
    least = np.full(len(shapes.rows), np.inf)
    results = shapes.rows * shapes.columns * shapes.count
    for (height, width), relative in zip(TILES, constants.rates, strict=True):
        tiles = np.ceil(shapes.rows / height) * np.ceil(shapes.columns / width) * shapes.count
        waves = tiles / multiprocessors
        whole = np.maximum(waves + constants.rest * (np.ceil(waves) - waves), 1.0)
        per_element = 2.0 * height * width / (rate * relative)
        least = np.minimum(least, whole * (shapes.inner + constants.ramp) * per_element)
        for split in SPLITS:
            few = np.flatnonzero(tiles * split <= multiprocessors)
            one = (shapes.inner[few] / split + constants.ramp) * per_element
            adding = PARTIAL_BYTES * split * results[few] / cache + 1e-6 * constants.overhead_us
            least[few] = np.minimum(least[few], one + adding)
    return least
