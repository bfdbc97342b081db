"""A trial in a Ray worker: its request for resources, and its run on the node."""

import functools
import os
from typing import Any

from ray import tune

from orchestrator.ray_backend.gang_on_nodes import NodesOfTrial, nodes_of_group, this_node
from orchestrator.ray_backend.ray_internals import draining_nodes
from orchestrator.ray_backend.tune_loggers import metrics
from orchestrator.scheduling.node_queue import NodeAddress, Task
from trials.child_process.fork_server import ForkServers
from trials.child_process.parent_death import die_with_parent
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
    request = tuple(trial["resources"].items())
    return _placement_group(request, tuple(trial["avoid"]), trial["nodes"])


@functools.lru_cache  # Tune keeps the group of every trial: equal trials share one
def _placement_group(
    request: tuple[tuple[str, float], ...], avoid: tuple[str, ...], nodes: int
) -> Any:
    """A part of the group for each node, all on different ones."""
    parts = [dict(request) for _ in range(nodes)]
    strategy = "STRICT_SPREAD" if nodes > 1 else "PACK"
    if not avoid:
        return tune.PlacementGroupFactory(parts, strategy)
    elsewhere = {"ray.io/node-id": f"!in({','.join(avoid)})"}
    return tune.PlacementGroupFactory(parts, strategy, bundle_label_selector=[elsewhere] * nodes)


def run_on_node(config: dict[str, dict[str, Any]]) -> None:
    """Run a trial, or a profile, on the node of this Ray worker, and on those of its ranks.

    Raises:
        NodeLeavesError: a node is to be taken away.
        NodeLostError: a node of the ranks is gone.
    """
    die_with_parent(os.getppid())  # the raylet, whose end Ray's worker sees seconds later
    trial = config["trial"]
    # Reported first: the driver needs the node if the trial dies before any other report.
    _report_nodes(this_node())
    task = KINDS[trial["kind"]].model_validate_json(trial["task"])
    if isinstance(task, ProfileTask):
        with child_prober(task.trial, PROFILE_TIMEOUTS, servers=_servers()) as prober:
            run_profile(task, prober, _emit, node_id=this_node().node_id)
    elif trial["nodes"] == 1:
        with child_prober(task, servers=_servers()) as prober:
            run_trial(task, prober, _emit, node_ids=[this_node().node_id], emit_link=_emit)
    else:
        several = NodesOfTrial(task, trial["resources"])
        _report_nodes(*several.nodes)
        with several.prober() as prober_of_all:
            ids = [node.node_id for node in several.nodes]
            run_trial(task, prober_of_all, _emit, node_ids=ids, emit_link=_emit)


@functools.cache
def _servers() -> ForkServers:
    """Fork server of this Ray worker, which Tune gives one trial after another."""
    return ForkServers()


def _report_nodes(*nodes: NodeAddress) -> None:
    """Report the nodes of a trial.

    Raises:
        NodeLeavesError: one of them is to be taken away.
    """
    tune.report({"nodes": [(node.node_id, node.address) for node in nodes]})
    # Ray places nothing on a node that drains, but Tune reuses the workers and groups there.
    if not draining_nodes().isdisjoint({*nodes_of_group(), *(node.node_id for node in nodes)}):
        raise NodeLeavesError(NODE_LEAVES)


def _emit(result: Logged) -> None:
    # Tune's report returns once the driver has the result: a death loses one at most.
    tune.report({"observation": result.model_dump_json()} | metrics(result))
