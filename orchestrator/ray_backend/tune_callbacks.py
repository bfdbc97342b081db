"""Ray Tune's parts: the tuner, with its searcher, stopper and callbacks around a relay."""

import contextlib
from collections.abc import Sequence
from typing import Any

from orchestrator.ray_backend.trial_relay import TrialRelay, cause_of_death
from orchestrator.ray_backend.trial_worker import resources, run_on_node


def new_tuner(relay: TrialRelay, loggers: Sequence[Any], storage_path: str) -> Any:
    """Tuner that runs the trials of a relay until none is left."""
    from ray import tune  # noqa: PLC0415 - seconds to import, and only a sweep needs it

    return tune.Tuner(
        tune.with_resources(run_on_node, resources),
        tune_config=tune.TuneConfig(
            search_alg=_searcher(relay),
            num_samples=-1,
            trial_dirname_creator=lambda trial: str(trial.trial_id),
            # A worker takes seconds to start, and keeps no state: each trial has its own child.
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            name="trials",
            storage_path=storage_path,
            callbacks=[_relay_callback(relay), *loggers, _silent_progress(), _release_callback()],
            failure_config=tune.FailureConfig(max_failures=0),
            stop=_stopper(relay),
            verbose=0,
        ),
    )


def _searcher(relay: TrialRelay) -> Any:
    """Tune's source of trials: one after another, as the scheduler allows."""
    from ray.tune.search import Searcher  # noqa: PLC0415 - seconds to import

    class Search(Searcher):  # type: ignore[misc]
        def suggest(self, trial_id: str) -> Any:
            del trial_id
            trial = relay.next_trial()
            if trial is None:
                return Searcher.FINISHED if relay.is_over else None
            return {"trial": trial}

        def on_trial_complete(self, *event: Any, **more: Any) -> None:
            """Do nothing: the callback passes it on."""

        def save(self, checkpoint_path: str) -> None:
            """Do nothing: an experiment is never restored here."""

        def restore(self, checkpoint_path: str) -> None:
            """Do nothing, as above."""

    return Search()


def _stopper(relay: TrialRelay) -> Any:
    """Stopper for when the budget is spent, or all that is left waits for nodes in vain."""
    from ray import tune  # noqa: PLC0415 - seconds to import, and only a sweep needs it

    class Over(tune.Stopper):  # type: ignore[misc]
        def __call__(self, trial_id: str, result: Any) -> bool:
            del trial_id, result
            return relay.is_over

        def stop_all(self) -> bool:
            return relay.is_over

    return Over()


def _relay_callback(relay: TrialRelay) -> Any:
    """Callback that passes the events of trials to a relay."""
    from ray import tune  # noqa: PLC0415 - seconds to import, and only a sweep needs it

    class Callback(tune.Callback):  # type: ignore[misc]
        def on_step_begin(self, **info: Any) -> None:
            del info
            relay.check_cluster()

        def on_trial_start(self, **info: Any) -> None:
            relay.started(info["trial"])

        def on_trial_result(self, **info: Any) -> None:
            relay.reported(info["trial"], info["result"])

        def on_trial_complete(self, **info: Any) -> None:
            relay.ended(info["trial"], None)

        def on_trial_error(self, **info: Any) -> None:
            relay.ended(info["trial"], cause_of_death(info["trial"]))

    return Callback()


def _silent_progress() -> Any:
    """Progress callback that prints nothing: Tune's own prints trials among the results."""
    from ray.tune.progress_reporter import TrialProgressCallback  # noqa: PLC0415 - as above

    class Silent(TrialProgressCallback):  # type: ignore[misc]
        def _print(self, msg: str) -> None:
            """Drop the message."""

    return Silent()


def _release_callback() -> Any:
    """Callback that frees the memory of ended trials, after all other callbacks."""
    from ray import tune  # noqa: PLC0415 - seconds to import, and only a sweep needs it

    class Callback(tune.Callback):  # type: ignore[misc]
        def on_trial_complete(self, **info: Any) -> None:
            # A later Ray may rename these attributes: memory is then not freed, and nothing else.
            with contextlib.suppress(AttributeError):
                _release(info["trial"])

        def on_trial_error(self, **info: Any) -> None:
            self.on_trial_complete(**info)

    return Callback()


def _release(trial: Any) -> None:
    """Free the memory of an ended trial.

    Tune keeps every trial until the last one ends: its task in six copies, its last report, and
    statistics of every number it reported. A new Tuner now and then would free them, but then all
    GPUs would wait for the slowest trial.
    """
    trial.config["trial"] = {"cell": trial.config["trial"]["cell"]}
    trial.evaluated_params.clear()
    trial.set_experiment_tag("")
    trial.metric_analysis.clear()
    trial.metric_n_steps.clear()
    # Tune would ask the worker if this were empty.
    trial.run_metadata.last_result = {"done": True}
    trial._default_result_or_future = None  # noqa: SLF001 - else Ray's store keeps it, unread
