"""Fine-tuning runs that are predicted first and then measured on a GPU.

    .venv/bin/python tests/benchmarks/gpu_runs.py predict H100-SXM > predicted.csv
    python3 tests/benchmarks/gpu_runs.py measure measured.jsonl [--seconds 240]

The runs are those of gpu_runs/runs.yaml. Predictions are committed before the measurements, and no
constant is fitted to them. ``measure`` needs a GPU, PyTorch and the project's libraries, but no Ray;
started again it continues where its file ends. The file holds observations as a run folder does.
"""

import argparse
import csv
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gpu_catalog.catalog import load_catalog
from gpu_catalog.gpu import Gpu
from orchestrator.running.gpu_check import device_of, time_is_left
from orchestrator.spec.trainer_defaults import with_trl_defaults
from trials.profile_trial import ProfileTask, run_profile
from trials.recipes.named_recipes import NAMED_RECIPES
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell
from trials.records.compatibility import with_defaults
from trials.records.model import Model, find_model
from trials.records.observation import Observation
from trials.records.profile import Logged, Profiled, ProfileRule, logged
from trials.records.timing_rule import TimingRule
from trials.search import LikelyLargest
from trials.simulation.recording import OperatorClass
from trials.simulation.simulated_cell import GIB, SimulatedCell
from trials.simulation.timing_model import EfficiencyConstants, step_time, timeline_of
from trials.simulation.trace_cache import Traces
from trials.trial import TrialTask, child_prober, run_trial

RUNS = Path(__file__).parent / "gpu_runs" / "runs.yaml"
TIMING = TimingRule(warmup_steps=1, warmup_seconds=0.3, max_steps=15, max_seconds=4.0)
PROFILE = ProfileRule(least_seconds=0.5, most_steps=6, warmup_steps=1, training_steps=1)
HEADER = (
    "run",
    "batch",
    "allocated_gib",
    "reserved_gib",
    "step_ms",
    "host_ms",
    "device_ms",
    "by_class_ms",
)


@dataclass(frozen=True, slots=True)
class Run:
    """A fine-tuning at some micro-batches."""

    cell: Cell
    model: Model
    batch_sizes: tuple[int, ...]


def runs_on(gpu: Gpu, path: Path = RUNS, *, simulated: bool = False) -> list[Run]:
    """Runs of the file on a GPU."""
    return [_run(row, gpu, simulated) for row in yaml.safe_load(path.read_text(encoding="utf-8"))]


def _run(row: dict[str, Any], gpu: Gpu, simulated: bool) -> Run:
    fields = dict(row["recipe"])
    model = find_model(row["model"])
    named = fields.pop("named", None)
    if named:
        recipe = Recipe.model_validate(NAMED_RECIPES[named].model_dump() | fields)
    else:
        recipe = Recipe.model_validate(with_trl_defaults(fields))
    cell = Cell(
        gpu=gpu.key,
        simulated=simulated,
        model=model.name,
        recipe=with_defaults(recipe, model, gpu),
        experts=model.experts,
        active_experts=model.active_experts,
        seq_len=row["seq_len"],
    )
    return Run(cell, model, tuple(row["batch_sizes"]))


def predictions(gpu: Gpu, path: Path) -> Iterator[tuple[object, ...]]:
    """Memory and time of every run and batch size, by the shipped constants."""
    traces, constants = Traces(), EfficiencyConstants()
    runs = runs_on(gpu, path, simulated=True)
    cells = [SimulatedCell(run.cell, run.model, traces) for run in runs]
    traces.prepare([request for cell in cells for request in cell.requests(alone=True)])
    for run, cell in zip(runs, cells, strict=True):
        for batch in run.batch_sizes:
            peaks = cell.without_limit(batch, gpu)
            operators = cell.operators(batch)
            timed, timeline = (
                step_time(operators, gpu, constants),
                timeline_of(operators, gpu, constants),
            )
            by_class = {
                OperatorClass(number).name.lower(): round(1e3 * seconds, 3)
                for number, seconds in enumerate(timed.busy_seconds)
                if seconds
            }
            times = (timed.seconds, timeline.host.sum(), timeline.device.sum())
            yield (
                run.cell.model_copy(update={"simulated": False}).key,
                batch,
                *(
                    f"{n / GIB:.3f}"
                    for n in (peaks.peak_allocated_bytes, peaks.peak_reserved_bytes)
                ),
                *(f"{1e3 * seconds:.2f}" for seconds in times),
                json.dumps(by_class),
            )


@dataclass(frozen=True, slots=True)
class _Log:
    """Observations of a file, to which further ones are appended."""

    path: Path
    records: list[Logged]

    def append(self, record: Logged) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(record.model_dump_json() + "\n")
        self.records.append(record)
        sys.stderr.write(
            f"{record.seconds:6.1f} s  {record.outcome}  {record.key}  {record.detail or ''}\n"
        )


def measure(gpu: Gpu, path: Path, output: Path, seconds: float) -> None:
    """Measure runs in their order until the time is over; each is timed and profiled."""
    lines = output.read_bytes().splitlines() if output.exists() else []
    log = _Log(output, [logged(line) for line in lines])
    keep_going = time_is_left(seconds, log.records)  # type: ignore[arg-type]
    for run in runs_on(gpu, path):
        done = [one for one in log.records if one.cell == run.cell]
        largest = max(run.batch_sizes)
        task = TrialTask(
            cell=run.cell,
            model=run.model,
            gpu=gpu,
            seed=0,
            batch_limit=largest,
            boundary_repeats=0,
            timing=TIMING,
            build_timeout_seconds=120.0,
            probe_timeout_seconds=60.0,
            threads=len(os.sched_getaffinity(0)),
            done=tuple(one for one in done if isinstance(one, Observation)),
            likely_largest=LikelyLargest(largest),
            timed=run.batch_sizes,
        )
        profiled = tuple(one for one in done if isinstance(one, Profiled))

        def is_left() -> bool:
            timed = {
                one.batch_size for one in log.records if one.cell == run.cell and one.is_timing
            }
            return keep_going() and timed != set(run.batch_sizes)

        with child_prober(task) as prober:
            run_trial(task, prober, log.append, keep_going=is_left)
            if keep_going() and not profiled:
                run_profile(
                    ProfileTask(trial=task, rule=PROFILE, batch_sizes=(largest,)),
                    prober,
                    log.append,
                )
        if not keep_going():
            return


def main() -> None:
    """Predict or measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    predict = verbs.add_parser("predict", help="predictions as CSV")
    predict.add_argument("gpu")
    measuring = verbs.add_parser("measure", help="append observations to a file")
    measuring.add_argument("output", type=Path)
    measuring.add_argument("--seconds", type=float, default=240.0)
    measuring.add_argument("--gpu", help="key in the catalog; by default this machine's GPU")
    for one in (predict, measuring):
        one.add_argument("--runs", type=Path, default=RUNS)
    options = parser.parse_args()
    catalog = load_catalog()
    if options.verb == "measure":
        gpu = device_of(options.gpu, catalog)
        measure(gpu, options.runs, options.output, options.seconds)
        return
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(HEADER)
    writer.writerows(predictions(catalog.gpu(options.gpu), options.runs))


if __name__ == "__main__":
    main()
