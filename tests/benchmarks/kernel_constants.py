"""Fit the clock's rates to kernel times that others measured on GPUs.

    .venv/bin/python tests/benchmarks/kernel_constants.py FOLDER

FOLDER is one of ``kernel_times.py``. Writes gpu_catalog/data/kernel_rates.csv from half of the
shapes, and prints the errors on the other half: with all
rates, and with those of the GPU itself left out, so that it gets its siblings'.
"""

import csv
import io
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from kernel_moving import halves, held_out_moving, moving_rows
from kernel_rows import FLASH2_KERNEL, Measured, measured_gpus, measured_rows
from kernel_sweep import MOST_CALLS, RUN_SECONDS
from scipy.optimize import least_squares

from gpu_catalog.kernel_rates import FILE, SHARED, KernelRate, group_of, nearest_rate
from orchestrator.markdown_table import table
from trials.simulation.clock.attention import AttentionRates, fused_seconds, rate_names
from trials.simulation.clock.products import (
    ProductConstants,
    ProductRates,
    ProductShapes,
    product_seconds,
)
from trials.simulation.recording import FloatArray, Rate

TABLE = Path(__file__).resolve().parents[2] / "gpu_catalog" / "data" / FILE
# Most rows of each class and GPU in a fit: the classes count by their share of a step's time.
MOST = {"linear": 1200, "few-tokens": 200, "thin": 200, "narrow": 200}
# Most rows of each library of attention kernels and GPU: libraries count alike.
MOST_ATTENTION = 600
START_RUN_US = 100.0
START_ATTENTION = AttentionRates(10.0, 200.0, 0.6)
# Matrices of these classes stay in the L2 cache of these GPUs when a benchmark repeats a product.
CACHED = {"thin", "narrow"}
LARGE_CACHES = {"L40S", "RTX-PRO-6000"}
START = ProductConstants(3.5, 0.70, 109.0, 0.30, 0.986, 0.933, 0.884)
UNITS = {"launch_us": "us", "ramp": "elements"}
UNITS |= {"attention_launch_us": "us", "attention_asynchronous_launch_us": "us"}
UNITS |= dict.fromkeys(("attention_per_byte", "attention_asynchronous_per_byte"), "FLOP/byte")
# What a kernel can be: some collectors add a time of their own to each, and unused tiles have no
# rate that rows could determine.
LIMITS = {"launch_us": (1.0, 5.0), **dict.fromkeys(("middle", "small", "least"), (0.4, 1.1))}
# No fit sees this GPU, so that its error is one of a new GPU, by its siblings' rates.
NEVER_FITTED = {"GB200"}
CACHE_SIZES_MB = (24.0, 32.0, 48.0, 64.0, 80.0, 96.0, 112.0, 128.0, 160.0)
CACHED_BANDWIDTHS = np.geomspace(0.8, 4.0, 30)  # of the memory's; a grid, since sizes are a step
SCALE = 0.08  # of errors beyond which a row counts less
SOURCE = "aiconfigurator 095f58a; vidur 7d47513; LLMServingSim 5daddb2; tests/benchmarks/kernels"
PREFIXES = {Rate.BF16: "product", Rate.FP32: "product_fp32"}
SOURCES = {Rate.BF16: SOURCE, Rate.FP32: "NeuSight 6945927"}
SOURCE_SWEEP = "tests/benchmarks/kernels"
SOURCE_ATTENTION = "aiconfigurator 095f58a; tests/benchmarks/kernels"


@dataclass(frozen=True, slots=True)
class Products:
    """Measured products of one class on one GPU; ``seconds`` is (rows,)."""

    shapes: ProductShapes
    seconds: FloatArray

    def where(self, at: np.ndarray) -> "Products":
        """Chosen rows."""
        columns = {f.name: getattr(self.shapes, f.name)[at] for f in fields(self.shapes)}
        return Products(replace(self.shapes, **columns), self.seconds[at])

    def errors(
        self,
        gpu: str,
        constants: ProductConstants,
        peaks: tuple[float, ...],
        cache: tuple[float, float] = (0.0, 1.0),
    ) -> FloatArray:
        """(rows,) logarithms of predicted over measured seconds.

        Args:
            gpu: key of the GPU.
            constants: numbers that all GPUs share.
            peaks: FLOP/s that it reaches in short and in sustained work.
            cache: megabytes of its L2 cache, and its speed relative to the memory's.
        """
        facts = measured_gpus()[gpu]
        bandwidth = (facts.memory_bandwidth_gb_per_second or 0.0) * 1e9
        rates = ProductRates(*peaks, bandwidth, 1e6 * cache[0], bandwidth * cache[1])
        predicted = product_seconds(self.shapes, constants, facts.multiprocessors, rates)
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
    return Products(shapes, np.array([row.seconds for row in rows]))


