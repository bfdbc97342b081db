"""A driver's log in a bucket loses nothing in an outage, and waits for no bucket without end."""

import logging
import os
import time
from pathlib import Path

import pytest
from builders.observations import observation
from builders.runs import ONE_CELL, made_run, spec_of
from builders.s3_runs import (
    LATER,
    PATIENT,
    URL,
    batches,
    one_line,
    spools,
    the_run,
    until,
)
from fakes.s3_server import S3Server

from orchestrator.cli.main import main
from orchestrator.planning.cluster_resources import ClusterResources, Node
from orchestrator.planning.faults import Fault, Faults
from orchestrator.planning.node_pricing import NodePrices, NodeRental
from orchestrator.run_folder.file_names import FAULTS
from orchestrator.run_folder.observation_writer import ObservationWriter
from orchestrator.run_folder.run_folder import RunFolder, open_run
from orchestrator.running.recorder import RunJournal
from orchestrator.storage.run_storage import StoreError
from orchestrator.storage.s3_log import S3Timings
from orchestrator.storage.s3_storage import S3Storage

RENTAL = NodeRental(provider="pit", instance="a", region="here", market="spot")


def test_what_was_appended_is_read_back_in_the_order_written(server: S3Server) -> None:
    """This driver and the next read the same; keys are written once, objects never changed."""
    open_run(URL, ONE_CELL, spec_of())
    with ObservationWriter(run := the_run(LATER)) as writer:
        assert [writer.append(observation(size)) for size in (2, 1, 2)] == [True, True, False]
        assert batches(run) == [2, 1]
    before = server.objects("teams/one/observations/")
    with ObservationWriter(run := the_run()) as writer:
        assert batches(run) == [2, 1]
        assert not writer.append(observation(1, seconds=9.0))
        assert writer.append(observation(3))
        assert batches(run) == [2, 1, 3]
    assert batches(run) == batches(the_run()) == [2, 1, 3]
    after = server.objects("teams/one/observations/")
    assert (len(before), len(after)) == (1, 2)
    assert after.items() > before.items()


def test_thousands_of_observations_are_a_handful_of_objects(server: S3Server) -> None:
    """A full object is sent at once; nothing stays on this machine."""
    open_run(URL, ONE_CELL, spec_of())
    with ObservationWriter(run := the_run(LATER)) as writer:
        for size in range(1, 1001):
            writer.append(observation(size))
    assert batches(run) == list(range(1, 1001))
    assert len(server.objects("teams/one/observations/")) <= 3
    assert spools(Path.home()) == []


