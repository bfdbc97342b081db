"""Durations of fused attention, worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from gpu_catalog.catalog import load_catalog
from gpu_catalog.gpu import Gpu
from trials.simulation.clock.attention import (
    FLASH2,
    FORWARD_PRODUCTS,
    AttentionPeaks,
    AttentionRates,
    AttentionShapes,
    attention_rates,
    by_flash2,
    fused_seconds,
    rate_names,
)
from trials.simulation.clock.moving import clocks_per_second
from trials.simulation.clock.operators import Operators
from trials.simulation.recording import Column, Kind, OperatorClass, Rate
from trials.simulation.timing_model import EfficiencyConstants, timeline_of

CATALOG = load_catalog()
A100 = CATALOG.gpu("A100-80GB-SXM")
H100 = CATALOG.gpu("H100-SXM")


def rates(gpu: Gpu, **kernel: bool) -> AttentionRates:
    """Rates of a GPU's kernel."""
    names = rate_names(gpu.compute_capability, **kernel)
    assert names is not None
    return attention_rates(gpu, names)


HALF = AttentionRates(
    launch_us=3.0,
    query_clocks=80.0,
    wide_query_clocks=51.2,
    scores_per_clock=10.0,
    last_block=0.5,
    last_block_knee=1.0,
    reached=0.5,
)
PEAKS = AttentionPeaks(
    flops=1e12,
    clocks=1e9,
    multiprocessors=None,
    bandwidth=1e9,
    cached=4e9,
    cache_bytes=1e9,
    knee=2.0,
)


def seconds_of(peaks: AttentionPeaks, by_rates: AttentionRates = HALF, **changed: float) -> float:
    """Seconds of causal attention: 100 heads of width 50, 50,000 queries, 1,000 keys, few bytes.

    Of 5e9 scores, the mask leaves 2.5e9, and half of each block on the diagonal: 3.2e8.
    """
    columns = {"flops": 5e11, "moved": 0.0, "queries": 5e4, "keys": 1e3, "width": 50.0}
    columns |= {"heads": 100.0}
    shapes = AttentionShapes(**{k: np.array([v]) for k, v in (columns | changed).items()})
    return float(fused_seconds(shapes, FORWARD_PRODUCTS, peaks, by_rates)[0])


SCORES = 2.82e9
COMPUTING = np.hypot(4 * 50 * SCORES / 5e11, SCORES / 10 / 1e9) + 5e6 * 100 / 1e9


def test_products_overlap_exponentials_and_queries_and_launch_add_up() -> None:
    """At 1 TFLOP/s, half of it reached, 10 scores and a hundredth of a query a clock."""
    assert seconds_of(PEAKS) == pytest.approx(COMPUTING + 3e-6)


def test_the_last_block_ends_after_the_mean() -> None:
    """It has 128 queries; half of what it takes on one of 100 multiprocessors delays the end."""
    peaks = replace(PEAKS, multiprocessors=100)
    last = 0.5 * 100 * 128 * 1000 / SCORES
    assert seconds_of(peaks) == pytest.approx(COMPUTING * (1 + last) + 3e-6)
    # A kernel that begins with the longest blocks fills the multiprocessors behind them.
    longest_first = seconds_of(peaks, replace(HALF, last_block_knee=2.0))
    assert longest_first == pytest.approx(COMPUTING * np.hypot(1, last) + 3e-6)


def test_a_short_sequence_is_one_block_of_each_head() -> None:
    """Its diagonal is all of it, so no score is skipped, and no block is longer than others."""
    flops = 4 * 50 * 100 * 64 * 64 / 2
    short = seconds_of(replace(PEAKS, multiprocessors=100), flops=flops, queries=64.0, keys=64.0)
    computing = np.hypot(2 * flops / 5e11, 100 * 64 * 64 / 10 / 1e9) + 6400 * 100 / 1e9
    assert short == pytest.approx(computing * 1.5 + 3e-6)


def test_without_a_mask_no_score_is_added() -> None:
    """All of them are seen."""
    computing = np.hypot(4 * 50 * 5e9 / 5e11, 5e9 / 10 / 1e9) + 5e6 * 100 / 1e9
    assert seconds_of(PEAKS, flops=1e12) == pytest.approx(computing + 3e-6)


def test_tensors_that_do_not_fit_the_cache_delay_it() -> None:
    """They move at 1 GB/s, in the cache at 4 GB/s, beside the products."""
    for moved, seconds in ((8e9, 8.0), (1e9, 0.25)):
        both = np.hypot(COMPUTING, seconds)
        assert seconds_of(PEAKS, moved=moved) == pytest.approx(both + 3e-6)


def test_narrow_heads_take_longer_for_the_same_flops() -> None:
    """Half the width has twice the scores and queries, of which a part depends on the width."""
    whole = {"flops": 1e12, "keys": 1e3}
    narrow = seconds_of(PEAKS, **whole, width=25.0, queries=1e5)
    assert narrow == pytest.approx(np.hypot(2, 1) + 1e7 * (80 + 10) / 1e9 + 3e-6)
    assert seconds_of(PEAKS, **whole) == pytest.approx(np.hypot(2, 0.5) + 0.5 + 3e-6)


