"""A trial in a Ray worker: its request for resources, and its run on the node."""

import functools
from typing import Any

import ray
from ray import tune

from orchestrator.ray_backend.ray_internals import draining_nodes
from orchestrator.ray_backend.tune_loggers import metrics
from orchestrator.scheduling.node_queue import Task
from trials.profile_trial import PROFILE_TIMEOUTS, ProfileTask, run_profile
from trials.records.profile import Logged
from trials.run_trial import child_prober, run_trial
from trials.trial import TrialTask

KINDS: dict[str, type[Task]] = {kind.__name__: kind for kind in (TrialTask, ProfileTask)}
NODE_LEAVES = "its node had notice that it is to be taken away"


class NodeLeavesError(RuntimeError):
    """A trial would begin on a node that is to be taken away."""


def resources(config: dict[str, Any]) -> Any:
    """Request of a trial to Ray, as a placement group."""
    trial = config["trial"]
    return _placement_group(tuple(trial["resources"].items()), tuple(trial["avoid"]))


@functools.lru_cache  # Tune keeps the group of every trial: equal trials share one
def _placement_group(request: tuple[tuple[str, float], ...], avoid: tuple[str, ...]) -> Any:
    if not avoid:
        return tune.PlacementGroupFactory([dict(request)])
    elsewhere = {"ray.io/node-id": f"!in({','.join(avoid)})"}
    return tune.PlacementGroupFactory([dict(request)], bundle_label_selector=[elsewhere])


def run_on_node(config: dict[str, dict[str, str]]) -> None:
    """Run a trial, or a profile, on the node of this Ray worker.

    Raises:
        NodeLeavesError: the node is to be taken away.
    """
    node_id = ray.get_runtime_context().get_node_id()
    # Reported first: the driver needs the node if the trial dies before any other report.
    tune.report({"node_id": node_id, "address": ray.util.get_node_ip_address()})
    # Ray places nothing on a node that drains, but Tune reuses the worker that it has there.
    if node_id in draining_nodes():
        raise NodeLeavesError(NODE_LEAVES)
    task = KINDS[config["trial"]["kind"]].model_validate_json(config["trial"]["task"])

    def emit(result: Logged) -> None:
        # Tune's report returns once the driver has the result: a death loses one at most.
        tune.report({"observation": result.model_dump_json()} | metrics(result))

    if isinstance(task, ProfileTask):
        with child_prober(task.trial, PROFILE_TIMEOUTS) as prober:
            run_profile(task, prober, emit, node_id=node_id)
    else:
        with child_prober(task) as prober:
            run_trial(task, prober, emit, node_id=node_id)
