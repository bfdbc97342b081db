"""The plan through Ray Tune: the one place that knows Tune.

A trial is placed by the resources its cell asks for and reports each observation as its probe ends.
Nothing of Tune's own is kept: what is done is told by the observations, so its experiment folder is
a temporary one and a trial that died is simply planned again.
"""

import contextlib
import functools
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from orchestrator.cluster import ClusterError, leaving_nodes
from orchestrator.listener import Listener
from orchestrator.placer import PLACEMENTS, Placer, Task, Whereabouts
from orchestrator.plan import ClusterResources
from orchestrator.tune_loggers import metrics
from trials.profile import Logged, logged
from trials.profile_trial import PROFILE_TIMEOUTS, ProfileTask, run_profile
from trials.trial import TrialTask, child_prober, run_trial
from trials.workload import Cell

KINDS: dict[str, type[Task]] = {kind.__name__: kind for kind in (TrialTask, ProfileTask)}
LOOK_SECONDS = 1.0
UNKNOWN_DEATH = "its Ray worker or node died"
NODE_LEAVES = "its node had notice that it is to be taken away"


class NodeLeavesError(RuntimeError):
    """A trial would begin on a node that is to be taken away."""


def run_trials(
    placer: Placer,
    listener: Listener,
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
    relay = _Relay(placer, listener, cluster_now, saw)
    in_vain = 0
    while not placer.is_over:
        with tempfile.TemporaryDirectory(prefix="sweep-") as scratch:
            tuner = tune.Tuner(
                tune.with_resources(_trial_on_node, _resources),
                tune_config=tune.TuneConfig(
                    search_alg=_search(relay),
                    num_samples=-1,
                    trial_dirname_creator=_folder_of,
                    # A worker takes seconds to start and holds nothing of a trial: its child did.
                    reuse_actors=True,
                ),
                run_config=tune.RunConfig(
                    name="trials",
                    storage_path=scratch,
                    callbacks=[_tune_callback(relay), *loggers, _letting_go()],
                    failure_config=tune.FailureConfig(max_failures=0),
                    stop=_stopper(relay),
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


def _search(relay: "_Relay") -> Any:
    """Tune's way to ask for one trial after another."""
    from ray.tune.search import Searcher  # noqa: PLC0415 - seconds to import

    class Search(Searcher):  # type: ignore[misc]
        def suggest(self, trial_id: str) -> Any:
            del trial_id
            wanted = relay.wanted()
            if wanted is None:
                return Searcher.FINISHED if relay.is_over else None
            return {"trial": wanted}

        def on_trial_complete(self, *event: Any, **more: Any) -> None:
            """The callback hears of it."""

        def save(self, checkpoint_path: str) -> None:
            """Nothing: an experiment is never restored here."""

        def restore(self, checkpoint_path: str) -> None:
            """As above."""

    return Search()


def _stopper(relay: "_Relay") -> Any:
    """Ends it when the budget is spent, or what is left waits for nodes that do not come."""
    from ray import tune  # noqa: PLC0415 - seconds to import, and only a sweep needs it

    class Over(tune.Stopper):  # type: ignore[misc]
        def __call__(self, trial_id: str, result: Any) -> bool:
            del trial_id, result
            return relay.is_over

        def stop_all(self) -> bool:
            return relay.is_over

    return Over()


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


class _Relay:
    """Between Tune and those who know what a trial is.

    What a listener raises is kept: Tune would wrap or lose it.
    """

    def __init__(
        self,
        placer: Placer,
        listener: Listener,
        cluster_now: Callable[[], ClusterResources],
        saw: Callable[[ClusterResources], None],
    ) -> None:
        self._placer = placer
        self._listener = listener
        self._cluster_now = cluster_now
        self._saw = saw
        self._running: dict[str, Any] = {}
        self._cells: dict[str, Cell] = {}
        self._killed: dict[str, str] = {}
        self._looked = time.monotonic()
        self.raised: Exception | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: Tune pickles callbacks to restore an experiment, which is never done here."""
        return {}

    @property
    def is_over(self) -> bool:
        """Whether nothing is left that is worth waiting for."""
        return self._placer.is_over

    def wanted(self) -> dict[str, Any] | None:
        """The next trial, in words that Tune can keep; None when there is none now."""
        placement = self._placer.next()
        if placement is None:
            return None
        cell = placement.task.cell
        self._cells[cell.key] = cell
        return {
            "cell": cell.key,
            "kind": type(placement.task).__name__,
            "task": placement.task.model_dump_json(),
            "resources": dict(placement.resources),
            "avoid": list(placement.avoid),
        }

    def step(self) -> None:
        """Now and then, looks at the cluster and at trials that say nothing."""
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        cluster, silent = self._cluster_now(), dict[Cell, str]()
        self._pass_on(lambda: self._saw(cluster))
        self._pass_on(lambda: silent.update(self._placer.look(cluster)))
        for cell, reason in silent.items():
            trial = self._running.get(cell.key)
            if trial is not None and cell.key not in self._killed:
                self._killed[cell.key] = reason
                _kill(trial)
        self._looked = time.monotonic()

    def started(self, trial: Any) -> None:
        cell = self._cell(trial)
        self._running[cell.key] = trial
        self._pass_on(lambda: self._placer.started(cell))
        self._pass_on(lambda: self._listener.started(cell))

    def reported(self, trial: Any, result: dict[str, Any]) -> None:
        if "node_id" in result:
            where = Whereabouts(result["node_id"], result["address"])
            self._placer.is_on(self._cell(trial), where)
        if "observation" in result:
            observation = logged(result["observation"].encode())
            # Kept before anything else is made of it.
            self._pass_on(lambda: self._listener.observed(observation))
            self._pass_on(lambda: self._placer.observed(observation))

    def all_ended(self, error: str) -> int:
        """Nothing runs any more; so many did until now."""
        ran = self._placer.interrupted(error)
        for cell in ran:
            self._listener.ended(cell, error)
        self._running.clear()
        return len(ran)

    def ended(self, trial: Any, error: str | None) -> None:
        cell = self._cell(trial)
        self._running.pop(cell.key, None)
        error = self._killed.pop(cell.key, error)
        self._pass_on(lambda: self._listener.ended(cell, self._placer.ended(cell, error)))

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
        def on_step_begin(self, **info: Any) -> None:
            del info
            relay.step()

        def on_trial_start(self, **info: Any) -> None:
            relay.started(info["trial"])

        def on_trial_result(self, **info: Any) -> None:
            relay.reported(info["trial"], info["result"])

        def on_trial_complete(self, **info: Any) -> None:
            relay.ended(info["trial"], None)

        def on_trial_error(self, **info: Any) -> None:
            relay.ended(info["trial"], _why_died(info["trial"]))

    return Callback()


def _letting_go() -> Any:
    """Lets go of trials that are over, when all other callbacks have been told."""
    from ray import tune  # noqa: PLC0415 - seconds to import, and only a sweep needs it

    class Callback(tune.Callback):  # type: ignore[misc]
        def on_trial_complete(self, **info: Any) -> None:
            # Where a later Ray names things otherwise, they stay: no reason to end a sweep.
            with contextlib.suppress(AttributeError):
                _let_go(info["trial"])

        def on_trial_error(self, **info: Any) -> None:
            self.on_trial_complete(**info)

    return Callback()


def _let_go(trial: Any) -> None:
    """Leaves a shell of a trial that is over.

    Tune keeps each until the last is over: its task in six copies, what it reported last, and
    statistics of every number it reported. A Tuner begun anew now and then would be rid of them,
    but then all GPUs wait for the slowest trial.
    """
    trial.config["trial"] = {"cell": trial.config["trial"]["cell"]}
    trial.evaluated_params.clear()
    trial.set_experiment_tag("")
    trial.metric_analysis.clear()
    trial.metric_n_steps.clear()
    # Were it empty, Tune would ask the worker.
    trial.run_metadata.last_result = {"done": True}
    trial._default_result_or_future = None  # noqa: SLF001 - else Ray's store keeps it, unread


def _kill(trial: Any) -> None:
    """Has Ray kill a trial's worker: Tune hears that it died."""
    import ray  # noqa: PLC0415 - as above

    actor = trial.temporary_state.ray_actor
    if actor is not None:
        ray.kill(actor)


def _why_died(trial: Any) -> str:
    """What Ray says of a trial's death, in a line."""
    try:
        text = Path(trial.error_file or "").read_text(encoding="utf-8").strip()
    except OSError:
        return UNKNOWN_DEATH
    lines = [line.strip() for line in text.splitlines()]
    for line in lines:
        _, of_node, how = line.partition("the actor's node was ")
        if of_node:
            return f"its node was {how}"
        if "worker process has died" in line:
            detail = line.partition("Worker exit detail: ")[2].partition(". ")[0]
            return f"its Ray worker died: {detail}" if detail else "its Ray worker died"
        if line.endswith(NODE_LEAVES):
            return NODE_LEAVES
    return lines[-1] if lines else UNKNOWN_DEATH


def _first_line(error: Exception) -> str:
    text = str(error).strip().removeprefix("Caught unexpected exception: ")
    return text.splitlines()[0] if text else repr(error)
