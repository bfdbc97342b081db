"""Fit of the clock's rates of fused attention (``kernel_constants.py``)."""

from dataclasses import astuple, replace

import numpy as np
from kernel_fitting import Fitted, Products, least, peak_of, rates_by_label
from kernel_rows import FLASH2_KERNEL, measured_gpus
from kernel_sweep import MOST_CALLS, RUN_SECONDS

from gpu_catalog.kernel_rates import SHARED, KernelRate
from trials.simulation.clock.attention import (
    BACKWARD_PRODUCTS,
    FORWARD_PRODUCTS,
    AttentionRates,
    AttentionShapes,
    attention_peaks,
    fused_seconds,
    rate_names,
)
from trials.simulation.recording import FloatArray, Rate

START_RUN_US = 100.0
MOST_START_US = 170.0  # that autograd took for a call
START_ATTENTION = AttentionRates(5.0, 70.0, 10.0, 0.3, 0.8)
SOURCE_SWEEP = "tests/benchmarks/kernels"
SOURCE_ATTENTION = "aiconfigurator 095f58a; tests/benchmarks/kernels"


def attention_errors(
    products: Products, gpu: str, rates: AttentionRates, *, is_backward: bool = False
) -> FloatArray:
    """(rows,) logarithms of predicted over measured seconds of causal attention.

    Its products are (length, width) x (width, length), half of them masked.
    """
    shapes, count = products.shapes, BACKWARD_PRODUCTS if is_backward else FORWARD_PRODUCTS
    flops = count * shapes.rows * shapes.inner * shapes.columns * shapes.count
    work = AttentionShapes(
        flops, shapes.moved, shapes.rows, shapes.columns, shapes.inner, shapes.count
    )
    peaks = attention_peaks(measured_gpus()[gpu], peak_of(gpu, Rate.BF16))
    predicted = fused_seconds(work, count, peaks, rates) + products.beside
    return np.log(predicted / products.seconds)


Names = tuple[str, ...]


def names_of(label: str, key: str) -> Names | None:
    """Names of the rates of a class of attention on a GPU; None if it has none."""
    direction, _, kernel = label.removeprefix("attention/").partition(" ")
    return rate_names(
        measured_gpus()[key].compute_capability,
        is_flash2=kernel == FLASH2_KERNEL,
        is_backward=direction == "backward",
    )


def attention_rows(by_names: dict[Names, Fitted]) -> tuple[KernelRate, ...]:
    """Numbers of each generation of kernels, and fractions of each GPU."""
    rows: tuple[KernelRate, ...] = ()
    # Those that have the numbers of their generation come first.
    for names, samples in sorted(by_names.items(), key=lambda item: (len(item[0][-1]), item[0])):
        shared = {row.quantity: row.value for row in rows if row.gpu == SHARED}
        own = {key: samples[key] for key in sorted(samples)}
        if names[0] in shared:
            rates = AttentionRates(*(shared.get(name, 1.0) for name in names[:-1]), reached=1)
            rows += _swept(names, rates, own)
        else:
            rows += _generation(names, own)
    return rows


def _generation(names: Names, samples: Fitted) -> tuple[KernelRate, ...]:
    """Numbers of a generation of kernels, and the fraction of each GPU."""
    count = len(names) - 1

    def residuals(point: FloatArray) -> FloatArray:
        shared, reached = map(float, np.exp(point[:count])), map(float, np.exp(point[count:]))
        rates = AttentionRates(*shared, reached=1)
        own = {key: replace(rates, reached=one) for key, one in zip(samples, reached, strict=True)}
        parts = [attention_errors(one, key, own[key]) for key in samples for one in samples[key]]
        return np.concatenate(parts)

    start = list(astuple(START_ATTENTION))[:-1] + [START_ATTENTION.reached] * len(samples)
    limits = [(0.0, np.inf)] * count + [(0.0, 2.0)] * len(samples)
    values, errors = least(residuals, np.array(start), np.array(limits))
    labels = [(SHARED, name) for name in names[:-1]] + [(key, names[-1]) for key in samples]
    return rates_by_label(samples, labels, values, errors, SOURCE_ATTENTION)


def _swept(names: Names, rates: AttentionRates, samples: Fitted) -> tuple[KernelRate, ...]:
    """Numbers of kernels that this project's sweep alone measured, by those of their generation.

    These are the fraction of each GPU, and of the backward pass the clocks of a query. The calls of
    a run share the time in which autograd started the first one, which is fitted too, and belongs
    to no kernel.
    """
    is_backward = "backward" in names[-1]
    shared = [START_RUN_US, START_ATTENTION.query_clocks] * is_backward

    def residuals(point: FloatArray) -> FloatArray:
        started, clocks = map(float, np.exp(point[: len(shared)])) if shared else (0.0, None)
        reached = map(float, np.exp(point[len(shared) :]))
        all_have = rates if clocks is None else replace(rates, query_clocks=clocks)
        own = {k: replace(all_have, reached=one) for k, one in zip(samples, reached, strict=True)}
        return np.concatenate(
            [
                swept_errors(one, key, own[key], started, is_backward=is_backward)
                for key in samples
                for one in samples[key]
            ]
        )

    start = [*shared, *[START_ATTENTION.reached] * len(samples)]
    limits = [(0.0, MOST_START_US), (0.0, np.inf)] * is_backward + [(0.0, 2.0)] * len(samples)
    values, errors = least(residuals, np.array(start), np.array(limits))
    labels = [(SHARED, names[1])] * is_backward + [(key, names[-1]) for key in samples]
    return rates_by_label(samples, labels, values[is_backward:], errors[is_backward:], SOURCE_SWEEP)


def swept_errors(
    products: Products,
    gpu: str,
    rates: AttentionRates,
    started_us: float,
    *,
    is_backward: bool,
) -> FloatArray:
    """(rows,) logarithms of predicted over measured seconds of a run of ``kernel_sweep``."""
    calls = np.clip(np.floor(RUN_SECONDS / products.seconds), 1, MOST_CALLS)
    errors = attention_errors(products, gpu, rates, is_backward=is_backward)
    return np.log(np.exp(errors) + 1e-6 * started_us / calls / products.seconds)


def has_attention(rows: tuple[KernelRate, ...], label: str, key: str) -> bool:
    """Whether a table has a fraction of the peak for a class of attention."""
    return {row.quantity for row in rows}.issuperset(names_of(label, key) or ())
