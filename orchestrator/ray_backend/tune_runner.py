"""The plan through Ray Tune: the one place that knows Tune.

A trial is placed by the resources its cell asks for and reports each observation as its probe ends.
Nothing of Tune's own is kept: what is done is told by the observations, so its experiment folder is
a temporary one and a trial that died is simply planned again.
"""

import functools
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.planning.cluster_resources import ClusterResources
from orchestrator.ray_backend.cluster import ClusterError, leaving_nodes
from orchestrator.ray_backend.tune_callbacks import (
    NODE_LEAVES,
    TrialRelay,
    letting_go,
    search,
    stopper,
    tune_callback,
)
from orchestrator.ray_backend.tune_loggers import metrics
from orchestrator.scheduling.node_queue import Task
from orchestrator.scheduling.scheduler import PLACEMENTS, Scheduler
from trials.listener import TrialListener
from trials.profile_trial import PROFILE_TIMEOUTS, ProfileTask, run_profile
from trials.records.profile import Logged
from trials.trial import TrialTask, child_prober, run_trial

KINDS: dict[str, type[Task]] = {kind.__name__: kind for kind in (TrialTask, ProfileTask)}


class NodeLeavesError(RuntimeError):
    """A trial would begin on a node that is to be taken away."""


def run_trials(
    placer: Scheduler,
    listener: TrialListener,
    cluster_now: Callable[[], ClusterResources],
    loggers: Sequence[Any] = (),
    saw: Callable[[ClusterResources], None] = lambda _: None,
) -> None:
    """Runs trials until the placer has none left.

    Args:
        placer: says what to place, and is told of all that happens to it.
        listener: hears of every start, observation and end, in the driver's main thread. A trial
            that began and did not end is told to have died; one that never began is not told of.
        cluster_now: what there is, asked anew.
        loggers: Ray Tune's own callbacks, told of all that the listener is told of.
        saw: is told what there is, now and then.

    Raises:
        Exception: whatever the listener, or ``saw``, raised; trials that still run are stopped.
    """
    # Tune writes result files and banners of its own unless told not to.
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
    # Ctrl-C is the driver's to handle.
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
    # The placer knows how many are worth placing; Tune would hold back all but one.
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(sys.maxsize)
    # A worker on a node that was cut off never says that it has stopped.
    os.environ["TUNE_FORCE_TRIAL_CLEANUP_S"] = "10"
    # An experiment is never restored here: its state, all trials as text in memory, is not to be
    # written again and again.
    os.environ["TUNE_GLOBAL_CHECKPOINT_S"] = str(sys.maxsize)
    from ray import tune  # noqa: PLC0415 - seconds to import, and only a sweep needs it
    from ray.tune.execution import class_cache  # noqa: PLC0415 - as above

    # Tune hands AWS's keys to every worker, and Ray writes what workers are given into its logs.
    class_cache.ENV_VARS_TO_PROPAGATE = frozenset()
    # It logs a trial that died with its traceback; the listener hears of it in a line.
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    relay = TrialRelay(placer, listener, cluster_now, saw)
    in_vain = 0
    while not placer.is_over:
        with tempfile.TemporaryDirectory(prefix="sweep-") as scratch:
            tuner = tune.Tuner(
                tune.with_resources(_trial_on_node, _resources),
                tune_config=tune.TuneConfig(
                    search_alg=search(relay),
                    num_samples=-1,
                    trial_dirname_creator=_folder_of,
                    # A worker takes seconds to start and holds nothing of a trial: its child did.
                    reuse_actors=True,
                ),
                run_config=tune.RunConfig(
                    name="trials",
                    storage_path=scratch,
                    callbacks=[tune_callback(relay), *loggers, letting_go()],
                    failure_config=tune.FailureConfig(max_failures=0),
                    stop=stopper(relay),
                    verbose=0,
                ),
            )
            error = None
            try:
                tuner.fit()
            except Exception as raised:  # noqa: BLE001 - see below
                # What the listener raised comes back wrapped. Anything else is Tune giving up on
                # all trials for one, as it does when Ray kills workers on a node without memory.
                error = _first_line(raised)
            if relay.raised is not None:
                raise relay.raised
            if error is None and placer.is_over:
                return
            error = error or "Ray stopped it"
            ran = relay.all_ended(error)
            in_vain = 0 if ran or placer.is_over else in_vain + 1
            if in_vain == PLACEMENTS:
                raise ClusterError(
                    f"Ray places no trial any more: {error}: see that the cluster is up, and run "
                    "the same command again, it goes on where this stopped"
                )


def _folder_of(trial: Any) -> str:
    return str(trial.trial_id)


def _resources(config: dict[str, Any]) -> Any:
    """What a trial asks Ray for."""
    trial = config["trial"]
    return _placement_group(tuple(trial["resources"].items()), tuple(trial["avoid"]))


@functools.lru_cache  # Tune keeps each trial's: they are to share one
def _placement_group(resources: tuple[tuple[str, float], ...], avoid: tuple[str, ...]) -> Any:
    from ray import tune  # noqa: PLC0415 - seconds to import, and only a sweep needs it

    if not avoid:
        return tune.PlacementGroupFactory([dict(resources)])
    elsewhere = {"ray.io/node-id": f"!in({','.join(avoid)})"}
    return tune.PlacementGroupFactory([dict(resources)], bundle_label_selector=[elsewhere])


def _trial_on_node(config: dict[str, dict[str, str]]) -> None:
    """A trial, in a Ray worker on the node that was found for it."""
    import ray  # noqa: PLC0415 - this runs in the worker
    from ray import tune  # noqa: PLC0415 - as above

    node_id = ray.get_runtime_context().get_node_id()
    # Where it is must be known when it dies without another word.
    tune.report({"node_id": node_id, "address": ray.util.get_node_ip_address()})
    if node_id in leaving_nodes():  # Ray places nothing there, but Tune reuses the worker it has
        raise NodeLeavesError(NODE_LEAVES)
    task = KINDS[config["trial"]["kind"]].model_validate_json(config["trial"]["task"])

    def emit(observation: Logged) -> None:
        # Returns once the driver has taken it: an observation is never in flight for long.
        tune.report({"observation": observation.model_dump_json()} | metrics(observation))

    if isinstance(task, ProfileTask):
        with child_prober(task.trial, PROFILE_TIMEOUTS) as prober:
            run_profile(task, prober, emit, node_id=node_id)
    else:
        with child_prober(task) as prober:
            run_trial(task, prober, emit, node_id=node_id)


def _first_line(error: Exception) -> str:
    text = str(error).strip().removeprefix("Caught unexpected exception: ")
    return text.splitlines()[0] if text else repr(error)
