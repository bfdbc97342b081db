"""The head of a cluster that a driver has joined."""

import socket
import time
from types import SimpleNamespace

import pytest
import ray

from orchestrator.ray_backend import head
from orchestrator.ray_backend.head import RECONNECT_VARIABLE, watched_head


@pytest.mark.parametrize("reconnect_seconds", ["", "a minute", "8", "0.2", "0"])
def test_a_driver_goes_on_while_its_head_answers(
    reconnect_seconds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However short a time Ray is told to wait for the head, and whether that is a number."""
    ended: list[str] = []
    monkeypatch.setattr(head, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(head, "end_at_once", ended.append)
    monkeypatch.setenv(RECONNECT_VARIABLE, reconnect_seconds)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        context = SimpleNamespace(gcs_address=address)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
        with watched_head(address):
            time.sleep(0.2)
            assert ended == []


def test_a_driver_ends_before_ray_would_abort_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Ray's own wait is shorter than the usual lead."""
    ended: list[float] = []
    monkeypatch.setattr(head, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(head, "end_at_once", lambda _: ended.append(time.monotonic()))
    monkeypatch.setenv(RECONNECT_VARIABLE, "4")
    with socket.socket() as free:  # bound and not listening: connections are refused
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        context = SimpleNamespace(gcs_address=address)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
        begun = time.monotonic()
        with watched_head(address):
            while not ended and time.monotonic() < begun + 10:
                time.sleep(0.01)
    assert 1.9 < ended[0] - begun < 4
