"""Fit of the clock's rates of fused attention (``kernel_constants.py``)."""

from dataclasses import replace

import numpy as np
from kernel_fitting import Fitted, Products, least, peak_of, rates_by_label
from kernel_rows import FLASH2_KERNEL, measured_gpus
from kernel_sweep import MOST_CALLS, RUN_SECONDS

from gpu_catalog.kernel_rates import SHARED, KernelRate
from trials.simulation.clock.attention import AttentionRates, fused_seconds, rate_names
from trials.simulation.recording import FloatArray, Rate

START_RUN_US = 100.0
START_ATTENTION = AttentionRates(10.0, 200.0, 0.6)
SOURCE_SWEEP = "tests/benchmarks/kernels"
SOURCE_ATTENTION = "aiconfigurator 095f58a; tests/benchmarks/kernels"


def attention_errors(products: Products, gpu: str, rates: AttentionRates) -> FloatArray:
    """(rows,) logarithms of predicted over measured seconds of causal attention.

    Its shapes are (length, width) x (width, length), half of it masked; there are 2.5 times as many
    in a backward pass.
    """
    shapes = products.shapes
    flops = 2.0 * shapes.rows * shapes.inner * shapes.columns * shapes.count
    predicted = fused_seconds(flops, shapes.moved, peak_of(gpu, Rate.BF16), rates)
    return np.log(predicted / products.seconds)


Names = tuple[str, str, str]


def names_of(label: str, key: str) -> Names | None:
    """Names of the rates of a class of attention on a GPU; None if it has none."""
    direction, _, kernel = label.removeprefix("attention/").partition(" ")
    return rate_names(
        measured_gpus()[key].compute_capability,
        is_flash2=kernel == FLASH2_KERNEL,
        is_backward=direction == "backward",
    )


def attention_rows(by_names: dict[Names, Fitted]) -> tuple[KernelRate, ...]:
    """Two numbers of each generation of kernels, and fractions of each GPU."""
    rows: tuple[KernelRate, ...] = ()
    # Those that have the numbers of their generation come first.
    for names, samples in sorted(by_names.items(), key=lambda item: (len(item[0][2]), item[0])):
        shared = {row.quantity: row.value for row in rows if row.gpu == SHARED}
        own = {key: samples[key] for key in sorted(samples)}
        if names[0] in shared:
            rows += _fractions(names[2], AttentionRates(shared[names[0]], shared[names[1]], 1), own)
        else:
            rows += _generation(names, own)
    return rows


def _generation(names: Names, samples: Fitted) -> tuple[KernelRate, ...]:
    """Numbers of a generation of kernels, and the fraction of each GPU."""

    def residuals(point: FloatArray) -> FloatArray:
        launch_us, per_byte, *reached = map(float, np.exp(point))
        fractions = zip(samples, reached, strict=True)
        rates = {key: AttentionRates(launch_us, per_byte, one) for key, one in fractions}
        parts = [attention_errors(one, key, rates[key]) for key in samples for one in samples[key]]
        return np.concatenate(parts)

    first = START_ATTENTION
    start = [first.launch_us, first.per_byte] + [first.reached] * len(samples)
    limits = [(0.0, np.inf)] * 2 + [(0.0, 2.0)] * len(samples)
    values, errors = least(residuals, np.array(start), np.array(limits))
    labels = [(SHARED, names[0]), (SHARED, names[1]), *((key, names[2]) for key in samples)]
    return rates_by_label(samples, labels, "", values, errors, SOURCE_ATTENTION)


def _fractions(name: str, rates: AttentionRates, samples: Fitted) -> tuple[KernelRate, ...]:
    """Fraction of each GPU in kernels that this project's sweep alone measured.

    The calls of a run share the time in which autograd started the first one, which is fitted too,
    and belongs to no kernel.
    """
    is_backward = "backward" in name

    def residuals(point: FloatArray) -> FloatArray:
        started, *reached = map(float, np.exp(point))
        own = {key: replace(rates, reached=one) for key, one in zip(samples, reached, strict=True)}
        return np.concatenate(
            [
                swept_errors(one, key, own[key], started * is_backward)
                for key in samples
                for one in samples[key]
            ]
        )

    start = [START_RUN_US] + [START_ATTENTION.reached] * len(samples)
    limits = [(0.0, np.inf)] + [(0.0, 2.0)] * len(samples)
    values, errors = least(residuals, np.array(start), np.array(limits))
    labels = [(key, name) for key in samples]
    return rates_by_label(samples, labels, "", values[1:], errors[1:], SOURCE_SWEEP)


def swept_errors(
    products: Products, gpu: str, rates: AttentionRates, started_us: float
) -> FloatArray:
    """(rows,) logarithms of predicted over measured seconds of a run of ``kernel_sweep``."""
    calls = np.clip(np.floor(RUN_SECONDS / products.seconds), 1, MOST_CALLS)
    errors = attention_errors(products, gpu, rates)
    return np.log(np.exp(errors) + 1e-6 * started_us / calls / products.seconds)


def has_attention(rows: tuple[KernelRate, ...], label: str, key: str) -> bool:
    """Whether a table has a fraction of the peak for a class of attention."""
    return {row.quantity for row in rows}.issuperset(names_of(label, key) or ())
