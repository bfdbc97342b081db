"""The simulated GPU, compared with the paper's points and with tracing every layer.

Prints Markdown, after some minutes on two cores. Traces are kept in a folder of its own, so tracing
takes as long as on a fresh machine.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fitting.paper.published import dataset_lengths, throughput_points
from gpu_catalog.catalog import load_catalog
from orchestrator.markdown_table import table
from trials.recipes.named_recipes import NAMED_RECIPES
from trials.records.cell import Cell
from trials.records.compatibility import with_defaults
from trials.records.model import find_model
from trials.simulation.simulated_cell import SimulatedCell
from trials.simulation.simulated_prober import usable_bytes
from trials.simulation.timing_model import EfficiencyConstants
from trials.simulation.trace_cache import Traces
from trials.simulation.tracing.tracing_worker import Tracing

CATALOG = load_catalog()
# The paper does not say which H100 it ran on: both are shown.
GPUS = {
    "A40": ("A40",),
    "A100-40GB": ("A100-40GB-SXM",),
    "A100-80GB": ("A100-80GB-SXM",),
    "H100-80GB": ("H100-PCIe", "H100-SXM"),
}
BETWEEN = ("step times", "batches", "off by", "absolute", "at most", "same order")
# The paper's bitsandbytes unpacks 4-bit weights at a third of the rate of today's.
OLDER = EfficiencyConstants(dequantisation=1.1)
# The paper's model file waits for the GPU in every block: host and GPU take turns.
INSTRUMENTED = OLDER.model_copy(update={"overlapped": False})
USD_PER_HOUR = {"A40": 0.79, "A100-80GB": 1.67, "H100-80GB": 2.10}  # 2408.04693, Table IV
RECIPES = {"mixtral-8x7b": "paper-mixtral", "blackmamba-2.8b": "paper-blackmamba"}
MIXTRAL, BASE = "mixtral-8x7b", "A100-80GB"


@dataclass(frozen=True, slots=True)
class Point:
    """Point of the paper."""

    model: str
    dataset: str
    gpu: str
    batch_size: int
    sparsity: float
    examples_per_second: float

    @property
    def series(self) -> tuple[str, str, str, float]:
        """Key of the series that it is plotted in."""
        return (self.model, self.dataset, self.gpu, self.sparsity)

    @property
    def step_seconds(self) -> float:
        """Measured time of a step."""
        return self.batch_size / self.examples_per_second


def paper_points() -> list[Point]:
    """All 96 points."""
    published = throughput_points()
    rows = published.rows
    return [
        Point(str(model), str(dataset), str(gpu), int(batch), float(sparsity), float(batch / t))
        for model, dataset, gpu, batch, sparsity, t in zip(
            *(published.model, published.dataset, published.gpu),
            *(rows.batch_size, rows.sparsity, rows.seconds),
            strict=True,
        )
    ]


def padded_length(dataset: str, batch_size: int) -> int:
    """Mean padded length of a batch, rounded up to a multiple of 8."""
    return int(-(-dataset_lengths()[dataset].padded(batch_size, multiple=1) // 8) * 8)


class Simulation:
    """Simulated cells of the paper, each traced once."""

    def __init__(self, traces: Traces) -> None:
        self.traces = traces
        self._cells: dict[tuple[str, float, int], SimulatedCell] = {}

    def cell(self, model_name: str, sparsity: float, seq_len: int) -> SimulatedCell:
        """Simulated cell of a model, sparsity and length, for any GPU."""
        key = (model_name, sparsity, seq_len)
        if key not in self._cells:
            model, gpu = find_model(model_name), CATALOG.gpu("A40")
            cell = Cell(
                gpu=gpu.key,
                simulated=True,
                model=model_name,
                recipe=with_defaults(NAMED_RECIPES[RECIPES[model_name]], model, gpu),
                experts=model.experts,
                active_experts=round(sparsity * (model.experts or 1)),
                seq_len=seq_len,
            )
            self._cells[key] = SimulatedCell(cell, model, self.traces)
        return self._cells[key]

    def cell_of(self, point: Point) -> SimulatedCell:
        """Simulated cell of a point."""
        length = padded_length(point.dataset, point.batch_size)
        return self.cell(point.model, point.sparsity, length)

    def prepare(self, points: list[Point]) -> None:
        """Trace the steps of these points."""
        requests = {
            request.key: request
            for point in points
            for request in self.cell_of(point).requests(alone=point.batch_size == 1)
        }
        self.traces.prepare(list(requests.values()))

    def step_seconds(
        self, point: Point, gpu: str, constants: EfficiencyConstants | None = None
    ) -> float:
        """Simulated step time of a point on one form of its GPU."""
        cell = self.cell_of(point)
        constants = constants or OLDER
        return cell.step_time(point.batch_size, CATALOG.gpu(gpu), constants).seconds


def host_factor(simulation: Simulation, point: Point, gpu: str) -> float:
    """Host factor with which the simulated step takes as long as the measured one."""
    without = simulation.step_seconds(point, gpu, _instrumented(1e-6))
    once = simulation.step_seconds(point, gpu, INSTRUMENTED) - without
    return max(0.1, (point.step_seconds - without) / once)


def _instrumented(factor: float) -> EfficiencyConstants:
    return INSTRUMENTED.model_copy(update={"host_factor": factor})


def series_rows(simulation: Simulation, points: list[Point]) -> Iterator[tuple[object, ...]]:
    """Errors of each series, before and after fitting its machine's host to one point."""
    by_series = defaultdict(list)
    for point in points:
        by_series[point.series].append(point)
    for (model, dataset, name, sparsity), members in by_series.items():
        # The machine's one point: Mixtral's largest sparse batch.
        sparse = [p for p in points if (p.model, p.gpu, p.sparsity) == (MIXTRAL, name, 0.25)]
        probe = max(sparse, key=lambda p: p.batch_size)
        for gpu in GPUS[name]:
            factor = host_factor(simulation, probe, gpu)
            ratios = [simulation.step_seconds(p, gpu) / p.step_seconds for p in members]
            others = [p for p in members if p != probe] or members
            errors = [
                simulation.step_seconds(p, gpu, _instrumented(factor)) / p.step_seconds - 1
                for p in others
            ]
            yield (
                f"{model}, {dataset}, {gpu}, {sparsity:g}",
                len(members),
                f"{ratios[0]:.2f}",
                f"{ratios[-1]:.2f}",
                f"{statistics.mean(abs(r - 1) for r in ratios):.0%}",
                f"{factor:.1f}",
                f"{statistics.mean(map(abs, errors)):.0%}",
            )