def in_fit(products: Products) -> np.ndarray:
    """(rows,) whether a row is in the half of the shapes that the fit sees."""
    shapes = products.shapes
    sizes = zip(shapes.rows, shapes.columns, shapes.inner, strict=True)
    return np.array([zlib.crc32(b"%d,%d,%d" % size) % 2 == 0 for size in sizes])


def drawn(products: Products, most: int) -> Products:
    """At most so many rows, drawn with a fixed seed."""
    order = np.random.default_rng(0).permutation(len(products.seconds))
    return products.where(np.sort(order[:most]))


Fitted = dict[str, list[Products]]


def fitted_rows(samples: Fitted, rate: Rate) -> tuple[KernelRate, ...]:
    """Shared numbers of a precision, and two fractions of each GPU, by least squares."""
    keys, prefix = sorted(samples), PREFIXES[rate]
    names = [field.name for field in fields(START)]

    def residuals(point: FloatArray) -> FloatArray:
        constants = ProductConstants(*map(float, np.exp(point[: len(names)])))
        parts = []
        for place, key in enumerate(keys):
            own = np.exp(point[len(names) + 2 * place :][:2]) * peak_of(key, rate)
            parts += [one.errors(key, constants, tuple(own)) for one in samples[key]]
        return np.concatenate(parts)

    start = [getattr(START, name) for name in names] + [0.78, 0.76] * len(keys)
    limits = [LIMITS.get(name, (0.0, np.inf)) for name in names] + [(0.0, 2.0)] * 2 * len(keys)
    values, errors = least(residuals, np.array(start), np.array(limits))
    labels = [(SHARED, name) for name in names]
    labels += [(key, name) for key in keys for name in ("short", "sustained")]
    return rates_by_label(samples, labels, f"{prefix}_", values, errors, SOURCES[rate])


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
    return np.exp(best.x), np.sqrt(scatter * np.diag(np.linalg.pinv(best.jac.T @ best.jac)))


def rates_by_label(  # noqa: PLR0917 - what a row of the table says
    samples: Fitted,
    labels: list[tuple[str, str]],
    prefix: str,
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
            group=SHARED if gpu == SHARED else group_of(measured_gpus()[gpu]),
            quantity=f"{prefix}{name}",
            value=float(f"{value:.4g}"),
            unit=UNITS.get(name, "1"),
            standard_error=float(f"{value * error:.2g}"),
            rows=counts[gpu],
            source=source,
        )
        for (gpu, name), value, error in zip(labels, values, errors, strict=True)
    )


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


def constants_of(
    rows: tuple[KernelRate, ...], key: str, rate: Rate
) -> tuple[ProductConstants, tuple[float, ...]]:
    """Shared numbers of a table, and FLOP/s that a GPU reaches by it."""
    group, prefix = group_of(measured_gpus()[key]), PREFIXES[rate]
    names = [field.name for field in fields(START)]
    numbers = {
        name: nearest_rate(rows, f"{prefix}_{name}", key, group)
        for name in (*names, "short", "sustained")
    }
    constants = ProductConstants(**{name: numbers.pop(name) for name in names})
    return constants, tuple(peak_of(key, rate) * number for number in numbers.values())


def cache_rows(
    rows: tuple[KernelRate, ...], key: str, products: list[Products]
) -> tuple[KernelRate, ...]:
    """Size and speed of a GPU's L2 cache, from products that only move data: the least error."""
    constants, peaks = constants_of(rows, key, Rate.BF16)

    def error(cache: tuple[float, float]) -> float:
        errors = [one.errors(key, constants, peaks, cache) for one in products]
        return float(np.abs(np.concatenate(errors)).mean())

    grid = [(size, float(speed)) for size in CACHE_SIZES_MB for speed in CACHED_BANDWIDTHS]
    size, speed = min(grid, key=error)
    # Half a step of the grid stands for the standard error.
    steps = {"cache_mb": 16.0, "cached_bandwidth": 0.03 * speed}
    return tuple(
        KernelRate(
            gpu=key,
            group=group_of(measured_gpus()[key]),
            quantity=f"product_{name}",
            value=float(f"{value:.4g}"),
            unit=unit,
            standard_error=float(f"{steps[name]:.2g}"),
            rows=sum(len(one.seconds) for one in products),
            source=SOURCE,
        )
        for name, value, unit in (("cache_mb", size, "MB"), ("cached_bandwidth", speed, "1"))
    )


