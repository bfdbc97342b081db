"""Trials in a Ray worker: their requests for resources, and their runs on the node."""

import functools
import os
from collections.abc import Collection, Generator
from typing import Any

from ray import tune

from orchestrator.ray_backend.gang_on_nodes import NodesOfTrial, nodes_of_group, this_node
from orchestrator.ray_backend.ray_internals import draining_nodes
from orchestrator.ray_backend.tune_loggers import metrics
from orchestrator.scheduling.node_queue import NodeAddress, Task
from trials.child_process.fork_server import ForkServers
from trials.child_process.parent_death import die_with_parent
from trials.profile_trial import PROFILE_TIMEOUTS, ProfileTask, profiles
from trials.records.profile import Logged
from trials.run_trial import child_prober, trial_results
from trials.trial import TrialTask

KINDS: dict[str, type[Task]] = {kind.__name__: kind for kind in (TrialTask, ProfileTask)}
NODE_LEAVES = "its node had notice that it is to be taken away"
Reports = Generator[tuple[dict[str, Any], bool]]
"""Reports of a trial to the driver, and whether each is its last."""


class NodeLeavesError(RuntimeError):
    """A trial would begin on a node that is to be taken away."""


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


class TrialOnNode(tune.Trainable):  # type: ignore[misc]
    """A Ray worker that runs one trial, or profile, after another; each step is a report.

    Tune takes the next step once the driver has the report of the last one: a death loses one at
    most. The last report of a trial says so, which saves the step of its end.
    """

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> Any:
        """Request of a trial to Ray, as a placement group."""
        trial = config["trial"]
        request = tuple(trial["resources"].items())
        return _placement_group(request, tuple(trial["avoid"]), trial["nodes"])

    def setup(self, config: dict[str, Any]) -> None:
        """Take the first trial."""
        die_with_parent(os.getppid())  # the raylet, whose end Ray's worker sees seconds later
        self._servers = ForkServers()
        self._reports: Reports | None = None
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Take the next trial; what one that Tune has stopped left running ends."""
        self.cleanup()
        self._trial = new_config["trial"]
        self._reports = self._trial_reports()
        self.config: dict[str, Any] = {}  # Tune would add it to each report
        return True

    def step(self) -> dict[str, Any]:
        """Run the trial until its next report.

        Raises:
            NodeLeavesError: a node is to be taken away.
            NodeLostError: a node of the ranks is gone.
        """
        assert self._reports is not None
        report, is_last = next(self._reports, ({}, True))
        if is_last:
            try:
                self.cleanup()
            except Exception as error:  # noqa: BLE001 - the next step raises it, after this report
                self._reports, is_last = _raising(error), False
        return report | {"done": is_last}

    def cleanup(self) -> None:
        """End what a trial has left running."""
        if self._reports is not None:
            reports, self._reports = self._reports, None
            reports.close()

    def _trial_reports(self) -> Reports:
        # Reported first: the driver needs the node if the trial dies before any other report, and
        # ends the trial with it if the budget is spent.
        yield _report_of_nodes(this_node()), False
        nodes = {this_node().node_id}
        # Ray places nothing on a node that drains, but Tune reuses the workers and groups there.
        _check_stay(nodes if self._trial["nodes"] == 1 else nodes | nodes_of_group())
        yield from self.reports(KINDS[self._trial["kind"]].model_validate_json(self._trial["task"]))

    def reports(self, task: Task) -> Reports:
        """Reports of a task's results, and of all nodes where there are several."""
        if isinstance(task, ProfileTask):
            with child_prober(task.trial, PROFILE_TIMEOUTS, servers=self._servers) as prober:
                for profiled in profiles(task, prober, node_id=this_node().node_id):
                    yield _report(profiled), False
        elif self._trial["nodes"] == 1:
            with child_prober(task, servers=self._servers) as prober:
                for result, is_last in trial_results(task, prober, node_ids=[this_node().node_id]):
                    yield _report(result), is_last
        else:
            several = NodesOfTrial(task, self._trial["resources"])
            yield _report_of_nodes(*several.nodes), False
            ids = [node.node_id for node in several.nodes]
            _check_stay({*ids, *nodes_of_group()})
            with several.prober() as prober_of_all:
                for result, is_last in trial_results(task, prober_of_all, node_ids=ids):
                    yield _report(result), is_last


def _raising(error: Exception) -> Reports:
    """Reports of a trial whose end failed."""
    raise error
    yield  # a generator


def _check_stay(nodes: Collection[str]) -> None:
    """Check that these nodes stay.

    Raises:
        NodeLeavesError: one of them is to be taken away.
    """
    if not draining_nodes().isdisjoint(nodes):
        raise NodeLeavesError(NODE_LEAVES)


def _report_of_nodes(*nodes: NodeAddress) -> dict[str, Any]:
    return {"nodes": [(node.node_id, node.address) for node in nodes]}


def _report(result: Logged) -> dict[str, Any]:
    return {"observation": result.model_dump_json()} | metrics(result)
