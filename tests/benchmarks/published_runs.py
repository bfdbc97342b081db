"""Simulated memory, compared with single-GPU fine-tuning runs that were measured.

    .venv/bin/python tests/benchmarks/published_runs.py RUNS.csv WHEELS [ERRORS.json]

The published runs are not part of the project; those that it measured itself are, and count
towards the intervals alone. Each row of the file is one run: the columns that ``run_of``
and ``compare`` read. Rows that no recipe expresses are listed with the missing options. WHEELS is a
folder of old libraries (``old_stacks/stacks.py``). With a second file the 90 % intervals of the
memory are written to it: estimates read orchestrator/estimating/data/memory_errors.json.
"""

import csv
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from old_stacks.stacks import traces_of
from published_intervals import PublishedError, coverage, published_errors
from published_recipes import NotExpressedError, Row, Run, published_gib, run_of
from scoreboard import compared, measured_gpu_keys

from gpu_catalog.catalog import load_catalog
from orchestrator.markdown_table import table
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell
from trials.records.compatibility import with_defaults
from trials.records.observation import Outcome
from trials.simulation.simulated_cell import CONTEXT_BYTES, GIB, SimulatedCell
from trials.simulation.simulated_prober import usable_bytes
from trials.simulation.trace_cache import Traces
from trials.simulation.varying_lengths import VaryingLengths

CATALOG = load_catalog()


@dataclass(frozen=True, slots=True)
class Comparison:
    """A published run with its simulation.

    Attributes:
        recipe: the recipe with all defaults.
        gib: simulated memory in GiB, the kind that was published; the median where lengths vary.
        runs_out: whether the simulated GPU runs out of memory.
        published_gib: absent if the published run was out of memory.
    """

    row: Row
    run: Run
    recipe: Recipe
    gib: float
    runs_out: bool
    published_gib: float | None

    @property
    def error(self) -> float | None:
        """Relative error; None if the published run was out of memory."""
        return None if self.published_gib is None else self.gib / self.published_gib - 1


def simulated_run(row: Row, run: Run, traces: Traces) -> SimulatedCell:
    """Simulated cell of a run."""
    gpu = CATALOG.gpu(row["gpu"])
    cell = Cell(
        gpu=gpu.key,
        simulated=True,
        model=run.model.name,
        recipe=with_defaults(run.recipe, run.model, gpu),
        experts=run.model.experts,
        active_experts=run.model.active_experts,
        seq_len=run.seq_len,
    )
    simulated = SimulatedCell(cell, run.model, traces)
    if run.stack is not None:  # in full fine-tuning LitGPT's chunks of logits depend on the batch
        # What outlives a backward pass is freed in no layer, so that none can represent others.
        exact = {"batch_size": int(row["batch_size"]), "whole": run.stack == "litgpt-4bit"}
        simulated.request = simulated.request.model_copy(update=exact)
    return simulated


def compare(row: Row, run: Run, traces: Traces) -> Comparison:
    """Simulate the run of a row.

    Raises:
        TraceError: its cell cannot be traced.
    """
    gpu, batch_size = CATALOG.gpu(row["gpu"]), int(row["batch_size"])
    simulated = simulated_run(row, run, traces)
    peaks = simulated.without_limit(batch_size, gpu)
    simulated_bytes = {
        "torch allocated": peaks.peak_allocated_bytes,
        "torch reserved": peaks.peak_reserved_bytes,
    }.get(row["peak_kind"], peaks.peak_reserved_bytes + CONTEXT_BYTES)
    if run.drawn is not None:
        varying = VaryingLengths(simulated, run.drawn)
        simulated_bytes = round(varying.memory(batch_size, gpu).quantile(0.5))
    outcome = simulated.memory(batch_size, gpu, usable_bytes(gpu, simulated.recipe)).outcome
    runs_out = outcome is Outcome.OUT_OF_MEMORY
    return Comparison(
        row, run, simulated.recipe, simulated_bytes / GIB, runs_out, published_gib(row)
    )


def _of_all(comparisons: Iterable[Comparison]) -> Iterator[tuple[str, Comparison]]:
    """Comparisons with an error under the names of the rows of the summary."""
    for one in comparisons:
        if one.error is None:
            continue
        method = "full" if one.row["method"] == "full" else "adapters"
        yield f"{one.run.group}, {method}", one
        yield "all", one
        if not one.run.drawn:
            yield "all of constant length", one
        if one.run.stack is None:
            yield "all under the installed libraries", one


def summary(comparisons: Iterable[Comparison]) -> Iterator[tuple[object, ...]]:
    """Errors by source and kind of figure, and over all runs."""
    errors: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for name, one in _of_all(comparisons):
        kind = ("", "")
        if not name.startswith("all"):
            kind = (one.row["peak_kind"], "vary" if one.run.drawn else "constant")
        errors[name, *kind].append(one.error or 0.0)
    for key, values in errors.items():
        absolute = np.abs(values)
        figures = (np.median(absolute), np.quantile(absolute, 0.9), np.max(absolute))
        yield *key, len(values), *(f"{f:.1%}" for f in figures), f"{np.mean(values):+.1%}"


