"""Predictions of memory and time, compared with runs that this project measured on GPUs.

    .venv/bin/python tests/benchmarks/scoreboard.py [--page docs/accuracy.md]

Reads gpu_runs/measured-*.jsonl and the predictions that were committed before (predicted-*.csv),
predicts the same runs again by today's code, and prints or writes the page. What other tools
predict for them is read from other_tools/errors.json (``other_tools.py``), and what is predicted
for further published runs from further_runs (``further_runs.py``).
"""

import argparse
import csv
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_runs import FOLDER, Prediction, observations_of, predictions, runs_on
from scoreboard_further import further_section
from scoreboard_tools import section

from gpu_catalog.catalog import load_catalog
from orchestrator.markdown_table import table
from trials.records.model import presets
from trials.records.observation import Observation
from trials.simulation.simulated_cell import GIB


@dataclass(frozen=True, slots=True)
class Compared:
    """A measured run with two predictions.

    Attributes:
        first: prediction that was committed before the run was measured.
        now: prediction by today's code.
    """

    measured: Observation
    first: Prediction
    now: Prediction

    @property
    def step_ms(self) -> float:
        """Median of the measured steps in milliseconds."""
        assert self.measured.measurement is not None
        return 1e3 * statistics.median(self.measured.measurement.step_seconds)

    @property
    def gib(self) -> tuple[float, float]:
        """Measured peaks in GiB, allocated and reserved."""
        memory = self.measured.memory
        assert memory is not None
        assert memory.peak_reserved_bytes is not None
        return memory.peak_allocated_bytes / GIB, memory.peak_reserved_bytes / GIB

    @property
    def is_of_host(self) -> bool:
        """Whether the GPU's predicted work takes less than 80 % of the measured step."""
        return self.first.device_ms < 0.8 * self.step_ms


def errors(one: Compared, prediction: Prediction) -> tuple[float, float, float]:
    """Relative errors of a prediction: allocated, reserved, step."""
    allocated, reserved = one.gib
    return (
        prediction.allocated_gib / allocated - 1,
        prediction.reserved_gib / reserved - 1,
        prediction.step_ms / one.step_ms - 1,
    )


def measured_gpu_keys() -> list[str]:
    """Keys of the GPUs that runs were measured on."""
    return sorted(p.stem.removeprefix("measured-") for p in FOLDER.glob("measured-*.jsonl"))


def timed_runs(gpu_key: str) -> dict[tuple[str, int], Observation]:
    """Measured runs on a GPU, by the key of their cell and their micro-batch."""
    observations = observations_of(FOLDER / f"measured-{gpu_key}.jsonl")
    return {(o.cell.key, o.batch_size): o for o in reversed(observations) if o.is_timing}


def compared(gpu_key: str) -> list[Compared]:
    """Measured runs on a GPU, the worst predicted first."""
    gpu = load_catalog().gpu(gpu_key)
    path = FOLDER / f"predicted-{gpu_key}.csv"
    with path.open(encoding="utf-8", newline="") as file:
        first = {(row["run"], int(row["batch"])): _first(row) for row in csv.DictReader(file)}
    timed = timed_runs(gpu_key)
    cells = {key for key, _ in timed}
    runs = [r for r in runs_on(gpu, simulated=True) if _measured_key(r.cell.key) in cells]
    now = {(p.run, p.batch): p for p in predictions(gpu, runs)}
    rows = [Compared(timed[key], first[key], now[key]) for key in timed]
    return sorted(rows, key=lambda one: -max(map(abs, errors(one, one.first))))


def _measured_key(key: str) -> str:
    return key.replace("(simulated)", "")


def _first(row: dict[str, str]) -> Prediction:
    numbers = ("allocated_gib", "reserved_gib", "step_ms", "host_ms", "device_ms")
    return Prediction(
        run=row["run"],
        batch=int(row["batch"]),
        by_class_ms={},
        **{name: float(row[name]) for name in numbers},
    )


