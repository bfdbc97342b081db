"""A cloud's notice, read over HTTP from its metadata service, drains the node in Ray."""

import logging
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.metadata_server import NAME, Metadata, metadata_server

from orchestrator.clouds.preemption_notice import notice, wait_for_notice


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    """A service that announces nothing yet."""
    with metadata_server() as metadata:
        yield metadata


@pytest.mark.parametrize("provider", ["aws", "gcp", "azure"])
def test_a_machine_that_may_stay_has_no_notice(provider: str, metadata: Metadata) -> None:
    """The service is asked without a proxy of the environment."""
    assert notice(provider, metadata.address) is None
    assert metadata.requests > 0


def test_aws_announces_the_time(metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two minutes ahead, with a token of the service, and past any proxy."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    metadata.spot_action_in = 120
    announced = notice("aws", metadata.address)
    assert announced is not None
    assert "(terminate)" in announced.reason
    assert 100 < announced.seconds <= 120
    metadata.spot_action_in = -30
    late = notice("aws", metadata.address)
    assert late is not None
    assert late.seconds == 0


def test_google_announces_no_time(metadata: Metadata) -> None:
    """A spot machine has half a minute, a machine with a GPU an hour before maintenance."""
    metadata.maintenance = "MIGRATE_ON_HOST_MAINTENANCE"
    assert notice("gcp", metadata.address) is None
    metadata.maintenance = "TERMINATE_ON_HOST_MAINTENANCE"
    mended = notice("gcp", metadata.address)
    assert mended is not None
    assert mended.seconds == 3600
    metadata.preempted = "TRUE"
    taken = notice("gcp", metadata.address)
    assert taken is not None
    assert taken.seconds == 30


def test_events_of_azure_for_other_machines_are_ignored(metadata: Metadata) -> None:
    """So is an event that passes in seconds."""
    metadata.event("Preempt", "ray-finetune-cost-worker-2", 30)
    metadata.event("Freeze", NAME, 900)
    assert notice("azure", metadata.address) is None
    metadata.event("Preempt", NAME, 31)
    announced = notice("azure", metadata.address)
    assert announced is not None
    assert "(Preempt)" in announced.reason
    assert 10 < announced.seconds <= 31
    metadata.events.clear()
    metadata.event("Preempt", NAME, None)
    begun = notice("azure", metadata.address)
    assert begun is not None
    assert begun.seconds == 0


@pytest.mark.parametrize(
    ("provider", "answer"),
    [
        ("aws", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"),  # it breaks off
        ("aws", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]"),
        ("azure", b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nnull"),
        ("gcp", b"what?\r\n\r\n"),
    ],
)
def test_it_survives_an_invalid_answer(
    provider: str, answer: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing else waits for the notice."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline().strip():
                pass
            self.wfile.write(answer)

    def sleep(seconds: float) -> None:
        raise InterruptedError(seconds)

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            with pytest.raises(InterruptedError):  # it waits, to ask again
                wait_for_notice(
                    provider, f"http://127.0.0.1:{server.server_address[1]}", "a", sleep
                )
        finally:
            server.shutdown()
            thread.join()
    assert f"{provider}'s metadata service" in caplog.text


def test_it_goes_on_until_ray_has_agreed(
    metadata: Metadata,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The service does not answer for a while, and Ray refuses once."""
    caplog.set_level(logging.INFO)
    ray = tmp_path / "ray"
    ray.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/asked\n'
        f"test -e {tmp_path}/refused && exit 0\ntouch {tmp_path}/refused\n"
        "echo not now >&2\nexit 1\n",
        encoding="utf-8",
    )
    ray.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    metadata.is_down = True
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        metadata.is_down = len(waited) < 2
        metadata.preempted = "TRUE" if len(waited) > 3 else "FALSE"

    wait_for_notice("gcp", metadata.address, "ab12", sleep)
    assert waited == [5.0] * 5
    command, reason, message, *options = (tmp_path / "asked").read_text().splitlines()
    assert (command, reason) == ("drain-node", "--reason=DRAIN_NODE_REASON_PREEMPTION")
    assert message.startswith("--reason-message=Google ")
    assert options == ["--deadline-remaining-seconds=30", "--node-id=ab12"]
    assert len(caplog.messages) == 4  # the outage once, the drain twice, Ray's refusal
    assert "HTTP Error 503" in caplog.messages[0]
    assert "drain-node: not now" in caplog.messages[2]
