"""Trials run by Ray Tune.

Tune places each trial by the resources that its cell needs, and the trial reports each result as
its probe ends. Nothing of Tune's own is kept: its experiment folder is a temporary one. The
observations of the run say what is done, and a trial that died is placed again.
"""

import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from ray import tune
from ray.tune.execution import class_cache
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.search import Searcher

from orchestrator.planning.cluster_resources import ClusterResources
from orchestrator.ray_backend.cluster import ClusterError
from orchestrator.ray_backend.trial_relay import TrialRelay
from orchestrator.ray_backend.trial_worker import resources, run_on_node
from orchestrator.scheduling.scheduler import PLACEMENTS, Scheduler
from trials.listener import TrialListener

# Tune reads these when a tuner is made.
TUNE_VARIABLES = {
    # No result files and banners of its own.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "RAY_AIR_NEW_OUTPUT": "0",
    # Ctrl-C is for the driver to handle.
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    # The scheduler limits the trials that wait; Tune would hold back all but one.
    "TUNE_MAX_PENDING_TRIALS_PG": str(sys.maxsize),
    # A worker on a node that was cut off never confirms that it has stopped.
    "TUNE_FORCE_TRIAL_CLEANUP_S": "10",
    # An experiment is never restored here: its state, all trials as text, need not be written.
    "TUNE_GLOBAL_CHECKPOINT_S": str(sys.maxsize),
}


def run_trials(
    scheduler: Scheduler,
    listener: TrialListener,
    cluster_now: Callable[[], ClusterResources],
    loggers: Sequence[Any] = (),
    record_nodes: Callable[[ClusterResources], None] = lambda _: None,
) -> None:
    """Run trials until the scheduler has none left.

    Tune gives up all trials for one error of its own, for instance when Ray kills workers on a node
    that runs out of memory. The trials that ran are then recorded as died, and a new tuner begins.

    Args:
        scheduler: source of trials.
        listener: notified of every start, result and end, in the driver's main thread. A trial that
            started is always notified to have ended, and one that never started never is.
        cluster_now: current nodes of the cluster.
        loggers: further Tune callbacks.
        record_nodes: called with the current nodes about once a second.

    Raises:
        ClusterError: Ray stops again and again before it has started any trial.
        Exception: of the listener or of ``record_nodes``; trials that still run are stopped.
    """
    _configure_tune()
    relay = TrialRelay(scheduler, listener, cluster_now, record_nodes)
    in_vain = 0
    while not scheduler.is_over:
        error = _fit(relay, loggers)
        if relay.raised is not None:
            raise relay.raised
        if error is None and scheduler.is_over:
            return
        error = error or "Ray stopped it"
        ran = relay.all_ended(error)
        in_vain = 0 if ran or scheduler.is_over else in_vain + 1
        if in_vain == PLACEMENTS:
            raise ClusterError(
                f"Ray places no trial any more: {error}: check that the cluster is up, and run the "
                "same command again, which continues where this stopped"
            )


def _configure_tune() -> None:
    os.environ.update(TUNE_VARIABLES)
    # Tune hands AWS's keys to every worker, and Ray writes the workers' environment into its logs.
    class_cache.ENV_VARS_TO_PROPAGATE = frozenset()
    # Tune logs a traceback of each trial that died; the listener shows one line.
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)


def _fit(relay: TrialRelay, loggers: Sequence[Any]) -> str | None:
    """Run one tuner to its end; the error that stopped it, if one did."""
    with tempfile.TemporaryDirectory(prefix="sweep-") as scratch:
        tuner = tune.Tuner(
            tune.with_resources(run_on_node, resources),
            tune_config=tune.TuneConfig(
                search_alg=_TrialSource(relay),
                num_samples=-1,
                trial_dirname_creator=lambda trial: str(trial.trial_id),
                # A worker takes seconds to start, and keeps no state: each trial has its own child.
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                name="trials",
                storage_path=scratch,
                callbacks=[relay, *loggers, _SilentProgress(), _MemoryRelease()],
                failure_config=tune.FailureConfig(max_failures=0),
                stop=relay,
                verbose=0,
            ),
        )
        try:
            tuner.fit()
        except Exception as error:  # noqa: BLE001 - Tune wraps errors of callbacks in its own
            return first_line(error)
    return None


def first_line(error: Exception) -> str:
    """First line of an error's message, without Tune's own words."""
    text = str(error).strip().removeprefix("Caught unexpected exception: ")
    return text.splitlines()[0] if text else repr(error)


class _TrialSource(Searcher):  # type: ignore[misc]
    """Tune's source of trials: one after another, as the scheduler allows."""

    def __init__(self, relay: TrialRelay) -> None:
        super().__init__()
        self._relay = relay

    def suggest(self, _trial_id: str) -> Any:
        trial = self._relay.next_trial()
        if trial is None:
            return Searcher.FINISHED if self._relay.stop_all() else None
        return {"trial": trial}

    def on_trial_complete(self, *event: Any, **more: Any) -> None:
        """Do nothing: the relay passes it on."""

    def save(self, checkpoint_path: str) -> None:
        """Do nothing: an experiment is never restored here."""

    def restore(self, checkpoint_path: str) -> None:
        """Do nothing, as above."""


class _SilentProgress(TrialProgressCallback):  # type: ignore[misc]
    """Progress callback that prints nothing: Tune's own prints trials among the results."""

    def _print(self, msg: str) -> None:
        """Drop the message."""


class _MemoryRelease(tune.Callback):  # type: ignore[misc]
    """Frees the memory of ended trials, after all other callbacks.

    Tune keeps every trial until the last one ends: its task in six copies, its last report, and
    statistics of every number it reported. A new Tuner now and then would free them, but then all
    GPUs would wait for the slowest trial.
    """

    def on_trial_complete(self, *, trial: Any, **_info: Any) -> None:
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
