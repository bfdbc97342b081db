"""Cost of placing a trial: this project's driver, compared with a plain grid of Ray Tune.

The trials do no work; ours report one probe each, which is stored as usual. Each row has a process
and a Ray of its own on all cores: run nothing else meanwhile. Fresh actors take a second per trial,
so there are only a hundred of them.
"""

import contextlib
import gc
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import ray
from builders.observations import environment, observation
from builders.runs import ONE_CELL, spec_of
from ray import tune

from orchestrator.markdown_table import table
from orchestrator.planning.node_pricing import NodePrices
from orchestrator.planning.plan import trial_task
from orchestrator.planning.spending import Meter
from orchestrator.ray_backend import tune_runner
from orchestrator.ray_backend.cluster import cluster_now, connected_cluster
from orchestrator.ray_backend.own_ray import own_ray
from orchestrator.ray_backend.trial_worker import Reports, TrialOnNode
from orchestrator.ray_backend.tune_loggers import metrics
from orchestrator.ray_backend.tune_runner import run_trials
from orchestrator.run_folder.observation_writer import ObservationWriter
from orchestrator.run_folder.run_folder import open_run
from orchestrator.running.progress import Progress
from orchestrator.running.recorder import ObservationRecorder
from orchestrator.scheduling.node_queue import Task
from orchestrator.scheduling.scheduler import Scheduler


class NothingOnNode(TrialOnNode):
    """Stand-in for a trial's work: one probe, which is reported as a trial does."""

    def reports(self, task: Task) -> Reports:
        """One report."""
        node_id = ray.get_runtime_context().get_node_id()
        probe = observation(1, cell=task.cell, environment=environment(node_id=node_id))
        yield {"observation": probe.model_dump_json()} | metrics(probe), True


class Scales(tune.Callback):
    """Callback that records the bytes that Python holds in the driver, every few trials."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.ended = 0
        self.bytes_held: list[int] = []

    def on_trial_complete(self, **info: Any) -> None:
        """Count a trial, and record the bytes if it is time."""
        del info
        self.ended += 1
        if self.ended % self.every == 0:
            gc.collect()
            self.bytes_held.append(tracemalloc.get_traced_memory()[0])


def ours(trials: int, loggers: Sequence[Any] = ()) -> None:
    """Run the driver's scheduler and runner, with log, progress and spent dollars."""
    lengths = ", ".join(str(length) for length in range(1, trials + 1))
    text = ONE_CELL.replace("[16]", f"[{lengths}]")
    spec = spec_of(text)
    catalog, cells = spec.merged_catalog(), spec.all_cells()
    with tempfile.TemporaryDirectory() as scratch:
        run = open_run(Path(scratch) / "run", text, spec)
        with (
            Path(scratch, "progress.txt").open("w", encoding="utf-8") as lines,
            ObservationWriter(run) as writer,
            Progress(cells, complete=0, stream=lines) as progress,
        ):
            meter = Meter(spec, NodePrices(catalog))
            scheduler = Scheduler(
                cells,
                lambda cell: trial_task(spec, catalog, cell, []),
                {"cpu": {"CPU": 1.0}},
                cluster_now(),
                wait_seconds=60,
                nodes_out={},
                note=lambda fault: sys.exit(fault.reason),
                is_spent=partial(meter.reaches, 1.0),
            )
            run_trials(
                scheduler, ObservationRecorder(writer, progress, meter), cluster_now, loggers
            )
        assert scheduler.is_over
        assert len(run.observations()) == trials


def plain(trials: int, *, reuse_actors: bool) -> None:
    """Run a grid search of Ray Tune, as its tutorial does."""

    def nothing(config: dict[str, Any]) -> None:
        tune.report({"number": config["number"]})

    with tempfile.TemporaryDirectory() as scratch:
        tune.Tuner(
            tune.with_resources(nothing, {"CPU": 1}),
            param_space={"number": tune.grid_search(list(range(trials)))},
            tune_config=tune.TuneConfig(reuse_actors=reuse_actors),
            run_config=tune.RunConfig(storage_path=scratch, verbose=0),
        ).fit()


WAYS: dict[str, Callable[[int], None]] = {
    "this project's driver": ours,
    "Tune's grid, reused actors": lambda n: plain(n, reuse_actors=True),
    "Tune's grid, fresh actors": lambda n: plain(n, reuse_actors=False),
}
RUNS = [
    (name, trials)
    for trials, names in ((100, [*WAYS]), (1000, [*WAYS][:2]), (2000, [*WAYS][:1]))
    for name in names
]


def prepare() -> None:
    """Replace the work of trials by nothing, and have Tune write nothing about them."""
    # Workers import modules of the tests.
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent.parent), *folders])
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
    tune_runner.TrialOnNode = NothingOnNode


def bytes_kept(trials: int) -> None:
    """Print the bytes that each later trial leaves behind, in a process and a Ray of its own."""
    prepare()
    scales = Scales(trials // 2)
    with a_ray(), contextlib.redirect_stdout(io.StringIO()):
        tracemalloc.start()
        ours(trials, [scales])
    first, last = scales.bytes_held
    sys.stdout.write(f"{(last - first) // (trials // 2)}\n")


@contextlib.contextmanager
def a_ray() -> Iterator[None]:
    """A Ray of this process."""
    with own_ray() as folder, connected_cluster(ask_for_packages=False, folder=folder):
        yield


def one_run(name: str, trials: int) -> None:
    """Print seconds per trial, and MiB before and after, in a process and a Ray of its own."""
    prepare()
    with a_ray():
        with contextlib.redirect_stdout(io.StringIO()):
            ours(4)  # Ray's first workers take seconds
            before = most_mib()
            began = time.perf_counter()
            WAYS[name](trials)
            seconds_each = (time.perf_counter() - began) / trials
        sys.stdout.write(json.dumps([seconds_each, before, most_mib()]))


def most_mib() -> float:
    """Peak memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main() -> None:
    """Print the table."""
    rows = []
    for name, trials in RUNS:
        done = subprocess.run(
            [sys.executable, __file__, name, str(trials)], stdout=subprocess.PIPE, check=True
        )
        seconds_each, before, after = json.loads(done.stdout)
        rows.append((name, trials, f"{seconds_each:.3f}", f"{before:.0f}", f"{after:.0f}"))
    headers = ("what", "trials", "s a trial", "MiB of the driver before", "and the most")
    sys.stdout.write(table(headers, rows) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "kept":
        bytes_kept(int(sys.argv[2]))
    elif len(sys.argv) > 1:
        one_run(sys.argv[1], int(sys.argv[2]))
    else:
        main()
