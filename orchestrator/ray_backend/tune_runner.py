"""Trials run by Ray Tune.

Tune places each trial by the resources that its cell needs, and the trial reports each result as
its probe ends. Nothing of Tune's own is kept: its experiment is in memory. The
observations of the run say what is done, and a trial that died is placed again.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem
from pyarrow.fs import FSSpecHandler, PyFileSystem
from ray import tune
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.search import Searcher

from orchestrator.planning.cluster_resources import ClusterResources
from orchestrator.ray_backend.errors import ClusterError, LeaveTuneError, RayEndedError
from orchestrator.ray_backend.ray_internals import MemoryRelease, configure_tune
from orchestrator.ray_backend.trial_relay import CONNECTION_WORDS, TrialRelay, in_words
from orchestrator.ray_backend.trial_worker import TrialOnNode
from orchestrator.scheduling.scheduler import PLACEMENTS, Scheduler
from trials.listener import TrialListener


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
        RayEndedError: the driver's own Ray has ended; the trials that ran are recorded as died.
        Exception: of the listener or of ``record_nodes``; trials that still run are stopped.
    """
    configure_tune()
    # Tune logs a traceback of each trial that died; the listener shows one line.
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    relay = TrialRelay(scheduler, listener, cluster_now, record_nodes)
    in_vain = 0
    while not scheduler.is_over:
        error = _fit(relay, loggers)
        if relay.raised is None:
            relay.check_ray()
        if isinstance(relay.raised, RayEndedError):
            relay.all_ended(str(relay.raised))
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


def _fit(relay: TrialRelay, loggers: Sequence[Any]) -> str | None:
    """Run one tuner to its end; the error that stopped it, if one did."""
    tuner = tune.Tuner(
        TrialOnNode,
        tune_config=tune.TuneConfig(
            search_alg=_TrialSource(relay),
            num_samples=-1,
            # The scheduler limits the trials that wait: Tune itself would hold back all but one.
            max_concurrent_trials=sys.maxsize,
            trial_dirname_creator=lambda trial: str(trial.trial_id),
            # A worker takes seconds to start, and keeps no state: each trial has its own child.
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            name="trials",
            # In the driver's memory: nothing of it is read, and a killed driver leaves no folder.
            storage_path="sweep",
            storage_filesystem=PyFileSystem(FSSpecHandler(MemoryFileSystem())),
            callbacks=[relay, *loggers, _SilentProgress(), MemoryRelease()],
            # Tune would retry the same task anywhere: the scheduler continues it elsewhere.
            failure_config=tune.FailureConfig(max_failures=0),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            stop=relay,
            verbose=0,
        ),
    )
    try:
        tuner.fit()
    except LeaveTuneError:
        return None  # the relay has the error
    except Exception as error:  # noqa: BLE001 - Tune wraps errors of callbacks in its own
        line = first_line(error)
        return in_words(line, CONNECTION_WORDS) or line
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
    """Progress callback that prints nothing: Tune adds one that prints trials among the results."""

    def on_trial_result(self, *event: Any, **more: Any) -> None:
        """Do nothing: the listener shows it."""

    on_trial_complete = on_trial_error = on_trial_result
