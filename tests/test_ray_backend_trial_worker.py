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
    mistake: Exception | None = None

    def reports(self, task: Task) -> Reports:
        try:
            yield {"observation": "first"}, False
            yield {"observation": "second"}, True
        finally:
            self.left.append(task.cell.key)
            if self.mistake is not None:
                raise self.mistake


LOCATED = {"nodes": [("n1", "10.0.0.1")], "done": False}
RESULTS = [{"observation": "first", "done": False}, {"observation": "second", "done": True}]


@pytest.fixture
def trial() -> dict[str, Any]:
    """Configuration of a trial."""
    spec = spec_of(ONE_CELL)
    (cell,) = spec.all_cells()
    task = trial_task(spec, spec.merged_catalog(), cell, [])
    return {"trial": {"kind": "TrialTask", "task": task.model_dump_json(), "nodes": 1}}


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, trial: dict[str, Any]) -> ReportingTwice:
    """A worker with its first trial."""
    monkeypatch.setattr(trial_worker, "die_with_parent", lambda _: None)
    monkeypatch.setattr(trial_worker, "this_node", lambda: NodeAddress("n1", "10.0.0.1"))
    monkeypatch.setattr(trial_worker, "draining_nodes", frozenset)
    worker = object.__new__(ReportingTwice)
    worker.left = []
    worker.setup(trial)
    return worker


def test_the_last_result_of_a_trial_is_its_end(
    worker: ReportingTwice, trial: dict[str, Any]
) -> None:
    """It leaves nothing running to the next one, and neither does one that Tune has stopped."""
    for ended in (1, 2):
        assert [worker.step() for _ in range(3)] == [LOCATED, *RESULTS]
        assert len(worker.left) == ended
        assert worker.reset_config(trial)
    assert [worker.step() for _ in range(2)] == [LOCATED, RESULTS[0]]
    assert worker.reset_config(trial)
    assert len(worker.left) == 3
    worker.cleanup()
    assert len(worker.left) == 3  # it had not begun


def test_an_error_at_the_end_of_a_trial_is_its_own(
    worker: ReportingTwice, trial: dict[str, Any]
) -> None:
    """The last result is reported before it, and the next trial runs."""
    worker.mistake = OSError("a child does not end")
    expected = [LOCATED, RESULTS[0], RESULTS[1] | {"done": False}]
    assert [worker.step() for _ in range(3)] == expected
    with pytest.raises(OSError, match="a child does not end"):
        worker.step()
    worker.mistake = None
    assert worker.reset_config(trial)
    assert [worker.step() for _ in range(3)] == [LOCATED, *RESULTS]