def test_an_unknown_clock_leaves_the_products_and_bytes() -> None:
    """A catalog of one's own may lack the fp32 rate, which gives the clock."""
    peaks = replace(PEAKS, clocks=float("nan"))
    products = 4 * 50 * SCORES / 5e11
    assert seconds_of(peaks) == pytest.approx(products + 3e-6)
    assert seconds_of(peaks, moved=8e9) == pytest.approx(np.hypot(products, 8) + 3e-6)


def flops_per_second(length: float, rate: Rate = Rate.BF16, speed: float = 1.0) -> float:
    """What causal attention of 2**16 tokens, 32 heads and width 128 reaches on the A100."""
    tokens, heads, width = 2.0**16, 32.0, 128.0
    bytes_each = 4 if rate is Rate.FP32 else 2
    numbers = np.zeros((1, len(Column)))
    numbers[0, Column.FLOPS] = 2 * tokens * heads * length * width
    numbers[0, Column.BYTES] = 4 * bytes_each * tokens * heads * width + 4 * tokens * heads
    shape = length, width, length, heads * tokens / length
    numbers[0, [Column.ROWS, Column.INNER, Column.COLUMNS, Column.PRODUCTS]] = shape
    step = Operators(
        kinds=np.array([Kind.RUN]),
        names=np.array([4 * OperatorClass.ATTENTION_FORWARD + rate]),
        numbers=numbers,
    )
    constants = EfficiencyConstants(attention_speed=speed)
    seconds = timeline_of(step, A100, constants).device.sum()
    return float(numbers[0, Column.FLOPS] / seconds)


def test_short_sequences_reach_less_of_the_peak() -> None:
    """The share of the peak grows with the length, up to the one that the GPU reaches."""
    reached = [flops_per_second(2.0**power) / 312e12 for power in range(8, 16)]
    assert reached == sorted(reached)
    assert reached[0] < 0.5 * reached[-1]
    # Long sequences take their products and exponentials alone.
    exponentials = 4 * 128 * rates(A100).scores_per_clock * clocks_per_second(A100) / 312e12
    both = np.hypot(1 / rates(A100).reached, 1 / exponentials)
    assert 1 / reached[-1] == pytest.approx(both, rel=0.05)


def test_a_faster_stack_takes_less_time_in_every_precision() -> None:
    """Twice the speed, half the time, but for the launch."""
    for rate in (Rate.BF16, Rate.FP16, Rate.FP32):
        fast, slow = (flops_per_second(4096.0, rate, speed) for speed in (1.0, 0.5))
        assert fast == pytest.approx(2 * slow, rel=0.01)


def test_each_generation_has_its_kernels() -> None:
    """Ampere's A40, Ada and the RTX form of Blackwell share FlashAttention-2 in small blocks."""
    keys = ("H100-PCIe", "H200-SXM", "B200", "A100-80GB-SXM", "A100-40GB-PCIe", "A40", "L40S")
    own = {key: rates(CATALOG.gpu(key)) for key in keys}
    clocks = {key: one.query_clocks for key, one in own.items()}
    assert clocks["A100-80GB-SXM"] == clocks["A100-40GB-PCIe"] < clocks["A40"] == clocks["L40S"]
    assert clocks["B200"] < clocks["H100-PCIe"] == clocks["H200-SXM"] < clocks["A100-80GB-SXM"]
    assert own["A100-80GB-SXM"].scores_per_clock == own["B200"].scores_per_clock
    # The PCIe form was not measured, and takes the mean of both measured Hopper GPUs.
    hopper = [rates(CATALOG.gpu(key)).reached for key in ("H100-SXM", "H200-SXM")]
    assert own["H100-PCIe"].reached == pytest.approx(np.sqrt(np.prod(hopper)))


def step_of(work: OperatorClass) -> Operators:
    """One attention operator, of 1 TFLOP and 1 GB: width 128, 4,096 keys, 1,000 heads."""
    numbers = np.zeros((1, len(Column)))
    numbers[0, [Column.FLOPS, Column.BYTES, Column.LAUNCHES]] = 1e12, 1e9, 1
    shape = 4096, 128, 4096, 1000
    numbers[0, [Column.ROWS, Column.INNER, Column.COLUMNS, Column.PRODUCTS]] = shape
    return Operators(np.array([Kind.RUN]), np.array([4 * work + Rate.BF16]), numbers)


def test_hopper_runs_flash_attention_2_at_half_the_speed_of_pytorchs_kernels() -> None:
    """Measured on an H100 (``tests/benchmarks/kernels``)."""
    seconds = {
        work: float(timeline_of(step_of(work), H100, EfficiencyConstants()).device[0])
        for work in (*FLASH2, *FLASH2.values())
    }
    for fused, flash2 in FLASH2.items():
        own = by_flash2(step_of(fused))
        assert timeline_of(own, H100, EfficiencyConstants()).device[0] == seconds[flash2]
        assert 1.5 < seconds[flash2] / seconds[fused] < 2.5
        # Ampere has one kernel for both.
        times = {
            float(timeline_of(s, A100, EfficiencyConstants()).device[0])
            for s in (own, step_of(fused))
        }
        assert len(times) == 1


def test_calibrated_backward_passes_scale_the_measured_ones() -> None:
    """Half the fraction of the peak takes twice as long, but for the launch."""
    step = step_of(OperatorClass.ATTENTION_BACKWARD)
    fast, slow = (
        float(timeline_of(step, H100, EfficiencyConstants(attention_backward=one)).device[0])
        for one in (0.56, 0.28)
    )
    assert slow == pytest.approx(2 * fast, rel=0.01)