def test_an_observation_that_is_synced_when_a_signal_comes_is_sent_by_the_next_driver(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ctrl-C comes between its two steps: it is on the disk, and not yet queued for the bucket."""
    sync = os.fsync

    def interrupted(descriptor: int) -> None:
        sync(descriptor)
        raise KeyboardInterrupt

    def sweep() -> None:
        with ObservationWriter(run) as writer, monkeypatch.context() as patch:
            writer.append(observation(1))
            patch.setattr(os, "fsync", interrupted)
            writer.append(observation(2))

    with pytest.raises(KeyboardInterrupt):
        sweep()
    assert batches(the_run()) == [1]
    with ObservationWriter(the_run()):
        pass
    assert batches(the_run()) == [1, 2]
    assert spools(tmp_path) == []


def test_outage_is_waited_out_while_measuring_goes_on(
    server: S3Server, run: RunFolder, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The log has one message at the start, with the spool, and one at the end."""
    caplog.set_level(logging.INFO, "orchestrator.storage")
    run.storage = S3Storage(URL, PATIENT)
    with ObservationWriter(run) as writer:
        writer.append(observation(1))
        assert until(lambda: batches(the_run()) == [1])
        requests, server.answers = len(server.requests), (404, "NoSuchBucket")
        writer.append(observation(2))
        writer.append(observation(3))
        assert until(lambda: len(server.requests) > requests + 1)
        assert batches(run) == [1, 2, 3]
        (spool,) = spools(tmp_path)
        server.answers = None
        assert until(lambda: batches(the_run()) == [1, 2, 3])
    outage, end = caplog.messages
    assert outage.startswith(f"{URL}: ")
    assert "NoSuchBucket" in outage
    assert outage.endswith(str(spool))
    assert end.startswith(f"{URL}: ")


def reasons(run: RunFolder) -> list[str]:
    """Reasons of the faults that a run has noted."""
    return [fault.reason for fault in run.faults().faults]


def journal_of(run: RunFolder, writer: ObservationWriter) -> RunJournal:
    """Journal of a driver."""
    return RunJournal(run, writer, NodePrices(spec_of().merged_catalog()))


def fault(reason: str) -> Fault:
    """A fault with this reason."""
    return Fault(kind="died", gpu="cpu", reason=reason, at="now", lost_seconds=1.0)


def test_a_fault_in_an_outage_is_noted_without_waiting_for_the_bucket(
    server: S3Server, run: RunFolder
) -> None:
    """One preempted node holds up no other trial; the fault is in the bucket afterwards."""
    run.storage = S3Storage(URL, PATIENT)
    with ObservationWriter(run) as writer:
        journal = journal_of(run, writer)
        server.answers = (503, "ServiceUnavailable")
        for reason in ("first", "second"):
            journal.record_fault(fault(reason))
        writer.append(observation(1))
        assert server.objects("teams/one/").keys().isdisjoint({FAULTS})
        requests = len(server.requests)
        assert until(lambda: len(server.requests) > requests + 1)
        server.answers = None
        assert until(lambda: len(the_run().faults().faults) == 2)
        journal.record_fault(fault("third"))
    assert reasons(the_run()) == ["first", "second", "third"]
    assert batches(the_run()) == [1]


@pytest.mark.parametrize(
    ("answer", "word"),
    [((503, "ServiceUnavailable"), "ServiceUnavailable"), ((200, ""), "proxies")],
)
def test_an_outage_beyond_its_limit_ends_the_sweep_and_loses_nothing(
    server: S3Server, run: RunFolder, tmp_path: Path, answer: tuple[int, str], word: str
) -> None:
    """The error says where the observations are; the same command then sends them.

    A proxy that answers every request with its page is an outage, too.
    """
    begun = time.monotonic()

    def sweep() -> None:
        with ObservationWriter(run) as writer:
            server.answers = answer
            for size in (1, 2):
                writer.append(observation(size))

    text = one_line(sweep)
    (spool,) = spools(tmp_path)
    assert text.startswith(f"{URL}: ")
    assert word in text
    assert " 2 observations " in text
    assert f" {spool}: " in text
    assert time.monotonic() - begun < 10
    server.answers = None
    server.age(
        f"teams/one/lock/{1:06d}.json", 301
    )  # this process is alive, so its lock would be valid
    with ObservationWriter(the_run()) as writer:
        assert not writer.append(observation(2))
    assert batches(the_run()) == [1, 2]
    assert spools(tmp_path) == []


def ended_in_an_outage(server: S3Server, *sizes: int) -> str:
    """Error of a sweep that cannot send a fault and observations because of an outage."""

    def sweep() -> None:
        with ObservationWriter(run := the_run()) as writer:
            journal = journal_of(run, writer)
            journal.record_fault(fault("first"))
            assert until(lambda: reasons(the_run()) == ["first"])
            server.answers = (503, "ServiceUnavailable")
            journal.record_fault(fault("second"))
            node = Node({}, None, "a", labels=RENTAL.labels)
            journal.record_nodes(ClusterResources((node,)))
            for size in sizes:
                writer.append(observation(size))

    text = one_line(sweep)
    server.answers = None
    lock = max(server.objects("teams/one/lock/"))
    server.age(f"teams/one/lock/{lock}", 301)  # this process is alive, so its lock would be valid
    return text


@pytest.mark.parametrize(
    ("sizes", "words"), [((), ""), ((1,), "1 observations, "), ((1, 2), "2 observations, ")]
)
def test_faults_of_an_outage_beyond_its_limit_are_kept_and_sent_by_the_next_driver(
    server: S3Server, run: RunFolder, tmp_path: Path, sizes: tuple[int, ...], words: str
) -> None:
    """So are the rented nodes, with and without observations."""
    text = ended_in_an_outage(server, *sizes)
    (folder,) = {path.parent for path in spools(tmp_path)}
    assert f" {words}faults.json, rented" in text
    assert f" {folder}: " in text
    server.age("teams/one/faults.json", 60)
    with ObservationWriter(again := the_run()) as writer:
        assert again.rented().nodes == {"a": RENTAL}
        journal_of(again, writer).record_fault(fault("third"))
    assert reasons(run) == ["first", "second", "third"]
    assert batches(the_run()) == list(sizes)
    assert spools(tmp_path) == []


def test_the_next_sweep_prices_nodes_as_noted_in_the_outage(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not overwrite the file that was kept."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    run, spec = made_run(URL), tmp_path / "made.yaml"
    spec.write_text(ONE_CELL, encoding="utf-8")
    ended_in_an_outage(server)
    assert main(["sweep", str(spec), "--out", str(URL)]) == 0
    assert run.rented().nodes == {"a": RENTAL}
    assert reasons(run) == ["first", "second"]


def test_a_sweep_that_fails_in_an_outage_raises_its_own_error_and_logs_the_spool(
    server: S3Server, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """It ends within seconds."""
    open_run(URL, ONE_CELL, spec_of())

    def sweep() -> None:
        with ObservationWriter(the_run(S3Timings(exit_seconds=0.3))) as writer:
            server.answers = (503, "ServiceUnavailable")
            writer.append(observation(1))
            raise StoreError("another")

    assert one_line(sweep) == "another"
    (spool,) = spools(tmp_path)
    assert f" {spool}: " in caplog.messages[-1]


def test_a_newer_file_of_another_sweep_is_not_overwritten(
    server: S3Server, run: RunFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The older file of the outage is discarded with a message."""
    ended_in_an_outage(server)
    for path in spools(tmp_path):
        os.utime(path, (time.time() - 60, time.time() - 60))
    run.write(FAULTS, Faults(faults=(fault("elsewhere"),)))
    caplog.clear()
    with ObservationWriter(the_run()):
        pass
    assert reasons(run) == ["elsewhere"]
    assert run.rented().nodes == {"a": RENTAL}
    [message] = caplog.messages
    assert message.startswith(f"{URL}/faults.json: ")
    assert spools(tmp_path) == []
