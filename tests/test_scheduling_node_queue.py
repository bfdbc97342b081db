"""The queue of one GPU: the silence of its trials, and the nodes that are expected back."""

import pytest
from fakes.scheduled_cluster import DESK, SPEC, node

from orchestrator.planning.cluster_resources import ClusterResources
from orchestrator.planning.plan import trial_task
from orchestrator.scheduling.node_queue import SILENT_SECONDS, GpuQueue, RunningTrial, Task
from trials.profile_trial import PROFILE_TIMEOUTS, ProfileTask
from trials.records.profile import ProfileRule

TRIAL = trial_task(SPEC, SPEC.merged_catalog(), DESK[0], [])
PROFILE = ProfileTask(trial=TRIAL, rule=ProfileRule(), batch_sizes=(1,))


@pytest.mark.parametrize(("task", "probes"), [(TRIAL, 1.0), (PROFILE, PROFILE_TIMEOUTS)])
def test_a_running_trial_may_be_silent_for_a_build_and_a_probe(task: Task, probes: float) -> None:
    """A profile takes the time of several probes; a trial that waits may be silent for ever."""
    longest = TRIAL.build_timeout_seconds + probes * TRIAL.probe_timeout_seconds + SILENT_SECONDS
    running = RunningTrial(task, 50.0, is_running=True)
    assert running.silence(50.0 + longest) is None
    assert f"{longest:g} s" in (running.silence(50.0 + longest + 1) or "")
    assert RunningTrial(task, 50.0).silence(1e9) is None


def test_only_nodes_with_the_gpu_are_expected() -> None:
    """A node of another GPU, and one that has not started, have no place in the queue."""
    queue = GpuQueue({"CPU": 1.0, "desk": 1.0})
    queue.update_nodes(ClusterResources((node("n1", "desk"), node("n2", "lap"))), {})
    assert (queue.nodes, queue.expected_nodes) == ({"n1"}, {"n1"})


def test_an_excluded_node_is_the_first_to_be_replaced() -> None:
    """Otherwise nobody would wait for the one that can be trusted."""
    queue = GpuQueue({"CPU": 1.0, "desk": 1.0})
    queue.update_nodes(ClusterResources((node("n1", "desk"), node("n2", "desk"))), {})
    queue.update_nodes(ClusterResources((node("n3", "desk"),)), {"n2"})
    assert queue.expected_nodes == {"n1", "n3"}
