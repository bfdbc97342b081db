"""The Ray that a command starts on this machine: its folder, and its end before the command's."""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
from rich.console import Console

from orchestrator.ray_backend.errors import ClusterError, RayEndedError
from orchestrator.ray_backend.orphans import MARK, folder_of_own_ray, keep_logs, kill_marked

logger = logging.getLogger(__name__)

GCS = "gcs_server"
VITAL = (GCS, "raylet")  # of the processes of a Ray; others come back or are not missed
WATCH_SECONDS = 0.5
# Enough to leave a Ray that ended, with trials to be recorded, unless the driver waits for its GCS.
BLOCKED_SECONDS = 10.0
_vital: dict[str, psutil.Process] = {}
"""Vital processes of the Ray that this process started, by name; empty while it has none."""


@contextlib.contextmanager
def own_ray() -> Iterator[Path]:
    """A folder for every Ray that a command starts; it is removed in the end.

    If that is an error of Ray, the folder stays, and the error says where Ray's logs are.

    Yields:
        The folder, which is there.
    """
    with folder_of_own_ray() as folder:
        try:
            yield folder
        except ClusterError as error:
            raise type(error)(f"{error}{_place_of_logs(folder)}") from None


def report_logs(folder: Path) -> None:
    """Keep Ray's logs, and log where they are."""
    if logs := keep_logs(folder):
        logger.info("Ray's logs are in %s", logs)


def _place_of_logs(folder: Path | None) -> str:
    """The end of an error's message, with Ray's logs, which are kept."""
    logs = folder and keep_logs(folder)
    return f". Ray's logs are in {logs}" if logs else ""


@contextlib.contextmanager
def watched(folder: Path | None) -> Iterator[None]:
    """Watch the Ray that has been started; the process ends if it waits for a GCS that ended.

    Nothing interrupts a call into Ray that waits for its GCS: a minute later, Ray would abort the
    process with lines of its own (its issue 45570, closed).

    Args:
        folder: folder of that Ray; None for Ray's own.
    """
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if (name := process.name()) in VITAL:
                _vital[name] = process
    gcs, is_left = _vital.get(GCS), threading.Event()

    def watch() -> None:
        while gcs is not None and not is_left.wait(WATCH_SECONDS):
            if not _runs(gcs) and not is_left.wait(BLOCKED_SECONDS):
                end_at_once(
                    f"{_death(GCS)}: run the same command again, which continues where this "
                    f"stopped{_place_of_logs(folder)}"
                )

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        is_left.set()
        _vital.clear()


def end_at_once(reason: str) -> None:
    """End the process as an error does, whatever its other threads wait for."""
    logger.error(reason)
    Console(stderr=True).show_cursor()  # which a live table hides
    sys.stdout.flush()
    os._exit(1)


def _death(name: str) -> str:
    return (
        f"Ray on this machine has ended: its {name} died, as when it is killed or memory runs out"
    )


def check_own_ray() -> None:
    """Check that the Ray that this process started runs; nothing if it started none.

    Ray itself does not tell: trials would wait for ever for a node whose raylet ended.

    Raises:
        RayEndedError: one of its vital processes has ended.
    """
    for name, process in _vital.items():
        if not _runs(process):
            raise RayEndedError(_death(name))


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def end_interrupted_start() -> None:
    """End what a start of Ray that failed has left: Ray itself does so as Python ends."""
    if mark := os.environ.get(MARK):
        kill_marked(mark)
