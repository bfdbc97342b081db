"""Fit the clock's rates to kernel times that others measured on GPUs.

    .venv/bin/python tests/benchmarks/kernel_constants.py FOLDER

FOLDER is one of ``kernel_times.py``. Writes gpu_catalog/data/kernel_rates.csv from half of the
shapes, and prints the errors on the other half: with all
rates, and with those of the GPU itself left out, so that it gets its siblings'.
"""

import csv
import io
import sys
from collections import defaultdict
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
from kernel_attention import Names, attention_errors, attention_rows, has_attention, names_of
from kernel_fitting import (
    Fitted,
    Products,
    drawn,
    in_fit,
    least,
    peak_of,
    products_of,
    rates_by_label,
)
from kernel_moving import halves, held_out_moving, moving_rows
from kernel_rows import measured_gpus, measured_rows

from gpu_catalog.kernel_rates import FILE, SHARED, KernelRate, group_of, nearest_rate
from orchestrator.markdown_table import table
from trials.simulation.clock.attention import AttentionRates
from trials.simulation.clock.products import (
    ProductConstants,
)
from trials.simulation.recording import FloatArray, Rate

TABLE = Path(__file__).resolve().parents[2] / "gpu_catalog" / "data" / FILE
# Most rows of each class and GPU in a fit: the classes count by their share of a step's time.
MOST = {"linear": 1200, "few-tokens": 200, "thin": 200, "narrow": 200}
# Most rows of each library of attention kernels and GPU: libraries count alike.
MOST_ATTENTION = 600
# Matrices of these classes stay in the L2 cache of these GPUs when a benchmark repeats a product.
CACHED = {"thin", "narrow"}
LARGE_CACHES = {"L40S", "RTX-PRO-6000"}
START = ProductConstants(3.5, 0.70, 109.0, 0.30, 0.986, 0.933, 0.884)
# What a kernel can be: some collectors add a time of their own to each, and unused tiles have no
# rate that rows could determine.
LIMITS = {"launch_us": (1.0, 5.0), **dict.fromkeys(("middle", "small", "least"), (0.4, 1.1))}
# No fit sees this GPU, so that its error is one of a new GPU, by its siblings' rates.
NEVER_FITTED = {"GB200"}
CACHE_SIZES_MB = (24.0, 32.0, 48.0, 64.0, 80.0, 96.0, 112.0, 128.0, 160.0)
CACHED_BANDWIDTHS = np.geomspace(0.8, 4.0, 30)  # of the memory's; a grid, since sizes are a step
LAUNCHES_US = np.arange(0.5, 3.6, 0.1)
# GPUs with a launch of their own, by which none of their classes gets worse. On RTX-PRO-6000 thin
# products would be 27 % off instead of 37 %, but linear ones 6.0 % instead of 5.8 %.
OWN_LAUNCHES = {"L40S"}
ROUNDS = 2  # of a search for the cache and one for the launch, after which neither changes
SOURCE = "aiconfigurator 095f58a; vidur 7d47513; LLMServingSim 5daddb2; tests/benchmarks/kernels"
PREFIXES = {Rate.BF16: "product", Rate.FP32: "product_fp32"}
SOURCES = {Rate.BF16: SOURCE, Rate.FP32: "NeuSight 6945927"}


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
    """Size and speed of a GPU's L2 cache, from products that only move data: the least error.

    From the cache these take so little time that the launch decides, and the shortest are done in
    less than the launch that all GPUs share: some GPUs get one of their own.
    """
    constants, peaks = constants_of(rows, key, Rate.BF16)

    def error(launch_us: float, size: float, speed: float) -> float:
        own = replace(constants, launch_us=launch_us)
        errors = [one.errors(key, own, peaks, (size, speed)) for one in products]
        return float(np.abs(np.concatenate(errors)).mean())

    launch_us, size, speed = constants.launch_us, 0.0, 1.0
    caches = [(size, float(speed)) for size in CACHE_SIZES_MB for speed in CACHED_BANDWIDTHS]
    launches = LAUNCHES_US if key in OWN_LAUNCHES else [launch_us]
    for _ in range(ROUNDS):
        size, speed = min(caches, key=lambda cache: error(launch_us, *cache))
        launch_us = min(map(float, launches), key=lambda us: error(us, size, speed))
    # Half a step of the grid stands for the standard error.
    steps = {"cache_mb": 16.0, "cached_bandwidth": 0.03 * speed, "launch_us": 0.05}
    numbers = [("cache_mb", size, "MB"), ("cached_bandwidth", speed, "1")]
    numbers += [("launch_us", launch_us, "us")] * (key in OWN_LAUNCHES)
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
        for name, value, unit in numbers
    )


def held_out(rows: tuple[KernelRate, ...], key: str, label: str, products: Products) -> FloatArray:
    """Absolute relative errors of the rows that no fit sees, by a table of rates."""
    judged = products.where(~in_fit(products))
    facts = measured_gpus()[key]
    if label.startswith("attention/"):
        names, group = names_of(label, key) or (), group_of(facts)
        rates = AttentionRates(*(nearest_rate(rows, name, key, group) for name in names))
        is_backward = label.startswith("attention/backward")
        errors = attention_errors(judged, key, rates, is_backward=is_backward)
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
