"""Request of a trial to Ray, and the steps of a worker."""

from typing import Any

import pytest
from builders.runs import ONE_CELL, spec_of

from orchestrator.planning.plan import trial_task
from orchestrator.ray_backend import trial_worker
from orchestrator.ray_backend.trial_worker import Reports, TrialOnNode
from orchestrator.scheduling.node_queue import NodeAddress, Task

PART = {"CPU": 1.0, "H100-SXM": 8.0, "GPU": 8.0}


def requested(nodes: int, *avoid: str) -> Any:
    """Placement group of a trial on so many nodes, away from others."""
    trial = {"resources": PART, "avoid": list(avoid), "nodes": nodes}
    return TrialOnNode.default_resource_request({"trial": trial})


@pytest.mark.parametrize(("nodes", "strategy"), [(1, "PACK"), (2, "STRICT_SPREAD")])
def test_a_trial_has_a_part_on_each_of_its_nodes(nodes: int, strategy: str) -> None:
    """All parts are on different nodes, and equal requests are one object."""
    group = requested(nodes)
    assert (group.bundles, group.strategy) == ([PART] * nodes, strategy)
    assert group is requested(nodes)


def test_no_part_is_on_a_node_to_avoid() -> None:
    """Each part has the selector."""
    elsewhere = {"ray.io/node-id": "!in(n1,n2)"}
    assert str(requested(2, "n1", "n2")).count(str(elsewhere)) == 2


class ReportingTwice(TrialOnNode):
    """A worker whose trials report twice; it records when each leaves nothing running."""

    left: list[str]

    def reports(self, task: Task) -> Reports:
        try:
            yield {"observation": "first"}, False
            yield {"observation": "second"}, True
        finally:
            self.left.append(task.cell.key)


def test_a_worker_reports_its_node_once_and_the_last_result_as_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tune needs no step for the end of a trial, which leaves nothing running to the next one."""
    node = NodeAddress("n1", "10.0.0.1")
    monkeypatch.setattr(trial_worker, "die_with_parent", lambda _: None)
    monkeypatch.setattr(trial_worker, "this_node", lambda: node)
    monkeypatch.setattr(trial_worker, "draining_nodes", frozenset)
    spec = spec_of(ONE_CELL)
    (cell,) = spec.all_cells()
    task = trial_task(spec, spec.merged_catalog(), cell, [])
    trial = {"kind": "TrialTask", "task": task.model_dump_json(), "nodes": 1}
    worker = object.__new__(ReportingTwice)
    worker.left = []
    worker.setup({"trial": trial})
    results = [
        {"observation": "first", "done": False},
        {"observation": "second", "done": True},
    ]
    located = {"nodes": [("n1", "10.0.0.1")], "done": False}
    assert [worker.step() for _ in range(3)] == [located, *results]
    assert worker.reset_config({"trial": trial})
    assert worker.step() == results[0]
    assert worker.left == [cell.key]
    assert worker.reset_config({"trial": trial})  # Tune has stopped the one before
    assert worker.step() == results[0]
    assert worker.left == [cell.key] * 2
    worker.cleanup()
    assert worker.left == [cell.key] * 3
