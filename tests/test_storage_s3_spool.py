"""Spools on this machine keep what a driver could not send; the next driver sends it."""

from pathlib import Path

import pytest
from builders.observations import observation
from builders.s3_runs import (
    URL,
    batches,
    killed_driver,
    one_line,
    script,
    spools,
    the_run,
)

from orchestrator.run_folder.observation_writer import ObservationWriter
from orchestrator.run_folder.run_folder import RunFolder


def test_what_a_killed_driver_could_not_send_is_sent_once_by_the_next_on_its_machine(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An incomplete line is dropped; meanwhile another machine's driver continued the run."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    killed_driver(first, 1, 2, 3)
    (spool,) = spools(first)
    with spool.open("ab") as file:
        file.write(b'{"cell": "ha')
    monkeypatch.setenv("HOME", str(second))
    with ObservationWriter(run) as writer:
        assert batches(run) == []
        assert writer.append(observation(2, seconds=1.0))
    monkeypatch.setenv("HOME", str(first))
    with ObservationWriter(the_run()) as writer:
        assert not writer.append(observation(3))
    seconds = {o.batch_size: o.seconds for o in the_run().observations()}
    assert seconds == {2: 1.0, 1: 2.0, 3: 2.0}
    assert len(the_run().observations()) == 3
    assert spools(first) == spools(second) == []


def test_a_damaged_spool_is_reported_with_its_line_and_kept(run: RunFolder, tmp_path: Path) -> None:
    """The run stays free for others."""
    killed_driver(tmp_path, 1)
    (spool,) = spools(tmp_path)
    spool.write_bytes(b"{}\n" + spool.read_bytes())
    text = one_line(lambda: ObservationWriter(run).__enter__())
    assert text.startswith(f"{spool}:1: ")
    assert spool.exists()
    assert not run.is_running()


def test_spool_that_cannot_be_made_is_an_error_and_leaves_the_run_free(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The error names the variable that moves the spool."""
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    text = one_line(lambda: ObservationWriter(run).__enter__())
    assert text.startswith(f"{tmp_path}/file/finetune-cost/spool/runs-")
    assert "XDG_STATE_HOME" in text
    assert not run.is_running()


FULL = """\
    import resource, signal, sys
    from builders.observations import observation
    from orchestrator.storage.run_storage import StoreError
    from orchestrator.storage.s3_log import S3Timings
    from orchestrator.storage.s3_storage import S3Storage
    from orchestrator.run_folder.observation_writer import ObservationWriter
    from orchestrator.run_folder.run_folder import RunFolder
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    run = RunFolder(sys.argv[1])
    run.storage = S3Storage(run.path, S3Timings(send_seconds=1000.0))
    room, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ObservationWriter(run) as writer:
        writer.append(observation(1))
        spool, content = run.storage._log.spooled()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(content) + 10, hard))
        try:
            writer.append(observation(2))
        except StoreError as error:
            print(error)
        print(spool, spool.read_bytes() == content)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        print(writer.append(observation(2)))
"""


def test_a_full_disk_on_the_way_to_the_bucket_is_an_error_and_loses_nothing(run: RunFolder) -> None:
    """A limit on the spool's size stands for the disk; with room again, the driver continues."""
    error, whole, again = script(FULL, URL).stdout.splitlines()
    spool, _, is_whole = whole.rpartition(" ")
    assert error.startswith(f"{spool}: ")
    assert "File too large" in error
    assert (is_whole, again) == ("True", "True")
    assert batches(run) == [1, 2]