def has_attention(rows: tuple[KernelRate, ...], label: str, key: str) -> bool:
    """Whether a table has a fraction of the peak for a class of attention."""
    return {row.quantity for row in rows}.issuperset(names_of(label, key) or ())


def held_out(rows: tuple[KernelRate, ...], key: str, label: str, products: Products) -> FloatArray:
    """Absolute relative errors of the rows that no fit sees, by a table of rates."""
    judged = products.where(~in_fit(products))
    facts = measured_gpus()[key]
    if label.startswith("attention/"):
        names, group = names_of(label, key) or (), group_of(facts)
        rates = AttentionRates(*(nearest_rate(rows, name, key, group) for name in names))
        errors = attention_errors(judged, key, rates)
        return np.abs(np.expm1(errors))
    rate = Rate.FP32 if label == "product/fp32" else Rate.BF16
    constants, reached = constants_of(rows, key, rate)
    own = {row.quantity: row.value for row in rows if row.gpu == key}
    size = own.get("product_cache_mb", 0.0) if rate is Rate.BF16 else 0.0
    cache = (size, own.get("product_cached_bandwidth", 1.0))
    return np.abs(np.expm1(judged.errors(key, constants, reached, cache)))


def fitted_table(measured: dict[tuple[str, str], Products]) -> tuple[KernelRate, ...]:
    """All rates, by the half of the rows that fits see; rows by class and GPU."""
    samples, fp32 = defaultdict(list), defaultdict(list)
    attention: dict[Names, Fitted] = defaultdict(lambda: defaultdict(list))
    for (label, key), products in measured.items():
        if key in NEVER_FITTED:
            continue
        kind, _, name = label.partition("/")
        seen = products.where(in_fit(products))
        if kind == "attention":
            names = names_of(label, key)
            if names is not None:
                attention[names][key].append(drawn(seen, MOST_ATTENTION))
        elif name == "fp32":
            fp32[key].append(drawn(seen, MOST["linear"]))
        elif name in MOST and (name not in CACHED or key not in LARGE_CACHES):
            samples[key].append(drawn(seen, MOST[name]))
    rows = fitted_rows(samples, Rate.BF16) + fitted_rows(fp32, Rate.FP32)
    for key in sorted(LARGE_CACHES):
        moving = [measured[f"product/{name}", key] for name in sorted(CACHED)]
        rows += cache_rows(rows, key, [one.where(in_fit(one)) for one in moving])
    return rows + attention_rows(attention)


def main() -> None:
    """Write the table and print the held-out errors as Markdown."""
    by_class, everything = defaultdict(list), list(measured_rows(Path(sys.argv[1])))
    for row in everything:
        if row.label.startswith(("product/", "attention/")):
            by_class[row.label, row.gpu].append(row)
    measured = {key: products_of(rows) for key, rows in by_class.items()}
    seen, judged = halves(everything)
    rows = fitted_table(measured) + moving_rows(seen, least)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(KernelRate.model_fields)
    writer.writerows(list(row.model_dump().values()) for row in rows)
    TABLE.write_text(text.getvalue(), encoding="utf-8")
    lines = []
    # The shared numbers hardly depend on one GPU's rows, so only its own rates are left out.
    without = {gpu: tuple(row for row in rows if row.gpu != gpu) for gpu in {r.gpu for r in rows}}
    for (label, key), products in sorted(measured.items()):
        others = without.get(key, rows)
        is_alone = label.startswith("attention/") and not has_attention(others, label, key)
        tables = (rows,) if is_alone else (rows, others)
        errors = [held_out(table, key, label, products) for table in tables]
        means = [f"{100 * float(one.mean()):.1f} %" for one in errors]
        lines.append((label, key, len(errors[0]), *means, *(["no sibling"] if is_alone else [])))
    for (label, key), movers in sorted(judged.items()):
        errors = [held_out_moving(table, movers) for table in (rows, without.get(key, rows))]
        means = [f"{100 * float(one.mean()):.1f} %" for one in errors]
        lines.append((label, key, len(errors[0]), *means))
    header = ("class", "GPU", "rows held out", "error", "error by siblings' rates")
    sys.stdout.write(f"{table(header, [tuple(map(str, line)) for line in lines])}\n")


if __name__ == "__main__":
    main()
