"""Step times compared with published and own measurements, and the intervals of further ones.

    .venv/bin/python tests/benchmarks/published_times.py RUNS.csv WHEELS [ERRORS.json]

The files are those of ``published_runs.py``; the further runs (``further_runs.py``) count, too, but
for those with options that recipes lack. The GPU limits a step where its operators take at least
``GPU_BOUND`` times as long there as the clock assumes for the host, which an estimate knows, too;
of the other steps the host may be the limit. Prints the errors of each source of either kind, the
90 % interval of the others by the rule of the memory's intervals (``published_intervals.py``), the
steps within it, and how slow the hosts are relative to the clock's. With a third file the intervals
are written to it: estimates read trials/simulation/clock/data/time_errors.json.
"""

import csv
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from further_recipes import FRAMEWORKS, further_run_of
from old_stacks.stacks import OldStack, traces_of
from published_intervals import ends_of_interval
from published_recipes import NotExpressedError, Row, Run, run_of
from published_runs import CATALOG, simulated_run
from scoreboard import compared, measured_gpu_keys
from scoreboard_further import rows_by_run

from orchestrator.markdown_table import table
from trials.simulation.clock.time_error import TimeError90, TimeErrors
from trials.simulation.timing_model import (
    GPU_BOUND,
    EfficiencyConstants,
    HostDeviceTimeline,
    timeline_of,
)
from trials.simulation.trace_cache import Traces

SLOWEST_HOST = 20.0
OF_WHOLE_STEPS = frozenset({"Qwen's script", *FRAMEWORKS})
"""Sources whose time is that of an optimizer step; of others it is that of a micro-batch."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A measured step of one source.

    Attributes:
        ratio: measured / predicted seconds.
        load: seconds of the GPU for each of the host.
        host: host time relative to the clock's with which the prediction is right, for a step that
            the GPU does not limit; None where there is no such host.
    """

    source: str
    ratio: float
    load: float
    host: float | None = None


def published_steps(
    rows: Sequence[Row], wheels: Path, run_of: Callable[[Row], Run] = run_of
) -> Iterator[Timed]:
    """Published steps that a recipe expresses, at the mean length of their batches."""
    by_stack: dict[OldStack | None, list[tuple[Row, Run]]] = defaultdict(list)
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


def step_timeline(row: Row, run: Run, traces: Traces) -> HostDeviceTimeline:
    """Timeline of an optimizer step at the mean padded length of the run's batches.

    Raises:
        TraceError: the run cannot be traced.
    """
    simulated = simulated_run(row, run, traces)
    length = run.mean_tokens or float(row["seq_len_for_time"] or row["seq_len"])
    request, batch_size = simulated.request, int(row["batch_size"])
    cell = request.cell.model_copy(update={"seq_len": round(length)})
    simulated.request = request.model_copy(update={"cell": cell, "batch_size": batch_size})
    operators = simulated.operators(batch_size)
    return timeline_of(operators, CATALOG.gpu(row["gpu"]), EfficiencyConstants())


def host_factor(line: HostDeviceTimeline, seconds: float) -> float | None:
    """Factor of the host's times with which a step takes so long, by bisection."""
    low, high = 0.0, SLOWEST_HOST
    if not line.seconds(low) < seconds < line.seconds(high):
        return None
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if line.seconds(middle) < seconds else (low, middle)
    return high


def _published(row: Row, run: Run, traces: Traces) -> Timed:
    line = step_timeline(row, run, traces)
    batch_size = int(row["batch_size"])
    parts = 1 if run.group in OF_WHOLE_STEPS else run.recipe.micro_batches(batch_size)
    seconds = float(row["step_seconds"]) * parts
    host = host_factor(line, seconds) if line.load < GPU_BOUND else None
    return Timed(f"{run.group}, {row['gpu']}", seconds / line.seconds(), line.load, host)


def further_steps(wheels: Path) -> Iterator[Timed]:
    """Steps of the further runs (``further_runs.py``) that a recipe expresses."""
    measured = rows_by_run("measured.csv")
    rows = [
        row | {"step_seconds": measured[run]["step_seconds"]}
        for run, row in rows_by_run("recipes.csv").items()
        if run in measured and measured[run]["step_seconds"] and not row["missing_options"]
    ]
    return published_steps(rows, wheels, further_run_of)


def _rows(path: Path) -> list[Row]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


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


def time_error(by_source: Mapping[str, Sequence[float]]) -> TimeError90:
    """Record of an interval and its coverage."""
    low, high = interval(by_source)
    steps = sum(map(len, by_source.values()))
    within = sum(within_others(by_source, source) for source in by_source)
    return TimeError90(
        steps=steps,
        sources=len(by_source),
        covered=round(within / steps, 3),
        low=round(min(1.0, low), 3),
        high=round(max(1.0, high), 3),
    )


def _errors(by_source: Mapping[str, Sequence[float]]) -> str:
    """Table of the errors of each source, and the interval of the others."""
    lines = []
    for source, own in by_source.items():
        low, high = interval({name: them for name, them in by_source.items() if name != source})
        ends = f"{min(own):.2f} to {max(own):.2f}", f"{low:.2f} to {high:.2f}"
        lines.append(
            (
                source,
                len(own),
                f"{statistics.median(own):.2f}",
                *ends,
                within_others(by_source, source),
            )
        )
    headers = ("source", "steps", "measured / predicted, median", "from, to")
    return table((*headers, "interval of the others", "within it"), lines)


def _hosts(steps: Iterable[Timed]) -> str:
    """Table of the hosts, for steps that only a slower or faster host explains."""
    by_source: dict[str, list[float]] = defaultdict(list)
    for one in steps:
        if one.host is not None:
            by_source[one.source].append(one.host)
    lines = [
        (source, len(own), f"{statistics.median(own):.1f}", f"{min(own):.1f} to {max(own):.1f}")
        for source, own in by_source.items()
    ]
    return table(("source", "steps", "host, median", "from, to"), lines)


def main() -> None:
    """Print errors by source, intervals, their coverage, and hosts."""
    wheels = Path(sys.argv[2])
    rows = [row for row in _rows(Path(sys.argv[1])) if row["step_seconds"]]
    steps = [*published_steps(rows, wheels), *further_steps(wheels), *own_steps()]
    of_gpu: dict[str, list[float]] = defaultdict(list)
    of_host: dict[str, list[float]] = defaultdict(list)
    for one in steps:
        (of_gpu if one.load >= GPU_BOUND else of_host)[one.source].append(one.ratio)
    errors = TimeErrors(of_gpu=time_error(of_gpu), of_host=time_error(of_host))
    for name, by_source in (("GPU", of_gpu), ("host", of_host)):
        sys.stdout.write(f"Limited by the {name}:\n\n{_errors(by_source)}\n\n")
    text = errors.model_dump_json(indent=2) + "\n"
    sys.stdout.write(f"{_hosts(steps)}\n\n{text}")
    if sys.argv[3:]:
        Path(sys.argv[3]).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