def _name(one: Compared) -> tuple[object, ...]:
    """Cells that name a run: model, recipe and batch."""
    cell = one.measured.cell
    recipe = cell.recipe
    what = [recipe.method, recipe.task if recipe.task != "sft" else "", recipe.precision]
    what.append("checkpointed" if recipe.gradient_checkpointing else "")
    batch = f"{one.measured.batch_size} x {cell.seq_len}"
    return cell.model, ", ".join(filter(None, what)), batch


def _row(one: Compared) -> tuple[object, ...]:
    first, now = errors(one, one.first), errors(one, one.now)
    allocated, reserved = one.gib
    return (
        *_name(one),
        f"{allocated:.2f}",
        f"{first[0]:+.2%}",
        f"{now[0]:+.2%}",
        f"{reserved:.2f}",
        f"{first[1]:+.1%}",
        f"{now[1]:+.1%}",
        f"{one.step_ms:.0f}",
        f"{first[2]:+.1%}",
        f"{now[2]:+.1%}",
        "host" if one.is_of_host else "GPU",
    )


def summary(rows: Sequence[Compared]) -> list[tuple[object, ...]]:
    """Median and largest absolute errors, of first and of today's predictions."""
    of_gpu = [one for one in rows if not one.is_of_host]
    of_host = [one for one in rows if one.is_of_host]
    parts = (
        ("allocated memory", rows, 0),
        ("reserved memory", rows, 1),
        ("step time where the GPU is the limit", of_gpu, 2),
        ("step time where the host is", of_host, 2),
    )
    lines = []
    for name, chosen, place in parts:
        cells: list[object] = [name, len(chosen)]
        for which in ("first", "now"):
            sizes = [abs(errors(one, getattr(one, which))[place]) for one in chosen]
            cells += [f"{statistics.median(sizes):.1%}", f"{max(sizes):.1%}"]
        lines.append(tuple(cells))
    return lines


def beside_tools(rows: Sequence[Compared]) -> str:
    """Section of the runs beside other tools, the worst of our reserved memory first."""
    named = [
        (
            one.measured.cell.key,
            one.measured.batch_size,
            _name(one),
            one.gib[1],
            errors(one, one.now)[1],
        )
        for one in rows
    ]
    return section(sorted(named, key=lambda run: -abs(run[-1])))


def page(gpu_key: str, rows: Sequence[Compared]) -> str:
    """Comparison with one GPU as Markdown."""
    environment = rows[0].measured.environment
    assert environment is not None
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions)
    headers = ("", "runs", "first, median", "largest", "now, median", "largest")
    columns = ("model", "recipe", "batch", "allocated GiB", "first", "now", "reserved GiB")
    columns += ("first", "now", "step ms", "first", "now", "limit")
    return (
        (FOLDER / "gpu.md")
        .read_text(encoding="utf-8")
        .format(
            gpu=gpu_key,
            device=environment.device_name,
            day=rows[0].measured.started_at[:10],
            versions=versions,
            summary=table(headers, summary(rows)),
            runs=table(columns, map(_row, rows)),
        )
    )


def never_run() -> str:
    """Paragraph on the presets that no GPU of this project has run."""
    measured = {
        observation.cell.model
        for key in measured_gpu_keys()
        for observation in observations_of(FOLDER / f"measured-{key}.jsonl")
    }
    names = [name for name in presets() if name not in measured and not name.endswith("-tiny")]
    return f"No GPU of this project has run {', '.join(names)}.\n"


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    introduction, notes = (
        (FOLDER / f"{name}.md").read_text(encoding="utf-8") for name in ("introduction", "notes")
    )
    by_gpu = {key: compared(key) for key in measured_gpu_keys()}
    pages = [page(key, rows) for key, rows in by_gpu.items()]
    tools = beside_tools([one for rows in by_gpu.values() for one in rows])
    text = "\n".join((introduction, *pages, notes, tools, further_section(), never_run()))
    if options.page is None:
        sys.stdout.write(text)
    else:
        options.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
