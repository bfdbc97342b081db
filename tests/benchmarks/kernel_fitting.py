"""Least squares of the clock's rates, shared by the fits of ``kernel_constants.py``."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from hashlib import sha256

import numpy as np
from kernel_rows import Measured, measured_gpus, operators_of, stacked
from scipy.optimize import least_squares

from gpu_catalog.kernel_rates import SHARED, KernelRate, group_for
from trials.simulation.clock.moving import (
    clocks_per_second,
    l2_bytes,
    moving_constants,
    moving_rates,
    moving_seconds,
)
from trials.simulation.clock.products import (
    BoolArray,
    ProductConstants,
    ProductRates,
    ProductShapes,
    Surroundings,
    product_seconds,
)
from trials.simulation.recording import FloatArray, IntArray, Rate
from trials.simulation.timing_model import EfficiencyConstants

# Units by the end of a name; all other numbers are fractions.
UNITS = {
    "product_cached": "bytes per clock",
    "_ramp": "elements",
    "_us": "us",
    "_query_clocks": "clock",
    "_scores_per_clock": "1/clock",
}
SCALE = 0.08  # of errors beyond which a row counts less


@dataclass(frozen=True, slots=True)
class Products:
    """Measured products of one class on one GPU; all arrays are (rows,).

    Attributes:
        seconds: measured, of the product and of what its collector runs beside it.
        beside: predicted seconds of what its collector runs beside it.
    """

    shapes: ProductShapes
    seconds: FloatArray
    surroundings: Surroundings
    beside: FloatArray

    def where(self, at: BoolArray | IntArray) -> "Products":
        """Chosen rows."""
        columns = {f.name: getattr(self.shapes, f.name)[at] for f in fields(self.shapes)}
        return Products(
            replace(self.shapes, **columns),
            self.seconds[at],
            self.surroundings.where(at),
            self.beside[at],
        )

    def errors(self, gpu: str, constants: ProductConstants, peaks: tuple[float, ...]) -> FloatArray:
        """(rows,) logarithms of predicted over measured seconds.

        Args:
            gpu: key of the GPU.
            constants: numbers of products.
            peaks: FLOP/s that it reaches in short and in sustained work.
        """
        facts = measured_gpus()[gpu]
        bandwidth = (facts.memory_bandwidth_gb_per_second or 0.0) * 1e9
        rates = ProductRates(*peaks, bandwidth, clocks_per_second(facts), l2_bytes(facts))
        predicted = product_seconds(
            self.shapes, constants, facts.multiprocessors, rates, self.surroundings
        )
        return np.log(predicted / self.seconds)


def peak_of(gpu: str, rate: Rate) -> float:
    """Peak FLOP/s of a GPU."""
    facts = measured_gpus()[gpu]
    half = facts.bf16_dense_tflops or facts.fp16_dense_tflops
    return 1e12 * ((facts.fp32_tflops if rate is Rate.FP32 else half) or 0.0)


def products_of(rows: list[Measured]) -> Products:
    """Columns of measured products."""
    moved, _, height, inner, width, count, one = np.array([row.works[0][2] for row in rows]).T
    shapes = ProductShapes(height, inner, width, count, moved, one)
    seconds = np.array([row.seconds for row in rows])
    return Products(shapes, seconds, stacked(rows), _beside(rows))


def _beside(rows: list[Measured]) -> FloatArray:
    """(rows,) seconds of all but the first operator of each row, which only move data."""
    gpu = measured_gpus()[rows[0].gpu]
    operators, places = operators_of([replace(row, works=row.works[1:]) for row in rows])
    if not len(places):
        return np.zeros(len(rows))
    seconds = moving_seconds(
        operators.names // 4, operators.numbers, moving_rates(gpu), moving_constants(gpu)
    )
    floor = 1e-6 * EfficiencyConstants().kernel_floor_us
    seconds = np.maximum(seconds, floor)
    return np.bincount(places, weights=seconds, minlength=len(rows)).astype(np.float64)


def in_fit(products: Products) -> BoolArray:
    """(rows,) whether a row is in the half of the shapes that the fit sees."""
    shapes = products.shapes
    sizes = zip(shapes.rows, shapes.columns, shapes.inner, strict=True)
    return np.array([zlib.crc32(b"%d,%d,%d" % size) % 2 == 0 for size in sizes])


def attention_in_fit(products: Products) -> BoolArray:
    """The same for attention, whose few lengths and widths differ in the heads of all examples."""
    shapes = products.shapes
    sizes = zip(shapes.rows, shapes.inner, shapes.count, strict=True)
    return np.array([sha256(b"%d,%d,%d" % size).digest()[0] % 2 == 0 for size in sizes])


def drawn(products: Products, most: int) -> Products:
    """At most so many rows, drawn with a fixed seed."""
    order = np.random.default_rng(0).permutation(len(products.seconds))
    return products.where(np.sort(order[:most]))


Fitted = dict[str, list[Products]]


def least(
    residuals: Callable[[FloatArray], FloatArray], start: FloatArray, limits: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Values of least residuals and their relative standard errors.

    Args:
        residuals: of the rows, by the logarithms of the values.
        start: (values,) where the search begins.
        limits: (values, 2) least and largest ones.
    """
    with np.errstate(divide="ignore"):
        lower, upper = np.log(limits).T
    best = least_squares(
        residuals,
        np.log(start),
        bounds=(lower, upper),
        loss="soft_l1",
        f_scale=SCALE,
        diff_step=1e-3,
        max_nfev=20,
    )
    scatter = float(np.square(residuals(best.x)).mean())
    spread = np.linalg.norm(np.linalg.pinv(best.jac), axis=1)
    return np.exp(best.x), np.sqrt(scatter) * spread


def rates_by_label(
    samples: Fitted,
    labels: list[tuple[str, str]],
    values: FloatArray,
    errors: FloatArray,
    source: str,
) -> tuple[KernelRate, ...]:
    """Rows of the table, by GPU and name."""
    counts = {key: sum(len(one.seconds) for one in samples[key]) for key in samples}
    counts[SHARED] = sum(counts.values())
    return tuple(
        KernelRate(
            gpu=gpu,
            group=SHARED if gpu == SHARED else group_for(name, measured_gpus()[gpu]),
            quantity=name,
            value=float(f"{value:.4g}"),
            unit=next((unit for end, unit in UNITS.items() if name.endswith(end)), "1"),
            standard_error=float(f"{value * error:.2g}"),
            rows=counts[gpu],
            source=source,
        )
        for (gpu, name), value, error in zip(labels, values, errors, strict=True)
    )
