"""The head of a cluster that a driver has joined: without it, the driver ends with one line."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

from orchestrator.ray_backend.own_ray import end_at_once

RECONNECT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
RECONNECT_SECONDS = 60.0  # Ray's default
EARLIER_SECONDS = 8.0  # than Ray, which would abort the driver with lines of its own
POLL_SECONDS = 1.0
ANSWER_SECONDS = 5.0


def check_answers(address: str) -> None:
    """Check that something accepts connections at HOST:PORT; Ray itself tries for minutes.

    Args:
        address: address of a cluster; ``auto`` is left to Ray.

    Raises:
        ConnectionError: nothing does.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConnectionError(f"nothing answers there ({reason})") from None


@contextlib.contextmanager
def watched_head(address: str) -> Iterator[None]:
    """Watch a cluster's head; the process ends if it is gone for nearly as long as Ray waits.

    Ray lets a head come back within a minute, then aborts the drivers (its issue 45570, closed).

    Args:
        address: address of the connected cluster.
    """
    import ray  # noqa: PLC0415 - seconds to import, and only a sweep needs it

    gcs = ray.get_runtime_context().gcs_address
    wait = _wait_seconds()
    is_left = threading.Event()

    def watch() -> None:
        answered = time.monotonic()
        while not is_left.wait(POLL_SECONDS):
            try:
                check_answers(gcs)
            except ConnectionError:
                if time.monotonic() > answered + wait and not is_left.is_set():
                    end_at_once(
                        f"RAY_ADDRESS={address}: the head has not answered for {wait:.0f} s: see "
                        "that it runs, and run the same command again, which continues where this "
                        "stopped"
                    )
            else:
                answered = time.monotonic()

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        is_left.set()


def _wait_seconds() -> float:
    """Longest time without an answer: less than Ray's own, which the environment may shorten."""
    try:
        rays = float(os.environ.get(RECONNECT_VARIABLE, RECONNECT_SECONDS))
    except ValueError:
        rays = RECONNECT_SECONDS
    return max(rays - EARLIER_SECONDS, rays / 2)