def published_error(one: Comparison) -> PublishedError:
    """Error of a run whose memory was published."""
    assert one.published_gib is not None
    return PublishedError(
        source="/".join(one.row["source"].split("/")[:2]).split(" ")[0],
        method=one.recipe.method,
        lengths="varying" if one.run.drawn else "constant",
        recipe=one.recipe,
        error=math.log(one.published_gib / one.gib),
    )


def own_errors() -> Iterator[PublishedError]:
    """Errors of the runs that this project measured, by today's predictions (``scoreboard.py``)."""
    for gpu in measured_gpu_keys():
        for one in compared(gpu):
            _, reserved = one.gib
            yield PublishedError(
                source=f"this project, {gpu}",
                method=one.measured.cell.recipe.method,
                lengths="constant",
                recipe=one.measured.cell.recipe,
                error=math.log(reserved / one.now.reserved_gib),
            )


def _print_intervals(comparisons: Sequence[Comparison]) -> None:
    """Print the intervals and their coverage, and write them where a file is given."""
    errors = [published_error(one) for one in comparisons if one.published_gib is not None]
    errors += own_errors()
    record = published_errors(errors)
    headers = ("method", "lengths", "from", "runs", "sources", "published / predicted")
    rows = (
        (one.method, one.lengths, one.pooled, one.runs, one.sources, f"{one.low} to {one.high}")
        for one in record.intervals
    )
    sys.stdout.write(f"## 90 % intervals\n\n{table(headers, rows)}\n\n")
    parts = [
        (name, f"{inside} of {runs}")
        for kind in (lambda one: one.source, lambda one: one.method, lambda _: "all")
        for name, (inside, runs) in coverage(errors, kind).items()
    ]
    sys.stdout.write(f"{table(('runs', 'within the interval of other sources'), parts)}\n\n")
    if sys.argv[3:]:
        Path(sys.argv[3]).write_text(record.model_dump_json(indent=2) + "\n", encoding="utf-8")


def _each(one: Comparison) -> tuple[object, ...]:
    row, is_out = one.row, "out of memory"
    published = is_out if one.published_gib is None else f"{one.published_gib:.2f}"
    simulated = is_out if one.error is None and one.runs_out else f"{one.gib:.2f}"
    error = "" if one.error is None else f"{one.error:+.1%}"
    method = f"{row['method']} {row['lora_rank']}".strip()
    return one.run.group, row["model"], method, row["batch_size"], published, simulated, error


def compared_runs(
    path: Path, wheels: Path, run_of: Callable[[Row], Run] = run_of
) -> tuple[list[Comparison], Counter[tuple[str, str]], int]:
    """Comparisons of a file's runs, the rows that are not expressed, and the number of rows.

    Args:
        path: the file.
        wheels: folder of the old libraries' wheels.
        run_of: recipe and model of a row.

    Raises:
        TraceError: a run that a recipe expresses cannot be traced.
    """
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    missing: Counter[tuple[str, str]] = Counter()
    by_stack = defaultdict(list)
    for row in rows:
        try:
            run = run_of(row)
            by_stack[run.stack].append((row, run))
        except NotExpressedError as error:
            missing[row["framework"] or "not stated", str(error)] += 1
    comparisons = []
    for stack, runs in by_stack.items():
        traces = Traces(workers=1) if stack is None else traces_of(stack, wheels)
        cells = [simulated_run(row, run, traces) for row, run in runs]
        traces.prepare([cell.request for cell in cells])  # one process makes them all
        comparisons += [compare(row, run, traces) for row, run in runs]
    return comparisons, missing, len(rows)


def main() -> None:
    """Print the errors of all rows, a summary by source, and the rows that are not expressed.

    Raises:
        TraceError: a run that a recipe expresses cannot be traced.
    """
    comparisons, missing, rows = compared_runs(Path(sys.argv[1]), Path(sys.argv[2]))
    say = sys.stdout.write
    headers = ("source", "figure", "lengths", "runs", "median error", "90 %", "largest", "bias")
    say(f"## By source\n\n{table(headers, summary(comparisons))}\n\n")
    headers = ("source", "model", "method", "batch", "published GiB", "simulated GiB", "error")
    say(f"## Runs\n\n{table(headers, map(_each, comparisons))}\n\n")
    _print_intervals(comparisons)
    not_expressed = [(source, why, count) for (source, why), count in missing.most_common()]
    total = sum(missing.values())
    say(f"## {total} of {rows} are not expressed\n\n")
    say(table(("framework", "missing", "runs"), not_expressed) + "\n")


if __name__ == "__main__":
    main()
