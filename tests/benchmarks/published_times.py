"""Step times of steps that the GPU limits, compared with published and own measurements.

    .venv/bin/python tests/benchmarks/published_times.py RUNS.csv WHEELS

The files are those of ``published_runs.py``. A step counts where the operators take at least
``GPU_BOUND`` times as long on the GPU as the clock assumes for the host, which an estimate knows,
too. Prints the errors of each source, the 90 % interval of a further one by the rule of the
memory's intervals (``published_intervals.py``), and the runs within that of the other sources.
"""

import csv
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from old_stacks.stacks import traces_of
from published_intervals import ends_of_interval
from published_recipes import NotExpressedError, Row, Run, run_of
from published_runs import CATALOG, simulated_run
from scoreboard import compared, measured_gpu_keys

from orchestrator.markdown_table import table
from trials.simulation.timing_model import EfficiencyConstants, timeline_of
from trials.simulation.trace_cache import Traces

GPU_BOUND = 3.0  # hosts took up to three times as long as the clock assumes
OF_WHOLE_STEPS = frozenset({"Qwen's script"})
"""Sources whose time is that of an optimizer step, as transformers' Trainer prints it."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A measured step of one source.

    Attributes:
        ratio: measured / predicted seconds.
        load: seconds of the GPU for each of the host.
    """

    source: str
    ratio: float
    load: float


def published_steps(rows: Sequence[Row], wheels: Path) -> Iterator[Timed]:
    """Published steps that a recipe expresses, at the mean length of their batches."""
    by_stack: dict[str | None, list[tuple[Row, Run]]] = defaultdict(list)
    for row in rows:
        try:
            run = run_of(row)
        except NotExpressedError:
            continue
        by_stack[run.stack].append((row, run))
    for stack, runs in by_stack.items():
        traces = Traces(workers=1) if stack is None else traces_of(stack, wheels)
        for row, run in runs:
            yield _published(row, run, traces)


def _published(row: Row, run: Run, traces: Traces) -> Timed:
    batch_size, gpu = int(row["batch_size"]), CATALOG.gpu(row["gpu"])
    simulated = simulated_run(row, run, traces)
    request = simulated.request
    length = round(float(row["seq_len_for_time"] or row["seq_len"]))
    cell = request.cell.model_copy(update={"seq_len": length})
    simulated.request = request.model_copy(update={"cell": cell, "batch_size": batch_size})
    line = timeline_of(simulated.operators(batch_size), gpu, EfficiencyConstants())
    parts = 1 if run.group in OF_WHOLE_STEPS else simulated.recipe.micro_batches(batch_size)
    ratio = float(row["step_seconds"]) * parts / line.seconds()
    return Timed(f"{run.group}, {gpu.key}", ratio, float(line.device.sum() / line.host.sum()))


def own_steps() -> Iterator[Timed]:
    """Steps that this project measured."""
    for key in measured_gpu_keys():
        for one in compared(key):
            ratio, load = one.step_ms / one.now.step_ms, one.now.device_ms / one.now.host_ms
            yield Timed(f"this project, {key}", ratio, load)


def interval(by_source: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    """Ends of measured / predicted for a run of a further source."""
    low, high = ends_of_interval([[math.log(one) for one in own] for own in by_source.values()])
    return math.exp(low), math.exp(high)


def within_others(by_source: Mapping[str, Sequence[float]], source: str) -> int:
    """Runs of a source within the interval of the others."""
    low, high = interval({name: own for name, own in by_source.items() if name != source})
    return sum(low <= one <= high for one in by_source[source])


def main() -> None:
    """Print the errors by source, the interval and its coverage."""
    with Path(sys.argv[1]).open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["step_seconds"]]
    by_source: dict[str, list[float]] = defaultdict(list)
    for one in (*published_steps(rows, Path(sys.argv[2])), *own_steps()):
        if one.load >= GPU_BOUND:
            by_source[one.source].append(one.ratio)
    lines = [
        (
            source,
            len(own),
            f"{statistics.median(own):.2f}",
            f"{min(own):.2f} to {max(own):.2f}",
            f"{within_others(by_source, source)} of {len(own)}",
            "{:.2f} to {:.2f}".format(
                *interval({name: them for name, them in by_source.items() if name != source})
            ),
        )
        for source, own in by_source.items()
    ]
    headers = ("source", "steps", "measured / predicted", "from, to")
    headers += ("within the others'", "interval of the others")
    low, high = interval(by_source)
    sys.stdout.write(f"{table(headers, lines)}\n\nA further source: {low:.2f} to {high:.2f}\n")


if __name__ == "__main__":
    main()
