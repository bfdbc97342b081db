"""The part of ``docs/accuracy.md`` on further published runs, from the files in further_runs.

``further_runs.py`` predicts them; nothing is simulated here.
"""

import csv
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.markdown_table import table

FOLDER = Path(__file__).with_name("further_runs")
Row = dict[str, str]
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True, slots=True)
class Scored:
    """A published run with the prediction that was committed before its figures.

    Attributes:
        recipe: row of recipes.csv.
        predicted: row of predicted.csv.
        measured: row of measured.csv.
    """

    recipe: Row
    predicted: Row
    measured: Row

    def error(self, figure: str) -> float | None:
        """Relative error of ``gib`` or ``step_seconds``; None where one of both is absent."""
        predicted, measured = self.predicted[figure], self.measured[figure]
        return float(predicted) / float(measured) - 1 if predicted and measured else None

    @property
    def is_out(self) -> tuple[bool, bool]:
        """Whether the run is out of memory: predicted, published."""
        return self.predicted["out_of_memory"] == "yes", not self.measured["gib"]


def scored_runs() -> list[Scored]:
    """All runs with figures, the worst predicted memory first and those out of memory last."""
    recipes, predicted, measured = (
        rows_by_run(f"{name}.csv") for name in ("recipes", "predicted", "measured")
    )
    runs = [Scored(recipes[run], predicted[run], measured[run]) for run in measured]
    return sorted(runs, key=lambda one: -abs(one.error("gib") or 0.0))


def rows_by_run(name: str) -> dict[str, Row]:
    """Rows of a file of the folder by the name of the run."""
    with (FOLDER / name).open(encoding="utf-8", newline="") as file:
        return {row["run"]: row for row in csv.DictReader(file)}


def further_summary(runs: Sequence[Scored]) -> Iterator[tuple[object, ...]]:
    """Median and largest error and bias of memory and step time, by framework and by stack."""
    errors = defaultdict(list)
    for one in runs:
        recipe = one.recipe
        method = "full" if recipe["method"] == "full" else recipe["quantisation"] and "4-bit LoRA"
        names = (
            f"{recipe['framework']}, {method or 'LoRA'}",
            "**the installed libraries**" if recipe["stack"] == "ours" else "**older libraries**",
            "**all**",
        )
        for figure, name in (("gib", "memory"), ("step_seconds", "step time")):
            error = one.error(figure)
            if error is not None:
                for of_name in names:
                    errors[name, of_name].append(error)
    for (figure, name), values in sorted(errors.items()):
        sizes = sorted(map(abs, values))
        cells = (statistics.median(sizes), sizes[-1])
        bias = f"{statistics.mean(values):+.1%}"
        yield figure, name, len(sizes), *(f"{one:.1%}" for one in cells), bias


def _run_row(one: Scored) -> tuple[object, ...]:
    recipe = one.recipe
    method = f"{recipe['method']} {recipe['lora_rank']}".strip()
    details = (method, recipe["quantisation"], recipe["precision"])
    predicted, published = (
        OUT_OF_MEMORY if is_out else f"{float(row['gib']):.2f}"
        for is_out, row in zip(one.is_out, (one.predicted, one.measured), strict=True)
    )
    error = one.error("gib")
    time = one.error("step_seconds")
    return (
        recipe["run"],
        ", ".join(filter(None, details)),
        f"{recipe['batch_size']} x {recipe['seq_len']}",
        recipe["gpu"],
        predicted,
        published,
        "" if error is None else f"{error:+.1%}",
        "" if time is None else f"{time:+.0%}",
    )


def further_tables(runs: Sequence[Scored]) -> tuple[str, str]:
    """Tables of the summary and of the runs."""
    summary = ("figure", "runs of", "runs", "median", "largest", "bias")
    columns = (
        *("run", "recipe", "batch", "GPU"),
        *("predicted GiB", "published GiB", "error", "step time"),
    )
    return table(summary, further_summary(runs)), table(columns, map(_run_row, runs))


def further_section() -> str:
    """The section as Markdown."""
    summary, runs = further_tables(scored_runs())
    text = (FOLDER / "page.md").read_text(encoding="utf-8")
    return text.format(summary=summary, runs=runs)
