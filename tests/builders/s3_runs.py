"""Builders of runs in a bucket, and of drivers that are killed."""

import functools
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import botocore.session
import pytest
from botocore.loaders import create_loader
from fakes.s3_server import BUCKET, CREDENTIALS, KEY, SECRET, TOKEN, S3Server, s3_server

from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.storage.run_storage import S3Url, StoreError
from orchestrator.storage.s3_log import S3Timings
from orchestrator.storage.s3_storage import S3Storage

URL = S3Url(BUCKET, "teams/one")
LATER = S3Timings(send_seconds=1000.0)  # nothing is sent before the log is closed
QUICK = S3Timings(send_seconds=0.05, renew_seconds=0.1, retry_seconds=0.6, outage_seconds=0.8)
PATIENT = S3Timings(send_seconds=0.05, renew_seconds=0.1)
LOADER = functools.cache(create_loader)  # of botocore's descriptions, else read for each client
TESTS = Path(__file__).parent.parent


@contextmanager
def empty_bucket(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[S3Server]:
    """A server with an empty bucket, credentials for it, and an empty home."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(botocore.session, "create_loader", LOADER)
    with s3_server() as server:
        for name, value in (CREDENTIALS | {"AWS_ENDPOINT_URL": server.url}).items():
            monkeypatch.setenv(name, value)
        yield server


def the_run(timings: S3Timings = QUICK) -> RunFolder:
    """The run, as another process opens it."""
    run = RunFolder(URL)
    run.storage = S3Storage(URL, timings)
    return run


def batches(run: RunFolder) -> list[int]:
    """Batch sizes of the observations in a run."""
    return [o.batch_size for o in run.observations()]


def spools(home: Path) -> list[Path]:
    """Files that wait on a machine with this home."""
    return sorted(home.glob(".local/state/finetune-cost/spool/*/*"))


def one_line(attempt: Callable[[], object]) -> str:
    """Message of the StoreError that a call raises: one line, without a secret."""
    with pytest.raises(StoreError) as error:
        attempt()
    text = str(error.value)
    assert "\n" not in text
    assert not any(secret in text for secret in (KEY, SECRET, TOKEN))
    return text


def until(is_true: Callable[[], bool]) -> bool:
    """Whether a condition holds within ten seconds."""
    end = time.monotonic() + 10
    while not is_true() and time.monotonic() < end:
        time.sleep(0.01)
    return is_true()


def script(text: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Result of a Python program that can import the product and the tests' builders."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text), *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{TESTS.parent}:{TESTS}"} | environment,
    )


KILLED = """\
    import os, sys
    from builders.observations import observation
    from orchestrator.storage.s3_log import S3Timings
    from orchestrator.storage.s3_storage import S3Storage
    from orchestrator.run_folder.observation_writer import ObservationWriter
    from orchestrator.run_folder.run_folder import RunFolder
    run = RunFolder(sys.argv[1])
    run.storage = S3Storage(run.path, S3Timings(send_seconds=1000.0))
    with ObservationWriter(run) as writer:
        for size in sys.argv[2:]:
            writer.append(observation(int(size), seconds=2.0))
        os.kill(os.getpid(), 9)
"""


def killed_driver(home: Path, *sizes: int) -> None:
    """Run a driver on a machine with this home, and kill it before it has sent anything."""
    ended = script(KILLED, URL, *sizes, HOME=str(home))
    assert ended.returncode == -9, ended.stderr
