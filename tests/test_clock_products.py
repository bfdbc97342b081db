"""Durations of matrix products in tiles and waves, worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from trials.simulation.clock.products import (
    SUSTAINED_AT,
    TILES,
    ProductConstants,
    ProductRates,
    ProductShapes,
    product_seconds,
)

# Every tile as fast as the largest; no cost but that of tiles and waves.
PLAIN = ProductConstants(
    launch_us=0.0, bandwidth=1.0, ramp=0.0, rest=1.0, middle=1.0, small=1.0, least=1.0
)
MULTIPROCESSORS = 100
PEAK = 1e14  # FLOP/s: 1e12 of each multiprocessor


def seconds(
    rows: float,
    columns: float,
    inner: float,
    constants: ProductConstants = PLAIN,
    *,
    sustained: float = PEAK,
    moved: float = 0.0,
    multiprocessors: int | None = MULTIPROCESSORS,
    count: float = 1.0,
    launches: float = 1.0,
) -> float:
    """Seconds of one product, at 1 byte per second and nanosecond."""
    numbers = (rows, inner, columns, count, moved, launches)
    shapes = ProductShapes(*(np.array([number]) for number in numbers))
    rates = ProductRates(PEAK, sustained, 1e9)
    return float(product_seconds(shapes, constants, multiprocessors, rates)[0])


def test_a_wave_of_the_smallest_tiles_takes_as_long_as_one_tile() -> None:
    """100 tiles of 64 x 64 are a wave; one row more makes two, or one of tiles twice as high."""
    one = 2 * 64 * 64 * 1000 / 1e12
    assert seconds(640, 640, 1000) == pytest.approx(one)
    assert seconds(641, 640, 1000) == pytest.approx(2 * one)
    # A last wave that is not full takes as much less as the constant says.
    shorter = replace(PLAIN, rest=0.5)
    assert seconds(641, 640, 1000, shorter) == pytest.approx(one * (1.1 + 0.5 * 0.9))


def test_the_best_tile_is_taken() -> None:
    """Where small tiles are slow, one wave of large ones; where they are fast, the small ones."""
    slow = replace(PLAIN, middle=0.9, small=0.5, least=0.25)
    rows, columns = 2560.0, 1280.0  # 100 tiles of 256 x 128
    assert seconds(rows, columns, 1000, slow) == pytest.approx(2 * rows * columns * 1000 / PEAK)
    one = 2 * 64 * 64 * 1000 / 1e12
    assert seconds(64, 64, 1000, slow) == pytest.approx(one / 0.25 / 4)  # in four parts


def test_few_tiles_share_the_inner_dimension() -> None:
    """One tile in four parts takes a quarter; sixty tiles stay whole; the ramp is paid by each."""
    whole = 2 * 64 * 64 * 1000 / 1e12
    assert seconds(64, 64, 1000) == pytest.approx(whole / 4)
    assert seconds(64, 64 * 60, 1000) == pytest.approx(whole)
    ramp = replace(PLAIN, ramp=500.0)
    assert seconds(64, 64, 1000, ramp) == pytest.approx(whole * (0.25 + 0.5))


def test_reading_the_matrices_may_take_longer() -> None:
    """1,000 bytes at half of 1e9 a second; launches come on top of either."""
    constants = replace(PLAIN, bandwidth=0.5, launch_us=3.0)
    assert seconds(64, 64, 64, constants, moved=1e6) == pytest.approx(2e-3 + 3e-6)
    assert seconds(64, 64, 64, constants, moved=1e6, launches=8) == pytest.approx(2e-3 + 24e-6)


def test_long_products_reach_the_sustained_rate() -> None:
    """From 0.3 to 3 ms the rate falls to half; a longer product never takes less time."""
    inner = np.geomspace(1e3, 1e7, 200)
    times = [seconds(256 * 10, 128 * 10, float(n), sustained=PEAK / 2) for n in inner]
    flops = 2 * 2560 * 1280 * inner
    assert np.all(np.diff(times) > 0)
    assert times[0] == pytest.approx(flops[0] / PEAK)
    late = flops / PEAK > SUSTAINED_AT
    assert np.array(times)[late] == pytest.approx(2 * flops[late] / PEAK)


def test_without_multiprocessors_there_are_no_tiles() -> None:
    """One row of one column takes its two FLOPs; eight products eight times as long."""
    assert seconds(1, 1, 1, multiprocessors=None) == pytest.approx(2 / PEAK)
    assert seconds(1, 1, 1, multiprocessors=None, count=8) == pytest.approx(16 / PEAK)
    assert len(TILES) == len(PLAIN.rates)


def test_activations_that_fit_are_in_the_cache_and_weights_are_not() -> None:
    """A thin product of 1 MB, nearly all activations, on a cache of 4 GB/s beside 1 GB/s."""
    rows, inner, columns = 10_000.0, 992.0, 8.0
    numbers = (rows, inner, columns, 1.0, 1e6, 1.0)
    shapes = ProductShapes(*(np.array([number]) for number in numbers))
    weights = 1e6 * inner * columns / (inner * columns + rows * (inner + columns))

    def taken(cache_bytes: float) -> float:
        rates = ProductRates(1e18, 1e18, 1e9, cache_bytes, 4e9)
        return float(product_seconds(shapes, PLAIN, MULTIPROCESSORS, rates)[0])

    assert taken(1e6) == pytest.approx(weights / 1e9 + (1e6 - weights) / 4e9)
    assert taken(0.9e6) == taken(0.0) == pytest.approx(1e-3)
