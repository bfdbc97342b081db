"""Everything that this project uses of Ray beyond its public API, with the reason for each.

Each names the issue or pull request of github.com/ray-project/ray that it waits for, where one was
found. ``tests/test_ray_backend_ray_internals.py`` shows that each is still needed: when a newer Ray
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
from ray._private.state import available_resources_per_node, state, total_resources_per_node
from ray.tune import registry
from ray.tune.execution import class_cache

from orchestrator.planning.cluster_resources import FailedLaunch

# Settings of Tune that are environment variables alone, though documented. It reads them when a
# tuner is made. Where none is named, no issue in Ray's tracker was found.
TUNE_VARIABLES = {
    # No result files of its own.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    # No banners, which its new output prints however quiet it is to be: issue 36949.
    "RAY_AIR_NEW_OUTPUT": "0",
    # Ctrl-C is for the driver to handle: issue 50358.
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    # A worker on a node that was cut off never confirms that it has stopped.
    "TUNE_FORCE_TRIAL_CLEANUP_S": "10",
    # An experiment is never restored here: its state, all trials as text, need not be written.
    "TUNE_GLOBAL_CHECKPOINT_S": str(sys.maxsize),
}
MONITOR_LOG = "monitor.log"  # of the autoscaler
MONITOR_BYTES = 2**16  # of its end: it tries again every few seconds
LAUNCH_FAILED = re.compile(r"Failed to launch \d+ nodes of type (\S+): (.+)")


def draining_nodes() -> frozenset[str]:
    """Ids of the nodes that Ray drains, as they are to be taken away.

    ``ray.nodes()`` does not say it. Ray Train asks here, too. No issue in Ray's tracker was found
    that asks for a public call; pull request 42982, which changed this one, takes its callers for
    internal.
    """
    return frozenset(state.get_draining_nodes())


def resources_by_node() -> tuple[Mapping[str, Mapping[str, float]], ...]:
    """Resources of each node, by its id: all that it has, and those that are free.

    ``ray.available_resources()`` adds up the whole cluster. ``ray.util.state`` has no free
    resources, and needs the dashboard, which a Ray of a sweep's own does not start. Ray annotates
    both functions for developers of libraries, and keeps them in a private module: issue 60134.
    """
    return total_resources_per_node(), available_resources_per_node()


def failed_launches(logs: Path) -> tuple[FailedLaunch, ...]:
    """Nodes that the autoscaler could not start, the last one last; none away from the head.

    Its status has that a launch failed and not why; the provider's error is in its log alone. Issue
    28483, which pull request 33319 closed, was for the autoscaler before version 2; none was found
    for version 2.

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


def configure_tune() -> None:
    """Set what Tune has no argument for."""
    os.environ.update(TUNE_VARIABLES)
    # Tune hands AWS's keys to every worker, and Ray writes the workers' environment into its logs:
    # issue 28276. On Tune's part, no issue in Ray's tracker was found.
    class_cache.ENV_VARS_TO_PROPAGATE = frozenset()
    if type(getattr(registry, "_global_registry", None)) is getattr(registry, "_Registry", None):
        registry._global_registry = KnownTrainables()  # noqa: SLF001 - see that class


class KnownTrainables(getattr(registry, "_Registry", object)):  # type: ignore[misc]
    """Registry that knows what this process has registered; of no use to a Tune without its base.

    Tune's own asks Ray's GCS for the trainable three times a trial, each a wait for another
    process, and unpickles it twice. No issue in Ray's tracker was found.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[tuple[str, str], Any] = {}

    def register(self, category: str, key: str, value: Any) -> None:
        """Register for workers, and keep for this process."""
        super().register(category, key, value)
        self._known[category, key] = value

    def contains(self, category: str, key: str) -> bool:
        """Whether a value is registered."""
        return (category, key) in self._known or bool(super().contains(category, key))

    def get(self, category: str, key: str) -> Any:
        """The registered value."""
        value = self._known.get((category, key))
        return super().get(category, key) if value is None else value


class MemoryRelease(tune.Callback):  # type: ignore[misc]
    """Frees the memory of ended trials, after all other callbacks.

    Tune keeps every trial until the last one ends: its task in six copies, its last report, and
    statistics of every number it reported: issue 64231. A new Tuner now and then would free them,
    but then all GPUs would wait for the slowest trial.
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

    Tune has no call that ends a single trial from outside. No issue in Ray's tracker was found.
    """
    return trial.temporary_state.ray_actor


def write_to_tensorboard(callback: Any, trial: Any, folder: Path) -> None:
    """Let Tune's callback of TensorBoard write a trial into a folder.

    It has no argument for the folder: its own is in Tune's folder of the trial, which is temporary
    here. No issue in Ray's tracker was found.
    """
    callback._trial_writer[trial] = callback._summary_writer_cls(str(folder))  # noqa: SLF001 - see above
    callback._trial_result[trial] = {}  # noqa: SLF001 - see above


def write_to_mlflow(callback: Any, trial: Any, run_id: str) -> None:
    """Let Tune's callback of MLflow write a trial into a run that was started.

    It has no argument for a run's name (issue 23228) and parameters: its own are a text of Tune's,
    and the whole configuration of the trial, a task that is too long for a parameter.
    """
    callback._trial_runs[trial] = run_id  # noqa: SLF001 - see above
