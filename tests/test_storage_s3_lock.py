"""One driver at a time writes a run in a bucket."""

import os
import threading
from pathlib import Path

import pytest
from builders.observations import observation
from builders.runs import made_run
from builders.s3_runs import (
    LATER,
    URL,
    batches,
    killed_driver,
    one_line,
    spools,
    the_run,
    until,
)
from fakes.s3_server import S3Server

from orchestrator.run_folder.observation_writer import ObservationWriter
from orchestrator.run_folder.run_folder import RunFolder
from orchestrator.storage.run_storage import StoreError
from orchestrator.storage.s3_bucket import Bucket
from orchestrator.storage.s3_lock import LockHolder, RunLock


def test_a_second_driver_is_refused_with_the_name_of_the_first(run: RunFolder) -> None:
    """The first continues."""
    with ObservationWriter(run) as first:
        first.append(observation(1))
        assert the_run().is_running()
        text = one_line(lambda: ObservationWriter(the_run()).__enter__())
        assert text.startswith(f"{URL}: another sweep ")
        assert f"on {os.uname().nodename} (process {os.getpid()}, since 20" in text
        first.append(observation(2))
    assert batches(the_run()) == [1, 2]
    assert not the_run().is_running()


def test_one_of_several_drivers_that_start_at_once_gets_the_run(server: S3Server) -> None:
    """Their requests may interleave in any order."""
    locks = [RunLock(Bucket(URL, 5.0), 300.0) for _ in range(8)]
    start, got = threading.Barrier(len(locks)), list[RunLock]()

    def take(lock: RunLock) -> None:
        start.wait()
        try:
            lock.take()
        except StoreError:
            return
        got.append(lock)

    threads = [threading.Thread(target=take, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (holder,) = got
    assert len(server.objects("teams/one/lock/")) == 1
    holder.renew()
    holder.release()
    locks[0].take()


def test_a_lock_that_was_not_renewed_for_minutes_is_taken_over(
    server: S3Server, run: RunFolder, tmp_path: Path
) -> None:
    """A holder that is still alive stops, and its unsent observations are kept."""
    writer = ObservationWriter(the_run(LATER)).__enter__()
    log = writer._log
    writer.append(observation(1))
    ((name, _),) = server.objects("teams/one/lock/").items()
    server.age(f"teams/one/lock/{name}", 240)
    assert run.is_running()
    with pytest.raises(StoreError, match="another sweep"):
        ObservationWriter(run).__enter__()
    server.age(f"teams/one/lock/{name}", 61)
    assert not run.is_running()
    with ObservationWriter(run) as second:
        second.append(observation(2))
        log._next_renewal = 0.0
        log._wake.set()
        assert until(lambda: log._failure is not None)
        text = one_line(lambda: writer.append(observation(3)))
        spool = log._spool.path
        assert one_line(lambda: writer.__exit__(None, None, None)) == text
        assert text.startswith(f"{URL}: was taken over ")
        assert " 2 observations " in text
        assert f" {spool}: " in text
        assert run.is_running()
    with ObservationWriter(the_run()):
        pass
    assert batches(the_run()) == [2, 1, 3]
    assert spools(tmp_path) == []


def test_the_lock_of_a_process_that_is_gone_is_taken_over_at_once(
    server: S3Server, run: RunFolder, tmp_path: Path
) -> None:
    """This holds on its machine; on another, the error says when the lock expires."""
    killed_driver(tmp_path, 1)
    ((name, content),) = server.objects("teams/one/lock/").items()
    assert not run.is_running()
    elsewhere = LockHolder.model_validate_json(content).model_copy(
        update={"machine": "far", "host": "far"}
    )
    bucket = Bucket(URL, 1.0)
    bucket.put(f"lock/{name}", elsewhere.model_dump_json().encode())
    assert run.is_running()
    text = one_line(lambda: ObservationWriter(run).__enter__())
    assert ", on far (process " in text
    assert text.endswith(" in 5 min")
    bucket.put(f"lock/{name}", content)
    with ObservationWriter(run):
        assert run.is_running()


def test_a_damaged_lock_is_reported_by_name(server: S3Server) -> None:
    """It blocks the run, and is not changed."""
    run = made_run(URL)
    Bucket(URL, 1.0).put("lock/000009.json", b"{}")
    text = one_line(run.is_running)
    assert text.startswith(f"{URL}/lock/000009.json: ")
    assert text == one_line(ObservationWriter(run).__enter__)
    assert server.objects("teams/one/lock/")["000009.json"] == b"{}"
