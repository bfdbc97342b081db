"""Predictions for further published runs, made and committed before their figures were added.

    .venv/bin/python tests/benchmarks/further_runs.py WHEELS

Predicts the runs of further_runs/recipes.csv (``further_recipes.py``; WHEELS as in
``published_runs.py``) and writes further_runs/predicted.csv. A prediction that is there stays: only
those that are absent are made.
"""

import csv
import sys
from pathlib import Path

from further_recipes import further_run_of
from old_stacks.stacks import OldStack, traces_of
from published_recipes import NotExpressedError, Row, Run
from published_runs import compared_runs
from published_times import step_timeline
from scoreboard_further import FOLDER, rows_by_run

from trials.simulation.trace_cache import Traces

HEADERS = ("run", "gib", "out_of_memory", "step_seconds")


def _memory(predicted: dict[str, Row], wheels: Path) -> None:
    """Add the memory of runs without a prediction."""

    def run_of(row: Row) -> Run:
        if row["run"] in predicted:
            raise NotExpressedError("predicted already")
        return further_run_of(row)

    comparisons, *_ = compared_runs(FOLDER / "recipes.csv", wheels, run_of)
    for one in comparisons:
        figures = (f"{one.gib:.3f}", "yes" if one.runs_out else "", "")
        predicted[one.row["run"]] = dict(zip(HEADERS, (one.row["run"], *figures), strict=True))


def _times(predicted: dict[str, Row], wheels: Path) -> None:
    """Add the steps of runs without one, where lengths are stated or assumed."""
    by_stack: dict[OldStack | None, Traces] = {None: Traces(workers=1)}
    for name, row in rows_by_run("recipes.csv").items():
        run = further_run_of(row)
        is_stated = run.mean_tokens is not None or row["seq_len_for_time"]
        if is_stated and not predicted[name]["step_seconds"]:
            if run.stack is not None and run.stack not in by_stack:
                by_stack[run.stack] = traces_of(run.stack, wheels)
            seconds = step_timeline(row, run, by_stack[run.stack]).seconds()
            predicted[name]["step_seconds"] = f"{seconds:.4f}"


def main() -> None:
    """Write the predictions.

    Raises:
        TraceError: a run cannot be traced.
    """
    predicted = rows_by_run("predicted.csv")
    _memory(predicted, Path(sys.argv[1]))
    _times(predicted, Path(sys.argv[1]))
    rows = sorted((tuple(row[name] for name in HEADERS) for row in predicted.values()), key=str)
    with (FOLDER / "predicted.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows((HEADERS, *rows))


if __name__ == "__main__":
    main()
