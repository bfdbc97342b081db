"""What placing a trial costs: this project's driver beside a plain grid of Ray Tune's.

The trials' work is nothing. Two cores, a Ray of its own: run it alone.
"""

import contextlib
import io
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import ray
from made_runs import ONE_CELL, spec_of
from ray import tune

from orchestrator import runner
from orchestrator.cluster import cluster_now, connected_cluster
from orchestrator.placer import Placer
from orchestrator.plan import trial_task
from orchestrator.tables import table
from trials.observation import Observation
from trials.workload import Cell

SIZES = (100, 1000)
MOST_FRESH = 100  # a second each


class Nobody:
    """Hears of trials."""

    def started(self, cell: Cell) -> None:
        """A trial runs."""

    def observed(self, observation: Observation) -> None:
        """A probe ended."""

    def ended(self, cell: Cell, error: str | None) -> None:
        """A trial is over."""
        assert error is None, f"{cell.key}: {error}"


def nothing_on_node(config: dict[str, dict[str, str]]) -> None:
    """In the place of a trial: says where it is, as one does, and ends."""
    del config
    node_id = ray.get_runtime_context().get_node_id()
    tune.report({"node_id": node_id, "address": ray.util.get_node_ip_address()})


def ours(trials: int) -> None:
    """The driver's placer and runner."""
    lengths = ", ".join(str(length) for length in range(1, trials + 1))
    spec = spec_of(ONE_CELL.replace("[16]", f"[{lengths}]"))
    catalog = spec.merged_catalog()
    placer = Placer(
        spec.all_cells(),
        lambda cell: trial_task(spec, catalog, cell, []),
        {"cpu": {"CPU": 1.0}},
        cluster_now(),
        wait_seconds=60,
        nodes_out={},
        note=lambda fault: sys.exit(fault.reason),
    )
    runner.run_trials(placer, Nobody(), cluster_now)
    assert placer.is_over


def plain(trials: int, *, reuse_actors: bool) -> None:
    """A grid of Tune's, as its tutorial has it."""

    def nothing(config: dict[str, Any]) -> None:
        tune.report({"number": config["number"]})

    with tempfile.TemporaryDirectory() as scratch:
        tune.Tuner(
            tune.with_resources(nothing, {"CPU": 1}),
            param_space={"number": tune.grid_search(list(range(trials)))},
            tune_config=tune.TuneConfig(reuse_actors=reuse_actors),
            run_config=tune.RunConfig(storage_path=scratch, verbose=0),
        ).fit()


def main() -> None:
    """Prints the table."""
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
    runner._trial_on_node = nothing_on_node
    ways: dict[str, Callable[[int], None]] = {
        "this project's driver": ours,
        "Tune's grid, reused actors": lambda n: plain(n, reuse_actors=True),
        "Tune's grid, fresh actors": lambda n: plain(n, reuse_actors=False),
    }
    rows = []
    with connected_cluster(ask_for_packages=False):
        ours(4)  # Ray's first workers take seconds
        for trials in SIZES:
            for name, way in ways.items():
                if trials > MOST_FRESH and "fresh" in name:
                    continue
                began = time.perf_counter()
                with contextlib.redirect_stdout(io.StringIO()):
                    way(trials)
                each = (time.perf_counter() - began) / trials
                most_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                rows.append((name, trials, f"{each:.3f}", f"{most_kib / 2**10:.0f}"))
    headers = ("what", "trials", "s a trial", "MiB of the driver by then")
    sys.stdout.write(table(headers, rows) + "\n")


if __name__ == "__main__":
    main()
