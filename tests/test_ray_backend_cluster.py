"""A Ray that cannot be started or joined."""

from typing import Any

import pytest
import ray

from orchestrator.ray_backend.cluster import ClusterError, connected_cluster

TIMED_OUT = (
    "The current node timed out during startup. This could happen because some\nof the raylet"
)


@pytest.mark.parametrize(
    ("address", "begins", "remedy"),
    [
        ("local", "Ray cannot be started on this machine: The current node timed", "the same comm"),
        ("10.0.0.1:6379", "RAY_ADDRESS=10.0.0.1:6379 cannot be used: The current", "its token"),
        ("http://10.0.0.1", "RAY_ADDRESS=http://10.0.0.1 accepts jobs", "ray job submit"),
    ],
)
def test_a_ray_that_does_not_start_is_one_line_with_its_own_remedy(
    address: str, begins: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever named no address reads nothing of one."""

    def fail(**_: Any) -> None:
        raise Exception(TIMED_OUT)  # noqa: TRY002 - as Ray does

    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(ClusterError) as error, connected_cluster(ask_for_packages=False):
        pass
    message = str(error.value)
    assert message.startswith(begins)
    assert remedy in message
    assert "\n" not in message
    assert ("RAY_ADDRESS" in message) is (address != "local")


def test_a_ray_that_a_busy_machine_starts_late_is_started_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray itself waits for 30 s; the second start succeeds, and is the last."""
    starts: list[dict[str, Any]] = []

    def start(**settings: Any) -> None:
        starts.append(settings)
        if len(starts) == 1:
            raise Exception(TIMED_OUT)  # noqa: TRY002 - as Ray does

    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setattr(ray, "init", start)
    monkeypatch.setattr(ray, "nodes", list)
    monkeypatch.setattr("orchestrator.ray_backend.cluster.cluster_now", lambda **_: None)
    with connected_cluster(ask_for_packages=False):
        assert len(starts) == 2
    assert starts[0] == starts[1]
