"""Fine-tuning runs that are predicted first and then measured on a GPU.

    .venv/bin/python tests/benchmarks/gpu_runs.py predict H100-SXM > predicted.csv
    python3 tests/benchmarks/gpu_runs.py measure measured.jsonl [--seconds 240]

The runs are those of gpu_runs/runs.yaml. Predictions are committed before the measurements, and no
constant is fitted to them. ``measure`` needs a GPU, PyTorch and the project's libraries, but no
Ray; started again it continues where its file ends. The file holds observations as a run folder
does. ``scoreboard.py`` compares the two.
"""

import argparse
import csv
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from gpu_catalog.catalog import load_catalog
from gpu_catalog.gpu import Gpu
from orchestrator.running.gpu_check import device_of, time_is_left
from orchestrator.spec.trainer_defaults import with_trl_defaults
from trials.profile_trial import ProfileTask, profiles
from trials.recipes.named_recipes import NAMED_RECIPES
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell
from trials.records.compatibility import with_defaults
from trials.records.model import Model, find_model
from trials.records.observation import Observation
from trials.records.profile import Logged, ProfileRule
from trials.records.timing_rule import TimingRule
from trials.run_trial import child_prober, run_trial
from trials.search import LikelyLargest
from trials.simulation.recording import OperatorClass
from trials.simulation.simulated_cell import GIB, SimulatedCell
from trials.simulation.timing_model import EfficiencyConstants, step_time, timeline_of
from trials.simulation.trace_cache import Traces
from trials.trial import TrialTask

FOLDER = Path(__file__).parent / "gpu_runs"
RUNS = FOLDER / "runs.yaml"
TIMING = TimingRule(warmup_steps=0, warmup_seconds=0.0, max_steps=15, max_seconds=4.0)
PROFILE = ProfileRule(least_seconds=0.5, most_steps=6, warmup_steps=1, training_steps=1)


@dataclass(frozen=True, slots=True)
class Run:
    """A fine-tuning at some micro-batches."""

    cell: Cell
    model: Model
    batch_sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prediction:
    """Memory and time of a run at one micro-batch.

    Attributes:
        run: key of the measured cell.
        batch: micro-batch.
        allocated_gib, reserved_gib: peaks of PyTorch's allocator.
        step_ms: milliseconds of an optimizer step.
        host_ms, device_ms: milliseconds for which the host and the GPU work.
        by_class_ms: milliseconds of the GPU by class of operator.
    """

    run: str
    batch: int
    allocated_gib: float
    reserved_gib: float
    step_ms: float
    host_ms: float
    device_ms: float
    by_class_ms: dict[str, float]

    @property
    def row(self) -> list[object]:
        """Cells of its row in a CSV."""
        return [*(getattr(self, f.name) for f in fields(self)[:-1]), json.dumps(self.by_class_ms)]


def runs_on(gpu: Gpu, path: Path = RUNS, *, simulated: bool = False) -> list[Run]:
    """Runs of a file on a GPU."""
    rows = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [_run(row, gpu, simulated=simulated) for row in rows]


def _run(row: dict[str, Any], gpu: Gpu, *, simulated: bool) -> Run:
    stated = dict(row["recipe"])
    model = find_model(row["model"])
    if "named" in stated:
        stated = NAMED_RECIPES[stated.pop("named")].model_dump() | stated
    cell = Cell(
        gpu=gpu.key,
        simulated=simulated,
        model=model.name,
        recipe=with_defaults(Recipe.model_validate(with_trl_defaults(stated)), model, gpu),
        experts=model.experts,
        active_experts=model.active_experts,
        seq_len=row["seq_len"],
    )
    return Run(cell, model, tuple(row["batch_sizes"]))


def predictions(gpu: Gpu, runs: list[Run]) -> Iterator[Prediction]:
    """Predictions for every run and micro-batch, by the shipped constants.

    Raises:
        TraceError: a run cannot be traced.
    """
    traces, constants = Traces(), EfficiencyConstants()
    cells = [SimulatedCell(run.cell, run.model, traces) for run in runs]
    traces.prepare([request for cell in cells for request in cell.requests(alone=True)])
    for run, cell in zip(runs, cells, strict=True):
        for batch in run.batch_sizes:
            peaks, operators = cell.without_limit(batch, gpu), cell.operators(batch)
            step, timeline = (f(operators, gpu, constants) for f in (step_time, timeline_of))
            busy = enumerate(step.busy_seconds)
            yield Prediction(
                run=run.cell.model_copy(update={"simulated": False}).key,
                batch=batch,
                allocated_gib=round(peaks.peak_allocated_bytes / GIB, 3),
                reserved_gib=round(peaks.peak_reserved_bytes / GIB, 3),
                step_ms=round(1e3 * step.seconds, 2),
                host_ms=round(1e3 * float(timeline.host.sum()), 2),
                device_ms=round(1e3 * float(timeline.device.sum()), 2),
                by_class_ms={
                    OperatorClass(n).name.lower(): round(1e3 * s, 3) for n, s in busy if s
                },
            )


class _Log:
    """Observations of a file, to which further ones are appended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.observations = observations_of(path) if path.exists() else []

    def append(self, record: Logged) -> None:
        """Append a record, and name it on stderr."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(record.model_dump_json() + "\n")
        if isinstance(record, Observation):
            self.observations.append(record)
        end = f"{record.outcome}  {record.key}  {record.detail or ''}"
        sys.stderr.write(f"{record.seconds:6.1f} s  {end}\n")

    def timed(self, cell: Cell) -> set[int]:
        """Micro-batches of a cell that are timed."""
        return {o.batch_size for o in self.observations if o.cell == cell and o.is_timing}


def observations_of(path: Path) -> list[Observation]:
    """Observations of a file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Observation.model_validate_json(line) for line in lines if '"kind"' not in line]


def measure(gpu: Gpu, runs: list[Run], output: Path, seconds: float, *, profile: bool) -> None:
    """Measure runs in their order until the time is over; with ``profile``, profile them too."""
    log = _Log(output)
    keep_going = time_is_left(seconds, log.observations)
    for run in runs:
        if log.timed(run.cell) == set(run.batch_sizes):
            continue
        if not keep_going():
            return
        _measure_run(gpu, run, log, keep_going, profile=profile)


def _measure_run(
    gpu: Gpu, run: Run, log: _Log, keep_going: Callable[[], bool], *, profile: bool
) -> None:
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
        done=tuple(o for o in log.observations if o.cell == run.cell),
        likely_largest=LikelyLargest(largest),
        timed=run.batch_sizes,
    )

    def is_left() -> bool:
        return keep_going() and log.timed(run.cell) != set(run.batch_sizes)

    with child_prober(task) as prober:
        run_trial(task, prober, log.append, keep_going=is_left)
        if profile and keep_going():
            for profiled in profiles(
                ProfileTask(trial=task, rule=PROFILE, batch_sizes=(largest,)), prober
            ):
                log.append(profiled)


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
    measuring.add_argument("--profile", action="store_true", help="profile each run, too")
    for one in (predict, measuring):
        one.add_argument("--runs", type=Path, default=RUNS)
    options = parser.parse_args()
    catalog = load_catalog()
    if options.verb == "measure":
        gpu = device_of(options.gpu, catalog)
        runs = runs_on(gpu, options.runs)
        measure(gpu, runs, options.output, options.seconds, profile=options.profile)
        return
    gpu = catalog.gpu(options.gpu)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([field.name for field in fields(Prediction)])
    writer.writerows(p.row for p in predictions(gpu, runs_on(gpu, options.runs, simulated=True)))


if __name__ == "__main__":
    main()
