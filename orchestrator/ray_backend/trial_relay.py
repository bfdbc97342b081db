"""Relay between Ray Tune's trials on one side, the scheduler and the listener on the other."""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray import tune

from orchestrator.planning.cluster_resources import ClusterResources
from orchestrator.ray_backend.errors import LeaveTuneError, RayEndedError
from orchestrator.ray_backend.own_ray import check_own_ray
from orchestrator.ray_backend.ray_internals import worker_of
from orchestrator.ray_backend.trial_worker import NODE_LEAVES
from orchestrator.scheduling.node_queue import NodeAddress, Task
from orchestrator.scheduling.scheduler import Scheduler
from trials.listener import TrialListener
from trials.records.cell import Cell
from trials.records.profile import logged

CHECK_SECONDS = 1.0  # between two looks at the cluster
RAY_CHECK_SECONDS = 0.05  # between two looks at the driver's own Ray; Tune's steps take up to 0.1
UNKNOWN_DEATH = "its Ray worker or node died"
# Parts of Ray's messages, with what they mean to somebody who does not know its protocol.
NODE_WORDS = {
    "health check failed": "stopped answering: it was switched off, cut off or far too busy",
    "expected": "was taken away",
}
CONNECTION_WORDS = dict.fromkeys(
    ("rpc_code", "RpcError", "Socket closed", "StatusCode."), "its connection to Ray broke"
) | dict.fromkeys(
    ("owner has died", "owner has exited", "OwnerDiedError"), "the process that it reported to died"
)
WORKER_WORDS = CONNECTION_WORDS | {
    "connection error code": "its process ended without a word, as when it is killed",
    "OOM": "Ray killed it, as its node was running out of memory",
}
logger = logging.getLogger(__name__)


