"""The plan through Ray Tune: the one place that knows Tune.

A trial is placed by the resources its cell asks for and reports each observation as its probe ends.
Nothing of Tune's own is kept: what is done is told by the observations, so its experiment folder is
a temporary one and a trial that died is simply planned again.
"""

import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from orchestrator.listener import Listener
from orchestrator.plan import ClusterResources
from orchestrator.tune_loggers import metrics
from trials.child import ChildProber
from trials.profile import Logged, logged
from trials.profile_trial import PROFILE_TIMEOUTS, ProfileTask, run_profile
from trials.trial import TrialTask, run_trial
from trials.workload import Cell

Task = TrialTask | ProfileTask
KINDS: dict[str, type[Task]] = {kind.__name__: kind for kind in (TrialTask, ProfileTask)}


def run_trials(
    tasks: Sequence[Task],
    cluster: ClusterResources,
    listener: Listener,
    is_over: Callable[[], bool] = lambda: False,
    loggers: Sequence[Any] = (),
) -> None:
    """Runs trials until each has ended. The cluster must be able to hold every one of them.

    Args:
        tasks: the trials, in the order to place them.
        cluster: what there is.
        listener: hears of every start, observation and end, in the driver's main thread. A trial
            that began and did not end is told to have died; one that never began is not told of.
        is_over: is asked after each observation; once it says yes no other is made.
        loggers: Ray Tune's own callbacks, told of all that the listener is told of.

    Raises:
        Exception: whatever the listener raised; trials that still run are stopped.
    """
    # Tune writes result files and banners of its own unless told not to.
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
    # Ctrl-C is the driver's to handle.
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
    # Tune holds trials back beyond 200: those of a free GPU would wait behind those of a busy one.
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(len(tasks) + 1)
    from ray import tune  # noqa: PLC0415 - seconds to import, and only a sweep needs it

    # It logs a trial that died with its traceback; the listener hears of it in a line.
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    resources = {task.cell.key: cluster.trial_resources(task.gpu) for task in tasks}
    relay = _Relay(listener, {task.cell.key: task.cell for task in tasks})
    with tempfile.TemporaryDirectory(prefix="sweep-") as scratch:
        tuner = tune.Tuner(
            tune.with_resources(
                _trial_on_node,
                lambda config: tune.PlacementGroupFactory([resources[config["trial"]["cell"]]]),
            ),
            param_space={
                "trial": tune.grid_search(
                    [
                        {
                            "cell": t.cell.key,
                            "kind": type(t).__name__,
                            "task": t.model_dump_json(),
                        }
                        for t in tasks
                    ]
                )
            },
            tune_config=tune.TuneConfig(
                trial_dirname_creator=lambda trial: trial.trial_id,
                # A worker takes seconds to start and holds nothing of a trial: its child did.
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                name="trials",
                storage_path=scratch,
                callbacks=[_tune_callback(relay), *loggers],
                stop=_tune_stopper(is_over),
                failure_config=tune.FailureConfig(max_failures=0),
                verbose=0,
            ),
        )
        try:
            tuner.fit()
        except Exception as error:  # noqa: BLE001 - see below
            # What the listener raised comes back wrapped. Anything else is Tune giving up on all
            # trials because of one, as it does when Ray kills workers on a node without memory.
            if relay.raised is None:
                relay.all_ended(_first_line(error))
        if relay.raised is not None:
            raise relay.raised


def _trial_on_node(config: dict[str, dict[str, str]]) -> None:
    """A trial, in a Ray worker on the node that was found for it."""
    import ray  # noqa: PLC0415 - this runs in the worker
    from ray import tune  # noqa: PLC0415 - as above

    task = KINDS[config["trial"]["kind"]].model_validate_json(config["trial"]["task"])
    node_id = ray.get_runtime_context().get_node_id()

    def emit(observation: Logged) -> None:
        # Returns once the driver has taken it: an observation is never in flight for long.
        tune.report({"observation": observation.model_dump_json()} | metrics(observation))

    if isinstance(task, ProfileTask):
        with _prober(task.trial, PROFILE_TIMEOUTS) as prober:
            run_profile(task, prober, emit, node_id=node_id)
    else:
        with _prober(task) as prober:
            run_trial(task, prober, emit, node_id=node_id)


def _prober(task: TrialTask, timeouts: float = 1.0) -> ChildProber:
    return ChildProber(
        task.setup,
        build_timeout_seconds=task.build_timeout_seconds,
        probe_timeout_seconds=timeouts * task.probe_timeout_seconds,
    )


class _Relay:
    """Passes Tune's events on. What the listener raises is kept: Tune would wrap or lose it."""

    def __init__(self, listener: Listener, cells: Mapping[str, Cell]) -> None:
        self._listener = listener
        self._cells = cells
        self._running: set[Cell] = set()
        self.raised: Exception | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: Tune pickles callbacks to restore an experiment, which is never done here."""
        return {}

    def started(self, trial: Any) -> None:
        self._running.add(self._cell(trial))
        self._pass_on(lambda: self._listener.started(self._cell(trial)))

    def reported(self, result: dict[str, Any]) -> None:
        if "observation" in result:
            observation = logged(result["observation"].encode())
            self._pass_on(lambda: self._listener.observed(observation))

    def all_ended(self, error: str) -> None:
        """Nothing runs any more."""
        for cell in sorted(self._running, key=lambda cell: cell.key):
            self._listener.ended(cell, error)
        self._running.clear()

    def ended(self, trial: Any, error: str | None) -> None:
        self._running.discard(self._cell(trial))
        self._pass_on(lambda: self._listener.ended(self._cell(trial), error))

    def _cell(self, trial: Any) -> Cell:
        return self._cells[trial.config["trial"]["cell"]]

    def _pass_on(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self.raised = self.raised or error
            raise


def _tune_callback(relay: _Relay) -> Any:
    from ray import tune  # noqa: PLC0415 - seconds to import, and only a sweep needs it

    class Callback(tune.Callback):  # type: ignore[misc]
        def on_trial_start(self, **info: Any) -> None:
            relay.started(info["trial"])

        def on_trial_result(self, **info: Any) -> None:
            relay.reported(info["result"])

        def on_trial_complete(self, **info: Any) -> None:
            relay.ended(info["trial"], None)

        def on_trial_error(self, **info: Any) -> None:
            relay.ended(info["trial"], _last_line(info["trial"]))

    return Callback()


def _tune_stopper(is_over: Callable[[], bool]) -> Any:
    from ray import tune  # noqa: PLC0415 - as above

    class Stopper(tune.Stopper):  # type: ignore[misc]
        def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
            del trial_id, result
            return is_over()

        def stop_all(self) -> bool:
            return is_over()

        def __reduce__(self) -> Any:
            """Of nothing: see ``_Relay.__getstate__``."""
            return (tune.stopper.NoopStopper, ())

    return Stopper()


def _last_line(trial: Any) -> str:
    text = str(trial.get_pickled_error() or "its Ray worker or node died").strip()
    return text.splitlines()[-1]


def _first_line(error: Exception) -> str:
    text = str(error).strip().removeprefix("Caught unexpected exception: ")
    return text.splitlines()[0] if text else repr(error)
