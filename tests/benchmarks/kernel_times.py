"""The clock's kernels, compared with kernel times that others measured on GPUs.

    .venv/bin/python tests/benchmarks/kernel_times.py FOLDER [--json]

The data are not part of the project. FOLDER has any of these files, as they are or with ``.gz``:

- ``gemm_*.csv``: gpu, dtype, m, n, k, us and optionally b; y = x W^T of x (m, k) and W (n, k).
- ``memory_bound.csv``: gpu, op, dtype, rows, cols, bytes, us.
- ``attention_forward_aiconfigurator.csv``: gpu, batch, seq, heads, kv, hd, us, kernel; causal.
- ``eager_blocks_liger.csv``: gpu, op, mode, x_name, x_value, extra_benchmark_config_str, us.

Only time on the GPU is compared: not the host's, which no file has. Classes of products: ``linear``
(16-bit, at least 256 rows, 512 columns and inner), ``few-tokens`` (16 to 255 rows), ``thin``
(columns or inner up to 64), ``narrow`` (65 to 511), ``fp32``. Rows on GPUs without known facts, of
other attention kernels than PyTorch's, and too small to be compared are left out (``kernel_rows``).
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from kernel_rows import (
    FORMER_SOFTMAX,
    Measured,
    measured_gpus,
    measured_rows,
    operators_of,
    stacked,
)

from gpu_catalog.errors import UserError
from gpu_catalog.gpu import Gpu
from orchestrator.markdown_table import table
from trials.simulation.clock.moving import moving_constants, moving_rates, moving_seconds
from trials.simulation.clock.products import matrix_product_seconds
from trials.simulation.recording import FloatArray
from trials.simulation.timing_model import EfficiencyConstants, peaks_of, timeline_of


def predicted_seconds(rows: list[Measured], gpu: Gpu) -> FloatArray:
    """(rows,) seconds that the clock's kernels take on one GPU."""
    operators, places = operators_of(rows)
    device = timeline_of(operators, gpu, EfficiencyConstants()).device.copy()
    # A step finds other matrices in the L2 cache than the collector that repeats a product.
    alone = [at for at, row in enumerate(rows) if row.label.startswith("product/")]
    if alone:
        own = np.isin(places, alone)
        device[own] = matrix_product_seconds(
            operators.names[own] % 4,
            operators.numbers[own],
            gpu,
            peaks_of(gpu),
            surroundings=stacked([rows[at] for at in alone]),
        )
    former = np.isin(places, [at for at, row in enumerate(rows) if row.label == FORMER_SOFTMAX])
    if former.any():
        device[former] = moving_seconds(
            *(operators.names[former] // 4, operators.numbers[former]),
            *(moving_rates(gpu), moving_constants(gpu)),
            by_former_softmax=True,
        )
    seconds = np.bincount(places, weights=device, minlength=len(rows)).astype(np.float64)
    return seconds + np.array([row.beside_seconds for row in rows])


def report(measured: Iterable[Measured]) -> list[dict[str, str | int | float]]:
    """Error by class and GPU: mean absolute percentage, and predicted over measured in total."""
    by_gpu = defaultdict(list)
    for row in measured:
        by_gpu[row.gpu].append(row)
    lines: list[dict[str, str | int | float]] = []
    for key, rows in by_gpu.items():
        predicted = predicted_seconds(rows, measured_gpus()[key])
        seconds = np.array([row.seconds for row in rows])
        labels = np.array([row.label for row in rows])
        for label in np.unique(labels):
            at = labels == label
            errors = np.abs(predicted[at] / seconds[at] - 1)
            lines.append(
                {
                    "class": str(label),
                    "gpu": key,
                    "rows": int(at.sum()),
                    "mape_pct": round(100 * float(errors.mean()), 1),
                    "total_ratio": round(float(predicted[at].sum() / seconds[at].sum()), 3),
                }
            )
    return sorted(lines, key=lambda line: (str(line["class"]), str(line["gpu"])))


def main() -> int:
    """Print the comparison as Markdown or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        lines = report(measured_rows(options.folder))
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if options.json:
        text = json.dumps({"rows": lines})
    else:
        text = table(tuple(lines[0]), [tuple(map(str, line.values())) for line in lines])
    sys.stdout.write(f"{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
