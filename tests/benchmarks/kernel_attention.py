"""Fit of the clock's rates of fused attention (``kernel_constants.py``)."""

from collections.abc import Mapping

import numpy as np
from kernel_fitting import Fitted, Products, least, peak_of, rates_by_label
from kernel_rows import FLASH2_KERNEL, calls_of_run, measured_gpus

from gpu_catalog.kernel_rates import SHARED, KernelRate
from trials.simulation.clock.attention import (
    BACKWARD_PRODUCTS,
    FORWARD_PRODUCTS,
    AttentionRates,
    AttentionShapes,
    RateNames,
    attention_peaks,
    fused_seconds,
    rate_names,
    rates_by_names,
)
from trials.simulation.recording import FloatArray, Rate

START_RUN_US = 100.0
MOST_START_US = 170.0  # that autograd took for a call
START_ATTENTION = AttentionRates(5.0, 70.0, 30.0, 10.0, 0.3, 1.5, 0.8)
LEAST_ATTENTION = AttentionRates(0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0)
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


def names_of(label: str, key: str) -> RateNames | None:
    """Names of the rates of a class of attention on a GPU; None if it has none."""
    direction, _, kernel = label.removeprefix("attention/").partition(" ")
    return rate_names(
        measured_gpus()[key].compute_capability,
        is_flash2=kernel == FLASH2_KERNEL,
        is_backward=direction == "backward",
    )


def attention_rows(by_names: dict[RateNames, Fitted]) -> tuple[KernelRate, ...]:
    """Numbers of each generation of kernels, and fractions of each GPU."""
    rows: tuple[KernelRate, ...] = ()
    for names in sorted(by_names, key=_borrowed):
        samples = by_names[names]
        known = {row.quantity: row.value for row in rows if row.gpu == SHARED}
        own = {key: samples[key] for key in sorted(samples)}
        rows += _fitted(names, known, own)
    return rows


def _borrowed(names: RateNames) -> tuple[int, str]:
    """How many numbers are not of the kernel's own generation, so that these are fitted first."""
    own = names.launch_us.removesuffix("launch_us")
    given = [name for name in names if name is not None]
    return sum(not name.startswith(own) for name in given), names.reached


def _fitted(
    names: RateNames, known: Mapping[str, float], samples: Fitted
) -> tuple[KernelRate, ...]:
    """Numbers of kernels that are not known yet, and the fraction of each GPU.

    Where the numbers of the generation are known, this project's sweep alone measured the kernels.
    The calls of one of its runs of the backward pass share the time in which autograd started the
    first one, which is fitted too, and belongs to no kernel.
    """
    is_backward = "backward" in names.reached
    free = {
        name: field
        for field, name in names._asdict().items()
        if name is not None and name not in known and name != names.reached
    }
    count = is_backward + len(free)

    def residuals(point: FloatArray) -> FloatArray:
        values = list(map(float, np.exp(point)))
        started_us = values[0] if is_backward else 0.0
        numbers = known | dict(zip(free, values[is_backward:count], strict=True))
        parts = []
        for key, reached in zip(samples, values[count:], strict=True):
            rates = rates_by_names(names, (numbers | {names.reached: reached}).__getitem__)
            parts += [
                swept_errors(one, key, rates, started_us, is_backward=is_backward)
                for one in samples[key]
            ]
        return np.concatenate(parts)

    fields = [*free.values(), *["reached"] * len(samples)]
    start = [START_RUN_US] * is_backward + [getattr(START_ATTENTION, one) for one in fields]
    least_values = [0.0] * is_backward + [getattr(LEAST_ATTENTION, one) for one in fields]
    most = [MOST_START_US] * is_backward + [np.inf] * len(free) + [2.0] * len(samples)
    limits = np.array([least_values, most]).T
    values, errors = least(residuals, np.array(start), limits)
    labels = [(SHARED, name) for name in free] + [(key, names.reached) for key in samples]
    source = SOURCE_ATTENTION if names.launch_us in free else SOURCE_SWEEP
    return rates_by_label(samples, labels, values[is_backward:], errors[is_backward:], source)


def swept_errors(
    products: Products,
    gpu: str,
    rates: AttentionRates,
    started_us: float,
    *,
    is_backward: bool,
) -> FloatArray:
    """(rows,) logarithms of predicted over measured seconds of a run of ``kernel_sweep``."""
    errors = attention_errors(products, gpu, rates, is_backward=is_backward)
    calls = calls_of_run(products.seconds)
    return np.log(np.exp(errors) + 1e-6 * started_us / calls / products.seconds)


def has_attention(rows: tuple[KernelRate, ...], label: str, key: str) -> bool:
    """Whether a table has a fraction of the peak for a class of attention."""
    return {row.quantity for row in rows}.issuperset({*(names_of(label, key) or ())} - {None})
