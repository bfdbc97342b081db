"""Measure the kernels of a step on this machine's GPU, on the shapes of the presets.

    python tests/benchmarks/kernel_sweep.py FOLDER [--seconds 480] [--models NAME ...]

Writes tables with the columns that ``kernel_times.py`` reads, one row as soon as it is measured, so
that the sweep can be stopped and started again; rows that are there are not measured twice. Kinds
take turns, so that a sweep cut short has some of each:

- ``gemm_sweep.csv``: linear layers, forward and both gradients.
- ``attention_forward_sweep.csv``, ``attention_backward_sweep.csv``: causal, by PyTorch's kernels.
- ``eager_blocks_sweep.csv``: norms, losses, rotary embeddings, activations (``kernel_blocks``).
- ``memory_bound_sweep.csv``: casts, transposed copies, sums, AdamW's step.
- ``dequantisation_sweep.csv``: bitsandbytes' NF4; ``scan_sweep.csv``: mamba-ssm's selective scan.

What this machine lacks (a kernel, a package, memory) is left out, and named on stderr. ``us`` is
the median of several runs of a few calls each, so the smallest kernels include their launch.
"""

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable
from itertools import chain, zip_longest
from pathlib import Path

import torch
from kernel_kinds import (
    Kernel,
    attention,
    blocks,
    casts,
    dequantisation,
    optimizers,
    products,
    scans,
)

from gpu_catalog.catalog import UnknownGpuError, load_catalog
from trials.records.model import Model, find_model, presets

SECONDS, TOKENS = 480.0, 4096
WARM_UP, RUNS, RUN_SECONDS, MOST_CALLS = 2, 5, 2e-3, 20
# Clocks that a GPU waits before a run, while its host launches the first kernels.
HEAD_START_CLOCKS = 2_000_000


def measured_us(run: Callable[[], object], *, on_gpu: bool) -> float:
    """Median microseconds of a call."""
    for _ in range(WARM_UP):
        run()
    once = _seconds(run, 1, on_gpu=on_gpu)
    calls = max(1, min(MOST_CALLS, int(RUN_SECONDS / max(once, 1e-7))))
    return 1e6 * statistics.median(_seconds(run, calls, on_gpu=on_gpu) for _ in range(RUNS))


def _seconds(run: Callable[[], object], calls: int, *, on_gpu: bool) -> float:
    if not on_gpu:
        start = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - start) / calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START_CLOCKS)  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3 / calls


class Tables:
    """Tables of a folder, to which rows are appended."""

    def __init__(self, folder: Path, common: dict[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._common = folder, common

    def has(self, kernel: Kernel) -> bool:
        """Whether a row of this kernel is there."""
        own = {name: str(value) for name, value in (self._common | kernel.columns).items()}
        path = self._folder / f"{kernel.table}.csv"
        if not path.exists():
            return False
        with path.open(encoding="utf-8", newline="") as file:
            return any(own.items() <= row.items() for row in csv.DictReader(file))

    def append(self, kernel: Kernel, us: float) -> None:
        """Append one row, and a header before the first."""
        row = {"gpu": self._common["gpu"], **kernel.columns, "us": round(us, 2)}
        row |= {"source": self._common["source"]}
        path = self._folder / f"{kernel.table}.csv"
        is_new = not path.exists()
        with path.open("a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(row), lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerow(row)


def sweep(folder: Path, models: list[Model], tokens: int, seconds: float, device: str) -> int:
    """Measure until all rows are there or the time is over; returns the number of new rows."""
    on_gpu, end, new = device == "cuda", time.monotonic() + seconds, 0
    name = torch.cuda.get_device_name() if on_gpu else "cpu"
    try:
        gpu = load_catalog().gpu_by_device_name(name).key if on_gpu else "cpu"
    except UnknownGpuError:
        gpu = name
    tables = Tables(folder, {"gpu": gpu, "source": f"kernel_sweep/torch {torch.__version__}"})
    kinds = (products(models, tokens), attention(models, tokens), blocks(models, tokens))
    rest = (
        dequantisation(models),
        scans(models, tokens),
        casts(models, tokens),
        optimizers(models),
    )
    turns = zip_longest(*kinds, *rest)
    for kernel in filter(None, chain.from_iterable(turns)):
        if tables.has(kernel):
            continue
        if time.monotonic() > end:
            sys.stderr.write("the time is over: start the sweep again for the rest\n")
            break
        try:
            with torch.device(device):
                us = measured_us(kernel.make(), on_gpu=on_gpu)
        except (RuntimeError, NotImplementedError) as error:  # no such kernel here, or no memory
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            sys.stderr.write(f"{kernel.table}: {kernel.columns}: {reason}\n")
            continue
        tables.append(kernel, us)
        new += 1
    return new


def main() -> int:
    """Run the sweep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument(
        "--models", nargs="+", metavar="NAME", help="presets; all of them if absent"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("PyTorch sees no CUDA GPU on this machine\n")
        return 1
    models = [find_model(name) for name in options.models or presets()]
    new = sweep(options.folder, models, options.tokens, options.seconds, options.device)
    sys.stdout.write(f"{new} new rows in {options.folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