class TrialRelay(tune.Callback, tune.Stopper):  # type: ignore[misc]
    """Passes the events of Tune's trials on, and the scheduler's trials to Tune.

    As a stopper it ends the experiment when nothing is left that is worth waiting for: what is left
    waits for nodes in vain, or the budget is spent and nothing runs. Tune calls everything from the
    driver's main thread, in the loop of ``Tuner.fit``. It wraps or swallows what a callback raises.
    The first such error is kept in ``raised`` for ``run_trials``.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        listener: TrialListener,
        cluster_now: Callable[[], ClusterResources],
        record_nodes: Callable[[ClusterResources], None],
    ) -> None:
        self.raised: Exception | None = None
        self._scheduler = scheduler
        self._listener = listener
        self._cluster_now = cluster_now
        self._record_nodes = record_nodes
        self._running: dict[str, Any] = {}
        self._tasks: dict[str, Task] = {}
        self._killed: dict[str, str] = {}
        self._ray_checked_at = 0.0
        self._checked_at = time.monotonic()

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: Tune pickles callbacks to restore an experiment, which is never done here."""
        return {}

    def __call__(self, _trial_id: str, result: dict[str, Any]) -> bool:
        """Pass on the observation that a trial reported, and whether the trial is to end with it.

        Tune asks this before it calls ``on_trial_result``: the observation that spends the budget
        is to count, so that no probe begins after it. Probes that run elsewhere end first.
        """
        if "observation" in result:
            observed = logged(result["observation"].encode())
            # The listener first: it writes the observation to the disk.
            self._pass_on(lambda: self._listener.observed(observed))
            self._pass_on(lambda: self._scheduler.observed(observed))
        return self._scheduler.is_spent()

    def stop_all(self) -> bool:
        """Whether nothing is left that is worth waiting for."""
        return self._scheduler.is_over

    def next_trial(self) -> dict[str, Any] | None:
        """The next trial as a configuration for Tune; None when there is none now."""
        placement = self._scheduler.next()
        if placement is None:
            return None
        cell = placement.task.cell
        self._tasks[cell.key] = placement.task
        return {
            "cell": cell.key,
            "kind": type(placement.task).__name__,
            "task": placement.task.model_dump_json(),
            "resources": dict(placement.resources),
            "nodes": cell.nodes,
            "avoid": list(placement.avoid),
        }

    def check_ray(self) -> None:
        """Keep the error if a process of the driver's own Ray has ended."""
        with contextlib.suppress(RayEndedError):
            self._pass_on(check_own_ray)

    def on_step_begin(self, **_info: Any) -> None:
        """About once a second, pass on the nodes, and kill trials that are silent for too long.

        Raises:
            LeaveTuneError: the driver's own Ray has ended.
        """
        now = time.monotonic()
        if now - self._ray_checked_at < RAY_CHECK_SECONDS:
            return
        try:
            check_own_ray()
        except RayEndedError as error:
            self.raised = self.raised or error
            raise LeaveTuneError from error
        self._ray_checked_at = now
        if now - self._checked_at < CHECK_SECONDS:
            return
        cluster, silent = self._cluster_now(), dict[Cell, str]()
        self._pass_on(lambda: self._record_nodes(cluster))
        self._pass_on(lambda: silent.update(self._scheduler.update(cluster)))
        for cell, complaint in silent.items():
            trial = self._running.get(cell.key)
            if trial is not None and cell.key not in self._killed:
                self._killed[cell.key] = complaint
                kill(trial)
        self._checked_at = time.monotonic()

    def on_trial_start(self, *, trial: Any, **_info: Any) -> None:
        """Pass on the start of a trial."""
        cell = self._cell(trial)
        self._running[cell.key] = trial
        self._pass_on(lambda: self._scheduler.started(cell))
        self._pass_on(lambda: self._listener.started(self._tasks[cell.key]))

    def on_trial_result(self, *, trial: Any, result: dict[str, Any], **_info: Any) -> None:
        """Pass on the nodes that a trial reported."""
        if "nodes" in result:
            nodes = (NodeAddress(*node) for node in result["nodes"])
            self._scheduler.located(self._cell(trial), *nodes)

    def on_trial_complete(self, *, trial: Any, **_info: Any) -> None:
        """Pass on the end of a trial."""
        self._ended(trial, None)

    def on_trial_error(self, *, trial: Any, **_info: Any) -> None:
        """Pass on the death of a trial."""
        self._ended(trial, cause_of_death(trial))

    def _ended(self, trial: Any, error: str | None) -> None:
        cell = self._cell(trial)
        self._running.pop(cell.key, None)
        error = self._killed.pop(cell.key, error)
        self._pass_on(lambda: self._listener.ended(cell, self._scheduler.ended(cell, error)))

    def all_ended(self, error: str) -> int:
        """Pass on that Tune has stopped; the number of trials that ran until then."""
        ran = self._scheduler.interrupted(error)
        for cell in ran:
            self._listener.ended(cell, error)
        self._running.clear()
        self._killed.clear()
        return len(ran)

    def _cell(self, trial: Any) -> Cell:
        return self._tasks[trial.config["trial"]["cell"]].cell

    def _pass_on(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self.raised = self.raised or error
            raise


def kill(trial: Any) -> None:
    """Have Ray kill the worker of a trial; Tune then reports its death."""
    actor = worker_of(trial)
    if actor is not None:
        ray.kill(actor)


def cause_of_death(trial: Any) -> str:
    """Cause of a trial's death in one line, from the page that Ray writes about it."""
    try:
        text = Path(trial.error_file or "").read_text(encoding="utf-8").strip()
    except OSError:
        return UNKNOWN_DEATH
    lines = [line.strip() for line in text.splitlines()]
    for line in lines:
        _, is_of_node, how = line.partition("the actor's node was ")
        if is_of_node:
            return f"its node {in_words(how, NODE_WORDS) or f'was {how}'}"
        if "worker process has died" in line:
            detail = line.partition("Worker exit detail: ")[2]
            how = in_words(detail, WORKER_WORDS) or detail.partition(". ")[0]
            return f"its Ray worker died: {how}" if how else "its Ray worker died"
        if line.endswith(NODE_LEAVES):
            return NODE_LEAVES
    last = lines[-1].rpartition("NodeLostError: ")[2] if lines else UNKNOWN_DEATH
    return in_words(last, CONNECTION_WORDS) or last


def in_words(raw: str, words: Mapping[str, str]) -> str | None:
    """Meaning of a message of Ray's protocol between processes; None for any other.

    The message itself goes to the log, for whoever looks for the cause in Ray's own.
    """
    for part, meaning in words.items():
        if part in raw:
            logger.debug("Ray: %s", raw)
            return meaning
    return None
