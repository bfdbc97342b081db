"""Ray Tune callbacks: observations relayed, trials stopped and let go."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.planning.cluster_resources import ClusterResources
from orchestrator.scheduling.node_queue import NodeAddress
from orchestrator.scheduling.scheduler import Scheduler
from trials.listener import TrialListener
from trials.records.cell import Cell
from trials.records.profile import logged

LOOK_SECONDS = 1.0
UNKNOWN_DEATH = "its Ray worker or node died"
NODE_LEAVES = "its node had notice that it is to be taken away"


def search(relay: "TrialRelay") -> Any:
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


def stopper(relay: "TrialRelay") -> Any:
    """Ends it when the budget is spent, or what is left waits for nodes that do not come."""
    from ray import tune  # noqa: PLC0415 - seconds to import, and only a sweep needs it

    class Over(tune.Stopper):  # type: ignore[misc]
        def __call__(self, trial_id: str, result: Any) -> bool:
            del trial_id, result
            return relay.is_over

        def stop_all(self) -> bool:
            return relay.is_over

    return Over()


class TrialRelay:
    """Between Tune and those who know what a trial is.

    What a listener raises is kept: Tune would wrap or lose it.
    """

    def __init__(
        self,
        placer: Scheduler,
        listener: TrialListener,
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
        """Record that a trial runs."""
        cell = self._cell(trial)
        self._running[cell.key] = trial
        self._pass_on(lambda: self._placer.started(cell))
        self._pass_on(lambda: self._listener.started(cell))

    def reported(self, trial: Any, result: dict[str, Any]) -> None:
        """Pass on what a trial reported."""
        if "node_id" in result:
            where = NodeAddress(result["node_id"], result["address"])
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
        """Record how a trial ended."""
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


def tune_callback(relay: TrialRelay) -> Any:
    """Tune's callback that passes trials' results to a relay."""
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


def letting_go() -> Any:
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
