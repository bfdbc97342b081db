"""A Ray that cannot be started or joined."""

import contextlib
import socket
from typing import Any

import pytest
import ray

from orchestrator.ray_backend import cluster
from orchestrator.ray_backend.cluster import connected_cluster
from orchestrator.ray_backend.errors import ClusterError

TIMED_OUT = (
    "The current node timed out during startup. This could happen because some\nof the raylet"
)


@pytest.mark.parametrize(
    ("address", "begins", "remedy"),
    [
        ("local", "Ray cannot be started on this machine: The current node timed", "the same comm"),
        ("10.0.0.1:6379", "RAY_ADDRESS=10.0.0.1:6379 cannot be used: The current", "its token"),
        ("http://10.0.0.1", "RAY_ADDRESS=http://10.0.0.1 accepts jobs", "ray job submit"),
        ("ray://10.0.0.1:1", "RAY_ADDRESS=ray://10.0.0.1:1 is for Ray's client", "on the head"),
    ],
)
def test_a_ray_that_does_not_start_is_one_line_with_its_own_remedy(
    address: str, begins: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever named no address reads nothing of one."""

    def fail(**_: Any) -> None:
        raise Exception(TIMED_OUT)  # noqa: TRY002 - as Ray does

    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(cluster, "check_answers", lambda _: None)
    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(ClusterError) as error, connected_cluster(ask_for_packages=False):
        pass
    message = str(error.value)
    assert message.startswith(begins)
    assert remedy in message
    assert "\n" not in message
    assert ("RAY_ADDRESS" in message) is (address != "local")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "no-such-host.invalid"])
def test_an_address_where_nothing_answers_is_one_line_at_once(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would try for two minutes, and print lines of its own."""
    with socket.socket() as free:  # bound and not listening: connections are refused
        free.bind(("127.0.0.1", 0))
        address = f"{host}:{free.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray was asked"))
        with pytest.raises(ClusterError) as error, connected_cluster(ask_for_packages=False):
            pass
    message = str(error.value)
    assert message.startswith(f"RAY_ADDRESS={address} cannot be used: nothing answers there (")
    assert "unset RAY_ADDRESS" in message
    assert "\n" not in message


@pytest.mark.parametrize("address", ["auto", "LISTENING"])
def test_other_addresses_are_left_to_ray(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One where something listens, and one that Ray resolves itself."""
    joined: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = address.replace("LISTENING", f"127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("RAY_ADDRESS", address)
        monkeypatch.setattr(ray, "init", lambda **settings: joined.append(settings["address"]))
        monkeypatch.setattr(cluster, "cluster_now", lambda **_: None)
        monkeypatch.setattr(cluster, "watched_head", contextlib.nullcontext)
        with connected_cluster(ask_for_packages=False):
            assert joined == [address]


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
