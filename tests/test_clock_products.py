"""Durations of matrix products in tiles and waves, worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from trials.simulation.clock.products import (
    STEP,
    SUSTAINED_AT,
    TILES,
    ProductConstants,
    ProductRates,
    ProductShapes,
    Surroundings,
    product_seconds,
)

# Every tile as fast as the largest; no cost but that of tiles and waves.
PLAIN = ProductConstants(
    overhead_us=0.0,
    bandwidth=1.0,
    cached=1.0,
    ramp=0.0,
    rest=1.0,
    middle=1.0,
    small=1.0,
    least=1.0,
    exponent=200.0,
)
MULTIPROCESSORS = 100
PEAK = 1e14  # FLOP/s: 1e12 of each multiprocessor
CLOCKS = 1e24  # a second: whatever the cache holds costs next to no time


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
    surroundings: Surroundings = STEP,
) -> float:
    """Seconds of one product, at 1 byte per second and nanosecond."""
    numbers = (rows, inner, columns, count, moved, launches)
    shapes = ProductShapes(*(np.array([number]) for number in numbers))
    rates = ProductRates(PEAK, sustained, 1e9, clocks=CLOCKS)
    return float(product_seconds(shapes, constants, multiprocessors, rates, surroundings)[0])


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
    assert seconds(64, 64, 1000, slow) == pytest.approx(one / 0.25 / 32)  # in 32 parts


def test_few_tiles_share_the_inner_dimension() -> None:
    """The parts of all tiles are at most a wave; each pays the ramp, and a kernel adds them up."""
    whole = 2 * 64 * 64 * 1000 / 1e12
    assert seconds(64, 64, 1000) == pytest.approx(whole / 32)
    assert seconds(64, 64 * 50, 1000) == pytest.approx(whole / 2)
    assert seconds(64, 64 * 60, 1000) == pytest.approx(whole)
    ramp = replace(PLAIN, ramp=500.0)
    assert seconds(64, 64, 1000, ramp) == pytest.approx(whole * (1 / 32 + 0.5))
    launch = replace(PLAIN, overhead_us=1.0)
    assert seconds(64, 64, 1000, launch) == pytest.approx(whole / 32 + 2e-6)
    assert seconds(64, 64 * 60, 1000, launch) == pytest.approx(whole + 1e-6)


def test_reading_and_multiplying_delay_each_other_where_they_are_alike() -> None:
    """Two equal times, joined by an exponent of one, are their sum."""
    one = 2 * 64 * 64 * 1000 / 1e12
    joined = replace(PLAIN, exponent=1.0)
    assert seconds(640, 640, 1000, joined, moved=1e9 * one) == pytest.approx(2 * one)


def test_reading_the_matrices_may_take_longer() -> None:
    """1,000 bytes at half of 1e9 a second; launches come on top of either."""
    constants = replace(PLAIN, bandwidth=0.5, overhead_us=3.0)
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


def test_products_of_zeros_keep_the_short_rate() -> None:
    """They draw too little power for their rate to fall."""
    zeros = Surroundings(has_values=False)
    assert seconds(2560, 1280, 1e7, sustained=PEAK / 2, surroundings=zeros) == pytest.approx(
        2 * 2560 * 1280 * 1e7 / PEAK
    )


def test_a_step_finds_the_input_in_the_cache_and_a_benchmark_what_it_repeats() -> None:
    """A thin product of 1 MB on a cache of 4 GB/s beside 1 GB/s of memory."""
    rows, inner, columns = 10_000.0, 40.0, 10.0
    parts = rows * inner, inner * columns, rows * columns
    given, weights, result = (1e6 * part / sum(parts) for part in parts)
    numbers = (rows, inner, columns, 1.0, 1e6, 1.0)
    shapes = ProductShapes(*(np.array([number]) for number in numbers))

    def taken(cache_bytes: float, amid: Surroundings) -> float:
        rates = ProductRates(1e18, 1e18, 1e9, 4e9, cache_bytes)
        return float(product_seconds(shapes, PLAIN, MULTIPROCESSORS, rates, amid)[0])

    assert taken(1.01e6, STEP) == pytest.approx(given / 4e9 + (weights + result) / 1e9)
    assert taken(0.9e6, STEP) == taken(0.0, STEP) == pytest.approx(1e-3)
    # Whatever a benchmark with one of each repeats fits; of six of each, nothing does.
    assert taken(1.01e6, Surroundings(1, 1, 1)) == pytest.approx(1e-3 / 4)
    six = Surroundings(inputs=6, weights=6, results=1)
    assert taken(1.01e6, six) == pytest.approx(result / 4e9 + (given + weights) / 1e9)
    assert taken(6e6, six) == pytest.approx(1e-3 / 4)
    # Without a clock of the GPU, nothing is faster than memory.
    rates = ProductRates(1e18, 1e18, 1e9, cache_bytes=1e6)
    assert product_seconds(shapes, PLAIN, MULTIPROCESSORS, rates)[0] == pytest.approx(1e-3)


def test_surroundings_of_chosen_operators() -> None:
    """Numbers hold for all; arrays have one of each operator."""
    both = Surroundings(inputs=np.array([1.0, 6.0]), weights=5.0)
    chosen = both.where(np.array([False, True]))
    assert (np.asarray(chosen.inputs).tolist(), chosen.weights) == ([6.0], 5.0)
