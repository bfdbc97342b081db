"""Predictions for further published runs, made and committed before their figures were added.

    .venv/bin/python tests/benchmarks/further_runs.py WHEELS

Predicts the runs of further_runs/recipes.csv (``further_recipes.py``; WHEELS as in
``published_runs.py``) and writes further_runs/predicted.csv.
"""

import csv
import sys
from collections.abc import Iterator
from pathlib import Path

from further_recipes import further_run_of
from old_stacks.stacks import traces_of
from published_runs import CATALOG, Comparison, compared_runs, simulated_run

from trials.simulation.timing_model import EfficiencyConstants, timeline_of
from trials.simulation.trace_cache import Traces

FOLDER = Path(__file__).with_name("further_runs")
HEADERS = ("run", "gib", "out_of_memory", "step_seconds")


def _step_seconds(one: Comparison, wheels: Path) -> float | None:
    """Predicted step where all have one length; None where the source states none."""
    if not one.row["seq_len_for_time"]:
        return None
    stack = one.run.stack
    traces = Traces(workers=1) if stack is None else traces_of(stack, wheels)
    operators = simulated_run(one.row, one.run, traces).operators(int(one.row["batch_size"]))
    gpu = CATALOG.gpu(one.row["gpu"])
    return float(timeline_of(operators, gpu, EfficiencyConstants()).seconds())


def predictions(wheels: Path) -> Iterator[tuple[object, ...]]:
    """Rows of the file of predictions: memory in GiB, outcome, and seconds of a step.

    Raises:
        TraceError: a run cannot be traced.
    """
    comparisons, *_ = compared_runs(FOLDER / "recipes.csv", wheels, further_run_of)
    for one in comparisons:
        seconds = _step_seconds(one, wheels)
        step = "" if seconds is None else f"{seconds:.4f}"
        yield one.row["run"], f"{one.gib:.3f}", "yes" if one.runs_out else "", step


def main() -> None:
    """Write the predictions.

    Raises:
        TraceError: a run cannot be traced.
    """
    rows = sorted(predictions(Path(sys.argv[1])), key=str)
    with (FOLDER / "predicted.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows((HEADERS, *rows))


if __name__ == "__main__":
    main()