def between_gpus(simulation: Simulation, points: list[Point]) -> Iterator[tuple[object, ...]]:
    """Mixtral on MATH at common batch sizes: simulated over measured, against the A100-80GB."""
    math = {
        (p.sparsity, p.batch_size, p.gpu): p
        for p in points
        if (p.model, p.dataset) == (MIXTRAL, "math_14k")
    }
    for name, forms in GPUS.items():
        for gpu in forms:
            off = []
            ordered = 0
            for (sparsity, batch_size, gpu_name), point in math.items():
                base = math.get((sparsity, batch_size, BASE))
                if gpu_name != name or base is None or name == BASE:
                    continue
                measured = point.step_seconds / base.step_seconds
                simulated = simulation.step_seconds(point, gpu) / simulation.step_seconds(
                    base, *GPUS[BASE]
                )
                off.append(simulated / measured - 1)
                ordered += (measured - 1) * (simulated - 1) > 0
            if off:
                yield (
                    f"{gpu} / {BASE}",
                    len(off),
                    f"{statistics.mean(off):+.0%}",
                    f"{statistics.mean(map(abs, off)):.0%}",
                    f"{max(off, key=abs):+.0%}",
                    f"{ordered} of {len(off)}",
                )


def by_cost(simulation: Simulation, points: list[Point]) -> Iterator[tuple[object, ...]]:
    """Dollars for 1,000 examples of MATH at the paper's prices and largest sparse batches."""
    for name, rate in USD_PER_HOUR.items():
        own = [p for p in points if (p.model, p.dataset, p.gpu) == (MIXTRAL, "math_14k", name)]
        largest = max((p for p in own if p.sparsity < 1), key=lambda p: p.batch_size)
        for gpu in GPUS[name]:
            measured, simulated = (
                1000 / largest.batch_size * seconds / 3600 * rate
                for seconds in (largest.step_seconds, simulation.step_seconds(largest, gpu))
            )
            yield gpu, largest.batch_size, f"{measured:.3f}", f"{simulated:.3f}"


PLAIN = (
    *("--model", "mixtral-8x7b", "--method", "qlora", "--gradient-checkpointing", "on"),
    *("--seq-len", "512", "--gpu", "A40", "--json", "--defaults", "plain"),
)
"""Options of an estimate of Mixtral-8x7B by QLoRA with its largest batch on one GPU."""


