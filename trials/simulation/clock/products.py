"""Durations of matrix products: tiles of the result, in waves over the multiprocessors.

A library cuts the result into tiles and gives each to a multiprocessor. The duration is that of the
waves of tiles, or of reading and writing the matrices, whichever is longer, and a fixed share. A
last wave that is not full takes less than a full one, since the clock rises and tiles of several
waves overlap. The library picks the best of several tiles; here the model does.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trials.simulation.recording import FloatArray

# Rows and columns of the tiles of cuBLAS and CUTLASS, from the largest down.
TILES = ((256, 128), (128, 256), (128, 128), (64, 128), (128, 64), (64, 64))
SPLITS = (1, 2, 4)  # parts of the inner dimension (split-K), where a product has few tiles
FEW_WAVES = 0.5  # of a wave, up to which the inner dimension is split
# Seconds of a product between which its rate falls from the short one to the sustained one.
SUSTAINED_FROM, SUSTAINED_AT = 0.3e-3, 3e-3


@dataclass(frozen=True, slots=True)
class ProductConstants:
    """Numbers that all GPUs share, for 16 bits and for fp32 without tensor cores.

    Attributes:
        launch_us: fixed share of each product's duration, in microseconds.
        bandwidth: fraction of the memory bandwidth at which matrices are read and written.
        ramp: inner dimension that a tile's start and end cost.
        rest: share of the empty part of the last wave that it takes all the same.
        middle, small, least: rate of tiles of 128 x 128, 64 x 128 and 64 x 64, relative to the
            largest.
    """

    launch_us: float
    bandwidth: float
    ramp: float
    rest: float
    middle: float
    small: float
    least: float

    @property
    def rates(self) -> tuple[float, ...]:
        """Relative rate of each of ``TILES``."""
        return (1.0, 1.0, self.middle, self.small, self.small, self.least)


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
class ProductRates:
    """Rates of a GPU.

    Attributes:
        short, sustained: FLOP/s in short and in sustained work.
        bandwidth: peak bytes per second of the memory.
        cache_bytes: most bytes of activations that the L2 cache holds; 0 for a cache too small
            to matter.
        cached_bandwidth: bytes per second at which these are read and written.
    """

    short: float
    sustained: float
    bandwidth: float
    cache_bytes: float = 0.0
    cached_bandwidth: float = np.inf


def reached_by(
    numbers: Mapping[str, float], prefix: str, peak: float, bandwidth: float
) -> ProductRates:
    """Rates of a GPU by its numbers in ``gpu_catalog.kernel_rates``, peak FLOP/s and bandwidth."""
    cached = numbers.get(f"{prefix}cached_bandwidth")
    return ProductRates(
        short=peak * numbers[f"{prefix}short"],
        sustained=peak * numbers[f"{prefix}sustained"],
        bandwidth=bandwidth,
        cache_bytes=1e6 * numbers.get(f"{prefix}cache_mb", 0.0),
        cached_bandwidth=bandwidth * cached if cached else np.inf,
    )


def product_seconds(
    shapes: ProductShapes,
    constants: ProductConstants,
    multiprocessors: int | None,
    rates: ProductRates,
) -> FloatArray:
    """(operators,) seconds of products.

    Args:
        shapes: the products.
        constants: numbers that all GPUs share.
        multiprocessors: of the GPU; without them no product has tiles.
        rates: of the GPU.
    """
    moving = _moving_seconds(shapes, constants, rates)
    if multiprocessors is None:
        flops = 2.0 * shapes.rows * shapes.inner * shapes.columns * shapes.count
    else:
        flops = _padded_flops(shapes, constants, multiprocessors)
    first = flops / rates.short
    # The rate falls with the logarithm of the duration: power and heat limit long work alone.
    span = np.log(SUSTAINED_AT / SUSTAINED_FROM)
    long = np.clip(np.log(np.maximum(first, SUSTAINED_FROM) / SUSTAINED_FROM) / span, 0.0, 1.0)
    computing = first * (rates.short / rates.sustained) ** long
    launching = constants.launch_us * 1e-6 * np.maximum(shapes.launches, 1.0)
    seconds: FloatArray = np.maximum(moving, computing) + launching
    return seconds


def _moving_seconds(
    shapes: ProductShapes, constants: ProductConstants, rates: ProductRates
) -> FloatArray:
    """(operators,) seconds of reading and writing the matrices.

    The matrix (inner, columns) comes from memory: it is a weight, which a step reads once. The
    other two are activations: a neighbour of the product reads or writes them, so that they are in
    the L2 cache if they fit.
    """
    weights = shapes.inner * shapes.columns
    elements = weights + shapes.rows * (shapes.inner + shapes.columns)
    activations = shapes.moved * (1.0 - weights / np.maximum(elements, 1.0))
    cached = np.where(activations <= rates.cache_bytes, activations, 0.0)
    from_memory = (shapes.moved - cached) / (rates.bandwidth * constants.bandwidth)
    seconds: FloatArray = from_memory + cached / rates.cached_bandwidth
    return seconds


def _padded_flops(
    shapes: ProductShapes, constants: ProductConstants, multiprocessors: int
) -> FloatArray:
    """(operators,) FLOPs at the largest tile's rate: those of all tiles and waves, the least."""
    least = np.full(len(shapes.rows), np.inf)
    for (height, width), rate in zip(TILES, constants.rates, strict=True):
        tiles = np.ceil(shapes.rows / height) * np.ceil(shapes.columns / width) * shapes.count
        for split in SPLITS:
            waves = tiles * split / multiprocessors
            whole = np.maximum(waves + constants.rest * (np.ceil(waves) - waves), 1.0)
            work = whole * (shapes.inner / split + constants.ramp)
            flops = work * 2.0 * height * width * multiprocessors / rate
            allowed = (split == 1) | (tiles / multiprocessors <= FEW_WAVES)
            least = np.where(allowed, np.minimum(least, flops), least)
    return least
