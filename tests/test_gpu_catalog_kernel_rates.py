"""Rates of kernels: those of the GPU itself, of its group, or of all."""

import math

import pytest

from gpu_catalog.catalog import load_catalog
from gpu_catalog.kernel_rates import (
    SHARED,
    KernelRate,
    group_of,
    kernel_rates,
    nearest_rate,
    rates_of,
)
from trials.simulation.clock.attention import attention_rates, rate_names
from trials.simulation.clock.moving import clocks_per_second

CATALOG = load_catalog()


def rate(gpu: str, group: str, value: float, rows: int = 100) -> KernelRate:
    """A row of a table, fitted to so many measurements."""
    facts = {"unit": "1", "standard_error": 0.01, "source": "a test"}
    return KernelRate(gpu=gpu, group=group, quantity="q", value=value, rows=rows, **facts)


def test_a_gpu_without_measurements_gets_its_siblings() -> None:
    """Its own row, else the geometric mean of its group, of its kind, of all."""
    rows = (rate("a", "8.6 full", 0.4), rate("b", "8.6 full", 0.9), rate("c", "9.0 half", 1.0))
    assert nearest_rate(rows, "q", "a", "8.6 full") == pytest.approx(0.4)
    assert nearest_rate(rows, "q", "x", "8.6 full") == pytest.approx(0.6)
    assert nearest_rate(rows, "q", "x", "12.0 half") == pytest.approx(1.0)
    assert nearest_rate(rows, "q", "x", "7.5 full") == pytest.approx(0.6)
    assert nearest_rate(rows[:2], "q", "x", "12.0 half") == pytest.approx(0.6)


def test_a_number_of_few_measurements_is_that_of_its_gpu_alone() -> None:
    """It may be far off."""
    rows = (rate("a", "8.6 full", 0.4), rate("b", "8.6 full", 0.9, rows=4))
    assert nearest_rate(rows, "q", "b", "8.6 full") == pytest.approx(0.9)
    assert nearest_rate(rows, "q", "x", "8.6 full") == pytest.approx(0.4)


def test_a_number_of_its_own_counts_before_the_shared_one() -> None:
    """Siblings keep the shared one: a launch that is fitted to one GPU holds for it alone."""
    rows = (rate(SHARED, SHARED, 2.7), rate("a", "8.9 full", 1.0))
    assert nearest_rate(rows, "q", "a", "8.9 full") == pytest.approx(1.0)
    assert nearest_rate(rows, "q", "b", "8.9 full") == pytest.approx(2.7)


def test_a_gpu_with_another_memory_keeps_its_rates() -> None:
    """Its key is another one, its kernels are not."""
    a40 = CATALOG.gpu("A40")
    assert rates_of(a40.model_copy(update={"key": "A40-10GiB"})) == rates_of(a40)
    stranger = a40.model_copy(update={"key": "A40-10GiB", "device_names": ("another",)})
    assert rates_of(stranger) != rates_of(a40)


def test_geforce_and_a10g_accumulate_at_half_rate() -> None:
    """Their peaks in bf16 are twice those in fp32, so they reach more of them."""
    half = {gpu.key for gpu in CATALOG.gpus if gpu.kind == "cuda" and "half" in group_of(gpu)}
    assert half == {
        *("RTX-3090", "RTX-4090", "RTX-5090", "A10G", "L40"),
        *("RTX-3090-Ti", "RTX-4070-Ti-SUPER", "RTX-4080", "RTX-4080-SUPER"),
        *("RTX-5070-Ti", "RTX-5080"),
    }


def test_every_gpu_of_the_catalog_has_every_rate() -> None:
    """No rate is outside what a kernel can reach, and each row says where it comes from."""
    names = {row.quantity for row in kernel_rates()}
    for gpu in CATALOG.gpus:
        rates = rates_of(gpu)
        assert set(rates) == names
        for name in ("short", "sustained", "fp32_short", "fp32_sustained"):
            assert 0.2 < rates[f"product_{name}"] < 1.4, (gpu.key, name)
        for name in ("attention", "attention_a100", "attention_hopper", "attention_b200"):
            assert 0.5 < rates[f"{name}_reached"] < 0.9, (gpu.key, name)
        # With the exponentials of heads of width 128, attention on a measured GPU reaches less.
        names_here = rate_names(gpu.compute_capability)
        if any(row.gpu == gpu.key and row.quantity in (names_here or ()) for row in kernel_rates()):
            assert names_here is not None
            own = attention_rates(gpu, names_here)
            exponentials = 4 * 128 * own.scores_per_clock * clocks_per_second(gpu)
            peak = 1e12 * (gpu.bf16_dense_tflops or math.nan)
            assert 1 / math.hypot(1 / own.reached, peak / exponentials) < 0.7, gpu.key
    assert all(row.source and math.isfinite(row.standard_error) for row in kernel_rates())