def with_data(folder: Path) -> tuple[str, ...]:
    """Options of an estimate of an 8B model on two GPUs, with the lengths of MATH."""
    lengths, path = dataset_lengths()["math_14k"], folder / "lengths.csv"
    rows = zip(lengths.tokens.astype(int), lengths.examples.astype(int), strict=True)
    lines = ("tokens,examples", *(f"{tokens},{examples}" for tokens, examples in rows if examples))
    path.write_text("\n".join(lines), encoding="utf-8")
    gpus = ("--gpu", "A40", "--gpu", "A100-80GB-SXM")
    return ("--model", "llama-3.1-8b", "--length-histogram", str(path), *gpus, "--json")


def estimate_command(cache: Path, options: Sequence[str]) -> float:
    """Seconds of `estimate`."""
    started = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "orchestrator", "estimate", *options],
        check=True,
        capture_output=True,
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
    )
    return time.monotonic() - started


def tracing(cell: SimulatedCell) -> tuple[float, float]:
    """Seconds to trace three layers, and to trace all layers, in this process."""
    (request,) = cell.requests()
    Tracing().trace(request)  # imports and warms up
    seconds = []
    for whole in (False, True):
        started = time.monotonic()
        Tracing().trace(request.model_copy(update={"whole": whole}))
        seconds.append(time.monotonic() - started)
    return seconds[0], seconds[1]


HUNDRED = """\
name: hundred
gpus: [cpu]
cells:
  - models: [mixtral-8x7b]
    recipes: [paper-mixtral]
    active_experts: [2, 8]
    seq_lens: [64, 128, 256, 512, 1024]
    simulated_on: [{gpus}]
workload: {{examples: 1000, epochs: 3}}
"""


def hundred_cells(folder: Path) -> float:
    """Seconds of a sweep of 10 GPUs x 5 lengths x 2 sparsities, with ladders and ranking."""
    recipe = NAMED_RECIPES["paper-mixtral"]
    gpus = [g for g in CATALOG.gpus if g.kind == "cuda"]
    large = [g.key for g in gpus if usable_bytes(g, recipe) > 32 * 2**30]
    spec = folder / "hundred.yaml"
    spec.write_text(HUNDRED.format(gpus=", ".join(large[:10])), encoding="utf-8")
    started = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "orchestrator", "sweep", str(spec), "--out", str(folder / "run")],
        check=True,
        capture_output=True,
        env=os.environ | {"XDG_CACHE_HOME": str(folder / "hundred")},
    )
    return time.monotonic() - started


def main() -> None:
    """Print all tables."""
    say = sys.stdout.write
    points = paper_points()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        simulation = Simulation(Traces(folder / "paper"))
        cold, cached, data_cold, data_cached = (
            estimate_command(folder / "xdg", options)
            for options in (PLAIN, PLAIN, with_data(folder), with_data(folder))
        )
        few, whole = tracing(simulation.cell(MIXTRAL, 0.25, 512))
        hundred = hundred_cells(folder)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        say("## Speed\n\n")
        rows = [
            ("estimate, Mixtral-8x7B, QLoRA, largest batch, nothing cached", f"{cold:.1f} s"),
            ("the same, cached", f"{cached:.1f} s"),
            ("estimate with data, an 8B model on two GPUs, nothing cached", f"{data_cold:.1f} s"),
            ("the same, cached", f"{data_cached:.1f} s"),
            (
                "tracing all 32 layers over tracing three",
                f"{whole:.1f} s / {few:.1f} s = {whole / few:.1f}",
            ),
            ("sweep of 100 cells, nothing cached", f"{hundred:.1f} s"),
            (
                "memory, this process and the largest of its children",
                f"{_gib(peak)}, {_gib(children)}",
            ),
        ]
        say(table(("what", "took"), rows) + "\n\n## The paper's points\n\n")
        simulation.prepare(points)
        headers = ("series", "points", "smallest", "largest", "error", "host", "then")
        say("Step times, simulated over measured.\n\n")
        say(table(headers, series_rows(simulation, points)) + "\n\n")
        say(table(BETWEEN, between_gpus(simulation, points)))
        say(
            "\n\n"
            + table(("GPU", "batch", "$ measured", "$ simulated"), by_cost(simulation, points))
            + "\n"
        )


def _gib(kib: int) -> str:
    return f"{kib / 2**20:.1f} GiB"


if __name__ == "__main__":
    main()
