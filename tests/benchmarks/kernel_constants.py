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
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path

import numpy as np
from kernel_attention import (
    attention_errors,
    attention_rows,
    has_attention,
    names_of,
)
from kernel_fitting import (
    Fitted,
    Products,
    attention_in_fit,
    drawn,
    in_fit,
    least,
    peak_of,
    products_of,
    rates_by_label,
)
from kernel_moving import halves, held_out_moving, moving_rows
from kernel_rows import measured_gpus, measured_rows

from gpu_catalog.kernel_rates import FILE, SHARED, KernelRate, group_for, group_of, nearest_rate
from orchestrator.markdown_table import table
from trials.simulation.clock.attention import RateNames, rates_by_names
from trials.simulation.clock.products import NAMES, ProductConstants, quantity_of
from trials.simulation.recording import FloatArray, Rate

TABLE = Path(__file__).resolve().parents[2] / "gpu_catalog" / "data" / FILE
# Most rows of each class and GPU in a fit: the classes count by their share of a step's time.
MOST = {"linear": 3000, "few-tokens": 200, "thin": 200, "narrow": 200, "fp32": 1200}
# Most rows of each library of attention kernels and GPU: libraries count alike.
MOST_ATTENTION = 600
# A class whose shortest rows show the launch, so that a GPU with some has one of its own.
SHORT = "product/thin"
START = ProductConstants(2.3, 0.78, 10.0, 130.0, 0.24, 0.972, 0.925, 0.78, 3.5)
# What a kernel can be: some collectors add a time of their own to each, and unused tiles have no
# rate that rows could determine.
LIMITS = {"launch_us": (1.0, 5.0), **dict.fromkeys(("middle", "small", "least"), (0.4, 1.1))}
LIMITS["knee"] = (1.0, 12.0)
# No fit sees this GPU, so that its error is one of a new GPU, by its siblings' rates.
NEVER_FITTED = {"GB200"}
SOURCE = "aiconfigurator 095f58a; vidur 7d47513; LLMServingSim 5daddb2; tests/benchmarks/kernels"
REACHED = ("short", "sustained")
# fp32's rows do not show the speed of the cache.
NOT_SHARED = {Rate.BF16: {"bandwidth", "launch_us"}, Rate.FP32: {"cached"}}
Key = tuple[str, str]
SOURCES = {Rate.BF16: SOURCE, Rate.FP32: "NeuSight 6945927"}


def own_names(key: str, rate: Rate, measured: Collection[Key]) -> tuple[str, ...]:
    """Numbers of products that belong to a GPU, beside those that all share."""
    if rate is Rate.FP32:
        return REACHED
    return (*REACHED, "bandwidth", *(("launch_us",) if (SHORT, key) in measured else ()))


def fitted_rows(
    samples: Fitted, rate: Rate, measured: Collection[Key], cached: float = START.cached
) -> tuple[KernelRate, ...]:
    """Shared numbers of a precision, and those of each GPU, by least squares.

    Args:
        samples: rows by GPU.
        rate: the precision.
        measured: classes and GPUs that have rows.
        cached: speed of the cache where it is not fitted.
    """
    keys = sorted(samples)
    labels = [(SHARED, name) for name in NAMES if name not in NOT_SHARED[rate]]
    labels += [(key, name) for key in keys for name in own_names(key, rate, measured)]

    # The search varies one number at a time, and most belong to one GPU.
    @lru_cache(maxsize=len(labels) * len(keys))
    def errors_of(key: str, values: tuple[float, ...]) -> FloatArray:
        numbers = dict(zip((*NAMES, *REACHED), values, strict=True))
        peaks = tuple(peak_of(key, rate) * numbers.pop(name) for name in REACHED)
        constants = ProductConstants(**numbers)
        return np.concatenate([one.errors(key, constants, peaks) for one in samples[key]])

    def residuals(point: FloatArray) -> FloatArray:
        values = dict(zip(labels, map(float, np.exp(point)), strict=True))
        launches = [value for (_, name), value in values.items() if name == "launch_us"]
        values[SHARED, "launch_us"] = float(np.exp(np.log(launches).mean()))
        values.setdefault((SHARED, "cached"), cached)
        parts = []
        for key in keys:
            own = (values.get((key, n), values.get((SHARED, n))) for n in (*NAMES, *REACHED))
            parts.append(errors_of(key, tuple(own)))
        return np.concatenate(parts)

    first = {field: getattr(START, field) for field in NAMES} | dict.fromkeys(REACHED, 0.77)
    start = np.array([first[name] for _, name in labels])
    limits = np.array([LIMITS.get(name, (0.0, np.inf)) for _, name in labels])
    values, errors = least(residuals, start, limits)
    quantities = [(key, quantity_of(name, rate)) for key, name in labels]
    return rates_by_label(samples, quantities, values, errors, SOURCES[rate])


def constants_of(
    rows: tuple[KernelRate, ...], key: str, rate: Rate
) -> tuple[ProductConstants, tuple[float, ...]]:
    """Numbers of products by a table, and FLOP/s that a GPU reaches by it."""
    quantities = {name: quantity_of(name, rate) for name in (*NAMES, *REACHED)}
    numbers = {
        name: nearest_rate(rows, quantity, key, group_for(quantity, measured_gpus()[key]))
        for name, quantity in quantities.items()
    }
    peaks = tuple(peak_of(key, rate) * numbers.pop(name) for name in REACHED)
    return ProductConstants(**numbers), peaks


def held_out(rows: tuple[KernelRate, ...], key: str, label: str, products: Products) -> FloatArray:
    """Absolute relative errors of the rows that no fit sees, by a table of rates."""
    facts = measured_gpus()[key]
    if label.startswith("attention/"):
        judged = products.where(~attention_in_fit(products))
        names, group = names_of(label, key), group_of(facts)
        assert names is not None
        rates = rates_by_names(names, lambda name: nearest_rate(rows, name, key, group))
        is_backward = label.startswith("attention/backward")
        errors = attention_errors(judged, key, rates, is_backward=is_backward)
        return np.abs(np.expm1(errors))
    judged = products.where(~in_fit(products))
    rate = Rate.FP32 if label == "product/fp32" else Rate.BF16
    constants, reached = constants_of(rows, key, rate)
    return np.abs(np.expm1(judged.errors(key, constants, reached)))


def fitted_table(measured: dict[tuple[str, str], Products]) -> tuple[KernelRate, ...]:
    """All rates, by the half of the rows that fits see; rows by class and GPU."""
    samples, fp32 = defaultdict(list), defaultdict(list)
    attention: dict[RateNames, Fitted] = defaultdict(lambda: defaultdict(list))
    for (label, key), products in measured.items():
        if key in NEVER_FITTED:
            continue
        kind, _, name = label.partition("/")
        if kind == "attention":
            names, seen = names_of(label, key), products.where(attention_in_fit(products))
            if names is not None:
                attention[names][key].append(drawn(seen, MOST_ATTENTION))
            continue
        seen = products.where(in_fit(products))
        if name == "fp32":
            fp32[key].append(drawn(seen, MOST[name]))
        elif name in MOST:
            samples[key].append(drawn(seen, MOST[name]))
    rows = fitted_rows(samples, Rate.BF16, measured)
    cached = nearest_rate(rows, quantity_of("cached", Rate.BF16), SHARED, SHARED)
    rows += fitted_rows(fp32, Rate.FP32, measured, cached)
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
