"""Everything that this project uses of Ray beyond its public API, with the reason for each.

``tests/test_ray_backend_ray_internals.py`` shows that each is still needed: when a newer Ray
offers it publicly, its test fails, and the touch can go. `make test-ray-latest` runs these tests
with the newest Ray.
"""

import contextlib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import tune
from ray._private import worker
from ray._private.state import state
from ray.tune.execution import class_cache

from orchestrator.planning.cluster_resources import FailedLaunch

# Settings of Tune that are environment variables alone. It reads them when a tuner is made.
TUNE_VARIABLES = {
    # No result files and banners of its own.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "RAY_AIR_NEW_OUTPUT": "0",
    # Ctrl-C is for the driver to handle.
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    # A worker on a node that was cut off never confirms that it has stopped.
    "TUNE_FORCE_TRIAL_CLEANUP_S": "10",
    # An experiment is never restored here: its state, all trials as text, need not be written.
    "TUNE_GLOBAL_CHECKPOINT_S": str(sys.maxsize),
}
MONITOR_LOG = "monitor.log"  # of the autoscaler
MONITOR_BYTES = 2**16  # of its end: it tries again every few seconds
LAUNCH_FAILED = re.compile(r"Failed to launch \d+ nodes of type (\S+): (.+)")
VITAL = ("gcs_server", "raylet")  # of the processes of a Ray; others come back or are not missed


def draining_nodes() -> frozenset[str]:
    """Ids of the nodes that Ray drains, as they are to be taken away.

    ``ray.nodes()`` does not say it. Ray Train asks here, too.
    """
    return frozenset(state.get_draining_nodes())


def resources_by_node() -> tuple[Mapping[str, Mapping[str, float]], ...]:
    """Resources of each node, by its id: all that it has, and those that are free.

    ``ray.available_resources()`` adds up the whole cluster. ``ray.util.state`` has no free
    resources, and needs the dashboard, which a Ray of a sweep's own does not start.
    """
    return state.total_resources_per_node(), state.available_resources_per_node()


def failed_launches(logs: Path) -> tuple[FailedLaunch, ...]:
    """Nodes that the autoscaler could not start, the last one last; none away from the head.

    Its status has that a launch failed and not why; the provider's error is in its log alone. Ray
    shows it in the status of version 1 of its autoscaler since pull request 33319 (issue 28483);
    for version 2, no issue in Ray's tracker was found.

    Args:
        logs: Ray's folder of logs on this machine.
    """
    try:
        with (logs / MONITOR_LOG).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - MONITOR_BYTES))
            text = log.read().decode(errors="replace")
    except OSError:
        return ()
    return tuple(FailedLaunch(*match) for match in LAUNCH_FAILED.findall(text))


def ended_processes() -> tuple[str, ...]:
    """Names of the processes of the driver's own Ray that it needs and that ended by themselves.

    A driver is not notified: trials wait for ever for the node, and a minute after the death of its
    GCS Ray aborts the driver.
    """
    node = worker._global_node  # noqa: SLF001 - no public API has it
    ended = () if node is None else node.dead_processes()
    return tuple(name for name, _ in ended if name in VITAL)


def configure_tune() -> None:
    """Set what Tune has no argument for."""
    os.environ.update(TUNE_VARIABLES)
    # Tune hands AWS's keys to every worker, and Ray writes the workers' environment into its logs.
    class_cache.ENV_VARS_TO_PROPAGATE = frozenset()


class MemoryRelease(tune.Callback):  # type: ignore[misc]
    """Frees the memory of ended trials, after all other callbacks.

    Tune keeps every trial until the last one ends: its task in six copies, its last report, and
    statistics of every number it reported. A new Tuner now and then would free them, but then all
    GPUs would wait for the slowest trial.
    """

    def on_trial_complete(self, *, trial: Any, **_info: Any) -> None:
        """Free what Tune keeps of a trial."""
        # A later Ray may rename these attributes: memory is then not freed, and nothing else.
        with contextlib.suppress(AttributeError):
            trial.config["trial"] = {"cell": trial.config["trial"]["cell"]}
            trial.evaluated_params.clear()
            trial.set_experiment_tag("")
            trial.metric_analysis.clear()
            trial.metric_n_steps.clear()
            # Tune would ask the worker if this were empty.
            trial.run_metadata.last_result = {"done": True}
            trial._default_result_or_future = None  # noqa: SLF001 - else Ray's store keeps it, unread

    on_trial_error = on_trial_complete


def worker_of(trial: Any) -> Any:
    """Ray actor that runs a trial of Tune; None while none does.

    Tune has no call that ends a single trial from outside.
    """
    return trial.temporary_state.ray_actor
