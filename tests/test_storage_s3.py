"""Run folders in a bucket: nothing is lost, doubled, written by two, waited for without end."""

import json
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from builders.observations import observation
from builders.runs import ONE_CELL, TWO_CELLS, made_run, spec_of
from fakes.s3_server import BUCKET, CREDENTIALS, KEY, SECRET, TOKEN, S3Server, s3_server

from orchestrator.cli.main import main
from orchestrator.planning.cluster_resources import ClusterResources, Node
from orchestrator.planning.faults import Fault, Faults
from orchestrator.planning.node_pricing import NodePrices, NodeRental
from orchestrator.run_folder.file_names import FAULTS
from orchestrator.run_folder.observation_writer import ObservationWriter
from orchestrator.run_folder.run_folder import RunFolder, open_run
from orchestrator.running.recorder import RunJournal
from orchestrator.storage import s3_storage as s3_place
from orchestrator.storage.run_storage import S3Url, StoreError
from orchestrator.storage.s3_bucket import Bucket
from orchestrator.storage.s3_lock import Holder, RunLock
from orchestrator.storage.s3_log import S3Timings
from orchestrator.storage.s3_storage import S3Storage

URL = S3Url(BUCKET, "teams/one")
RENTAL = NodeRental(provider="pit", instance="a", region="here", market="spot")
LATER = S3Timings(ship_seconds=1000.0)  # what is not sent on leaving is not sent at all
QUICK = S3Timings(ship_seconds=0.05, beat_seconds=0.1, patience_seconds=0.6, outage_seconds=0.8)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3Server]:
    """A bucket, and credentials for it; no files of the user's."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with s3_server() as server:
        for name, value in (CREDENTIALS | {"AWS_ENDPOINT_URL": server.url}).items():
            monkeypatch.setenv(name, value)
        yield server


def the_run(timings: S3Timings = QUICK) -> RunFolder:
    """The run, as another process finds it."""
    run = RunFolder(URL)
    run.storage = S3Storage(URL, timings)
    return run


@pytest.fixture
def run(server: S3Server) -> RunFolder:
    """A new run."""
    del server
    open_run(URL, ONE_CELL, spec_of())
    return the_run()


def batches(run: RunFolder) -> list[int]:
    """The batch sizes that are read back."""
    return [o.batch_size for o in run.observations()]


def spools(home: Path) -> list[Path]:
    """What waits on a machine."""
    return sorted(home.glob(".local/state/finetune-cost/spool/*/*"))


def one_line(attempt: Callable[[], object]) -> str:
    """Why it is refused; its words are one line, without a secret."""
    with pytest.raises(StoreError) as error:
        attempt()
    text = str(error.value)
    assert "\n" not in text
    assert not any(secret in text for secret in (KEY, SECRET, TOKEN))
    return text


def until(true: Callable[[], bool]) -> bool:
    """Whether it came true within some seconds."""
    end = time.monotonic() + 10
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return true()


def test_what_was_appended_is_read_back_in_the_order_written(server: S3Server) -> None:
    """By this driver and by the next; keys are written once, objects never changed."""
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
    """A full batch goes at once; nothing of it stays on this machine."""
    open_run(URL, ONE_CELL, spec_of())
    with ObservationWriter(run := the_run(LATER)) as writer:
        for size in range(1, 1001):
            writer.append(observation(size))
    assert batches(run) == list(range(1, 1001))
    assert len(server.objects("teams/one/observations/")) <= 3
    assert spools(Path.home()) == []


KILLED = """\
    import os, sys
    from builders.observations import observation
    from orchestrator.storage.run_storage import S3Url
    from orchestrator.storage.s3_log import S3Timings
    from orchestrator.storage.s3_storage import S3Storage
    from orchestrator.run_folder.observation_writer import ObservationWriter
    from orchestrator.run_folder.run_folder import RunFolder
    run = RunFolder(sys.argv[1])
    run.storage = S3Storage(run.path, S3Timings(ship_seconds=1000.0))
    with ObservationWriter(run) as writer:
        for size in sys.argv[2:]:
            writer.append(observation(int(size), seconds=2.0))
        os.kill(os.getpid(), 9)
"""


def killed_driver(home: Path, *sizes: int) -> None:
    """A driver on the machine with this home, killed before it has sent anything."""
    here = Path(__file__).parent
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(URL), *map(str, sizes)],
        check=False,
        env=os.environ | {"PYTHONPATH": f"{here.parent}:{here}", "HOME": str(home)},
    )
    assert ended.returncode == -9


def test_what_a_killed_driver_could_not_send_is_sent_once_by_the_next_on_its_machine(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a line it left is dropped; another machine's driver went on without it meanwhile."""
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
    found = {o.batch_size: o.seconds for o in the_run().observations()}
    assert found == {2: 1.0, 1: 2.0, 3: 2.0}
    assert len(the_run().observations()) == 3
    assert spools(first) == spools(second) == []


@pytest.mark.parametrize("kept_bytes", [0, 5000, 10**6])
def test_a_long_run_is_read_a_few_files_at_a_time_and_again(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, kept_bytes: int
) -> None:
    """However many of them are kept for the next time."""
    monkeypatch.setattr(s3_place, "AT_ONCE", 2)
    monkeypatch.setattr(s3_place, "MOST_KEPT_BYTES", kept_bytes)
    for size in range(1, 6):
        with ObservationWriter(the_run()) as writer:
            writer.append(observation(size))
    for _ in range(2):
        assert sorted(batches(run)) == [1, 2, 3, 4, 5]


def test_a_damaged_spool_is_told_with_its_line_and_kept(run: RunFolder, tmp_path: Path) -> None:
    """And the run is free for others."""
    killed_driver(tmp_path, 1)
    (spool,) = spools(tmp_path)
    spool.write_bytes(b"{}\n" + spool.read_bytes())
    told = one_line(lambda: ObservationWriter(run).__enter__())
    assert told == f"{spool}:1: not an observation: restore the line or delete it"
    assert spool.exists()
    assert not run.is_running()


def test_spool_that_cannot_be_made_is_told_and_leaves_the_run_free(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the setting that moves it."""
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    told = one_line(lambda: ObservationWriter(run).__enter__())
    assert told.startswith(f"{tmp_path}/file/finetune-cost/spool/runs-")
    assert told.endswith(
        ": cannot be made: Not a directory: observations wait there for the bucket: set "
        "XDG_STATE_HOME to a folder that can be written"
    )
    assert not run.is_running()


def test_outage_is_waited_out_while_measuring_goes_on(
    server: S3Server, run: RunFolder, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Told once, with where observations are kept, and once when it is over."""
    run.storage = S3Storage(URL, S3Timings(ship_seconds=0.05, beat_seconds=0.1))
    with ObservationWriter(run) as writer:
        writer.append(observation(1))
        assert until(lambda: batches(the_run()) == [1])
        asked, server.answers = len(server.asked), (404, "NoSuchBucket")
        writer.append(observation(2))
        writer.append(observation(3))
        assert until(lambda: len(server.asked) > asked + 1)
        assert batches(run) == [1, 2, 3]
        (spool,) = spools(tmp_path)
        server.answers = None
        assert until(lambda: batches(the_run()) == [1, 2, 3])
    away, again = capsys.readouterr().err.splitlines()
    assert away.startswith(f"{URL}: there is no such bucket (NoSuchBucket): make it, or name anoth")
    assert away.endswith(f"; meanwhile observations are kept in {spool}")
    assert again == f"{URL}: answers again"


def test_what_goes_wrong_in_an_outage_is_noted_without_waiting_for_the_bucket(
    server: S3Server, run: RunFolder
) -> None:
    """Else one preempted node would hold up the trials of all: it is in the bucket afterwards."""
    run.storage = S3Storage(URL, S3Timings(ship_seconds=0.05, beat_seconds=0.1))
    with ObservationWriter(run) as writer:
        diary = RunJournal(run, writer, NodePrices(spec_of().merged_catalog()))
        server.answers = (503, "ServiceUnavailable")
        for reason in ("first", "second"):
            diary.record_fault(
                Fault(kind="died", gpu="cpu", reason=reason, at="now", lost_seconds=1.0)
            )
        writer.append(observation(1))
        assert server.objects("teams/one/").keys().isdisjoint({FAULTS})
        asked = len(server.asked)
        assert until(lambda: len(server.asked) > asked + 1)
        server.answers = None
        assert until(lambda: len(the_run().faults().faults) == 2)
        diary.record_fault(Fault(kind="died", gpu="cpu", reason="third", at="now"))
    assert [fault.reason for fault in the_run().faults().faults] == ["first", "second", "third"]
    assert batches(the_run()) == [1]


FULL = """\
    import resource, signal, sys
    from builders.observations import observation
    from orchestrator.storage.run_storage import S3Url, StoreError
    from orchestrator.storage.s3_log import S3Timings
    from orchestrator.storage.s3_storage import S3Storage
    from orchestrator.run_folder.observation_writer import ObservationWriter
    from orchestrator.run_folder.run_folder import RunFolder
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    run = RunFolder(sys.argv[1])
    run.storage = S3Storage(run.path, S3Timings(ship_seconds=1000.0))
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


def test_a_full_disk_on_the_way_to_the_bucket_is_told_and_loses_nothing(run: RunFolder) -> None:
    """A limit on the spool's size stands for the disk; with room again, it goes on."""
    here = Path(__file__).parent
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FULL), str(URL)],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{here.parent}:{here}"},
    )
    told, whole, again = ended.stdout.splitlines()
    spool, _, is_whole = whole.rpartition(" ")
    assert told == (
        f"{spool}: cannot be written: File too large: make room and run the same command again, it "
        "continues where this stopped"
    )
    assert (is_whole, again) == ("True", "True")
    assert batches(run) == [1, 2]


def test_outage_that_lasts_too_long_ends_the_sweep_in_a_line_and_loses_nothing(
    server: S3Server, run: RunFolder, tmp_path: Path
) -> None:
    """It tells where the observations lie and how to go on; the same command then sends them."""
    begun = time.monotonic()

    def sweep() -> None:
        with ObservationWriter(run) as writer:
            server.answers = (503, "ServiceUnavailable")
            for size in (1, 2):
                writer.append(observation(size))

    told = one_line(sweep)
    (spool,) = spools(tmp_path)
    assert told.startswith(f"{URL}: does not answer (ServiceUnavailable), for ")
    assert told.endswith(
        f"s now: 2 observations lie in {spool}: run the same command here when it answers, it "
        "sends them and goes on"
    )
    assert time.monotonic() - begun < 10
    server.answers = None
    server.age(f"teams/one/lock/{1:06d}.json", 301)  # this process lives on, and so would its lock
    with ObservationWriter(the_run()) as writer:
        assert not writer.append(observation(2))
    assert batches(the_run()) == [1, 2]
    assert spools(tmp_path) == []


def noted(run: RunFolder) -> list[str]:
    """What is told to have gone wrong."""
    return [fault.reason for fault in run.faults().faults]


def diary_of(run: RunFolder, writer: ObservationWriter) -> RunJournal:
    """A driver's."""
    return RunJournal(run, writer, NodePrices(spec_of().merged_catalog()))


def fault(reason: str) -> Fault:
    """Something that went wrong."""
    return Fault(kind="died", gpu="cpu", reason=reason, at="now", lost_seconds=1.0)


def ended_in_an_outage(server: S3Server, *sizes: int) -> str:
    """A sweep that notes faults and observes batches it cannot send; what it says in the end."""

    def sweep() -> None:
        with ObservationWriter(run := the_run()) as writer:
            diary = diary_of(run, writer)
            diary.record_fault(fault("first"))
            assert until(lambda: noted(the_run()) == ["first"])
            server.answers = (503, "ServiceUnavailable")
            diary.record_fault(fault("second"))
            node = Node({}, None, "a", labels=RENTAL.labels)
            diary.record_nodes(ClusterResources((node,)))
            for size in sizes:
                writer.append(observation(size))

    told = one_line(sweep)
    server.answers = None
    lock = max(server.objects("teams/one/lock/"))
    server.age(f"teams/one/lock/{lock}", 301)  # this process lives on, and so would its lock
    return told


@pytest.mark.parametrize(
    ("sizes", "words"), [((), ""), ((1,), "1 observations, "), ((1, 2), "2 observations, ")]
)
def test_what_went_wrong_in_an_outage_without_end_is_kept_and_sent_by_the_next(
    server: S3Server, run: RunFolder, tmp_path: Path, sizes: tuple[int, ...], words: str
) -> None:
    """With what nodes are rented as, and whether anything was observed meanwhile or not."""
    told = ended_in_an_outage(server, *sizes)
    (folder,) = {path.parent for path in spools(tmp_path)}
    assert f" s now: {words}faults.json, rented.json lie in {folder}: run the same command" in told
    server.age("teams/one/faults.json", 60)
    with ObservationWriter(again := the_run()) as writer:
        assert again.rented().nodes == {"a": RENTAL}
        diary_of(again, writer).record_fault(fault("third"))
    assert noted(run) == ["first", "second", "third"]
    assert batches(the_run()) == list(sizes)
    assert spools(tmp_path) == []


def test_the_next_sweep_prices_by_what_was_kept_in_the_outage(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And does not write its own over it."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    run, spec = made_run(URL), tmp_path / "made.yaml"
    spec.write_text(ONE_CELL, encoding="utf-8")
    ended_in_an_outage(server)
    assert main(["sweep", str(spec), "--out", str(URL)]) == 0
    assert run.rented().nodes == {"a": RENTAL}
    assert noted(run) == ["first", "second"]


def test_what_another_sweep_wrote_since_is_not_written_over(
    server: S3Server, run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It went on elsewhere: what is older is left out, and that is told."""
    ended_in_an_outage(server)
    for path in spools(tmp_path):
        os.utime(path, (time.time() - 60, time.time() - 60))
    run.write(FAULTS, Faults(faults=(fault("elsewhere"),)))
    capsys.readouterr()
    with ObservationWriter(the_run()):
        pass
    assert noted(run) == ["elsewhere"]
    assert run.rented().nodes == {"a": RENTAL}
    assert capsys.readouterr().err == (
        f"{URL}/faults.json: another sweep has written it since: what a sweep here could not send "
        "in an outage before that is left out\n"
    )
    assert spools(tmp_path) == []


def test_sweep_that_fails_in_an_outage_says_its_own_error_and_where_observations_lie(
    server: S3Server, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Within seconds."""
    open_run(URL, ONE_CELL, spec_of())

    def sweep() -> None:
        with ObservationWriter(the_run(S3Timings(leave_seconds=0.3))) as writer:
            server.answers = (503, "ServiceUnavailable")
            writer.append(observation(1))
            raise StoreError("another")

    assert one_line(sweep) == "another"
    (spool,) = spools(tmp_path)
    assert f"1 observations lie in {spool}: " in capsys.readouterr().err


def test_second_driver_is_refused_and_told_who_has_the_run(run: RunFolder) -> None:
    """The first goes on."""
    with ObservationWriter(run) as first:
        first.append(observation(1))
        assert the_run().is_running()
        told = one_line(lambda: ObservationWriter(the_run()).__enter__())
        assert f"{URL}: another sweep is writing to it, on {os.uname().nodename} (" in told
        assert f"process {os.getpid()}, since 20" in told
        first.append(observation(2))
    assert batches(the_run()) == [1, 2]
    assert not the_run().is_running()


def test_of_drivers_that_begin_at_once_one_gets_the_run(server: S3Server) -> None:
    """However they come in between each other."""
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


def test_lock_is_taken_over_when_its_holder_gave_no_sign_for_minutes(
    server: S3Server, run: RunFolder, tmp_path: Path
) -> None:
    """One that lives after all stops, and what it could not send is not lost."""
    writer = ObservationWriter(the_run(LATER)).__enter__()
    log = writer._log
    writer.append(observation(1))
    ((name, _),) = server.objects("teams/one/lock/").items()
    server.age(f"teams/one/lock/{name}", 240)
    assert run.is_running()
    with pytest.raises(StoreError, match="another sweep is writing to it"):
        ObservationWriter(run).__enter__()
    server.age(f"teams/one/lock/{name}", 61)
    assert not run.is_running()
    with ObservationWriter(run) as second:
        second.append(observation(2))
        log._next_beat = 0.0
        log._wake.set()
        assert until(lambda: log._gave_up is not None)
        told = one_line(lambda: writer.append(observation(3)))
        spool = log._spool.path
        assert one_line(lambda: writer.__exit__(None, None, None)) == told
        assert f"{URL}: was taken over by a sweep on {os.uname().nodename} (process " in told
        assert f": 2 observations lie in {spool}: run the same command here when that one" in told
        assert run.is_running()
    with ObservationWriter(the_run()):
        pass
    assert batches(the_run()) == [2, 1, 3]
    assert spools(tmp_path) == []


def test_lock_of_a_process_that_is_gone_is_taken_over_at_once(
    server: S3Server, run: RunFolder, tmp_path: Path
) -> None:
    """On its own machine; elsewhere nobody can know, and it is told when one may."""
    killed_driver(tmp_path, 1)
    ((name, content),) = server.objects("teams/one/lock/").items()
    assert not run.is_running()
    elsewhere = Holder.model_validate_json(content).model_copy(
        update={"machine": "far", "host": "far"}
    )
    bucket = Bucket(URL, 1.0)
    bucket.put(f"lock/{name}", elsewhere.model_dump_json().encode())
    assert run.is_running()
    told = one_line(lambda: ObservationWriter(run).__enter__())
    assert "another sweep is writing to it, on far (process " in told
    assert told.endswith("if it was killed, the same command goes on in 5 min")
    bucket.put(f"lock/{name}", content)
    with ObservationWriter(run):
        assert run.is_running()


def test_damaged_files_of_a_run_are_told_by_name(server: S3Server) -> None:
    """A lock, and a line of an object of observations."""
    run = made_run(URL)
    bucket = Bucket(URL, 1.0)
    bucket.put("lock/000009.json", b"{}")
    told = f"{URL}/lock/000009.json: not a lock: delete it, when no sweep runs"
    assert one_line(run.is_running) == one_line(ObservationWriter(run).__enter__) == told
    bucket.put("observations/000009-x-000001.jsonl", b"{}\n")
    assert one_line(the_run().observations) == (
        f"{URL}/observations/000009-x-000001.jsonl:1: not an observation (cell: Field required): "
        "restore the line or delete it"
    )
    assert server.objects("teams/one/lock/")["000009.json"] == b"{}"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, "NoSuchBucket"), "there is no such bucket (NoSuchBucket): make it, or name another"),
        ((403, "InvalidAccessKeyId"), "the AWS credentials are refused (InvalidAccessKeyId): set "),
        ((403, "SignatureDoesNotMatch"), "the AWS credentials are refused (SignatureDoesNotMatch)"),
        ((400, "ExpiredToken"), "the AWS credentials are refused (ExpiredToken): set AWS_PROFILE"),
        ((403, "AccessDenied"), "access is denied (AccessDenied): its credentials need s3:ListB"),
        ((403, "RequestTimeTooSkewed"), "this machine's clock is wrong (RequestTimeTooSkewed): "),
        ((501, "NotImplemented"), "its service knows no If-None-Match, which keeps a second sweep"),
        ((418, "Teapot"), "ListObjectsV2 was refused (Teapot): see what its service says of that"),
    ],
)
def test_a_no_is_told_in_one_line(
    server: S3Server, capsys: pytest.CaptureFixture[str], answer: tuple[int, str], words: str
) -> None:
    """At once, without the service's own words: they may repeat the request."""
    server.answers = answer
    assert main(["status", str(URL)]) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"{URL}: {words}")
    assert said.err.count("\n") == 1
    assert not any(secret in said.err for secret in (KEY, SECRET, TOKEN))
    assert said.out == ""


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"AWS_ACCESS_KEY_ID": None}, "no AWS credentials (NoCredentialsError): set AWS_PROFILE"),
        ({"AWS_SECRET_ACCESS_KEY": ""}, "no AWS credentials (PartialCredentialsError): set AWS_P"),
        ({"AWS_PROFILE": "none"}, "cannot be asked (ProfileNotFound): check the AWS configuration"),
        ({"AWS_ENDPOINT_URL": "nowhere"}, "cannot be asked (ValueError): check the AWS config"),
    ],
)
@pytest.mark.usefixtures("server")
def test_settings_that_cannot_work_are_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    settings: dict[str, str | None],
    words: str,
) -> None:
    """Before anything is asked."""
    for name, value in settings.items():
        if value is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, value)
    assert main(["rank", str(URL)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"{URL}: {words}")
    assert said.count("\n") == 1


@pytest.mark.usefixtures("server")
def test_bucket_nobody_answers_for_is_asked_for_a_while_and_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is waited for without end, and that it is waited is said."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    told = one_line(the_run(S3Timings(patience_seconds=2.0)).observations)
    away = (
        f"{URL}: cannot be reached (EndpointConnectionError; check the network, and "
        "AWS_ENDPOINT_URL if set)"
    )
    assert re.fullmatch(
        re.escape(away) + r", for [1-9]\d* s now: run the same command again later", told
    )
    assert capsys.readouterr().err == f"{away}; it is asked for up to 2 s\n"


def test_another_sweeps_run_is_refused_and_left_as_it_was(server: S3Server) -> None:
    """So is a folder of a bucket that holds other things."""
    made_run(URL)
    before = server.objects()
    told = one_line(lambda: open_run(URL, TWO_CELLS, spec_of(TWO_CELLS)))
    assert told.startswith(f"{URL}: is another sweep's run (cells differ): ")
    other = S3Url(BUCKET, "teams")
    told = one_line(lambda: open_run(other, ONE_CELL, spec_of()))
    assert told == f"{other}: holds 'one' but no run: choose another --out"
    assert one_line(lambda: RunFolder.existing(other)).endswith("it has no sweep.yaml")
    none = "s3://runs/none"
    assert one_line(lambda: RunFolder.existing(none)) == (
        f"{none}: no such run folder ('sweep --out {none}' makes one)"
    )
    assert server.objects() == before


def test_every_command_that_takes_a_run_takes_one_in_a_bucket(
    server: S3Server, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What they write is in the bucket, and what they say is what they say of a local one."""
    made_run(URL)
    local = made_run(tmp_path / "local").path
    for command in (
        ["status"],
        ["fit"],
        ["rank"],
        ["what-if", "--examples", "7"],
        ["plan"],
        ["plan", "--next"],
        ["report"],
        ["export", "--format", "ado"],
    ):
        said = []
        for run in (URL, local):
            assert main([command[0], str(run), *command[1:]]) == 0
            told = capsys.readouterr().out.replace(str(run), "RUN")
            said.append(re.sub("[ -]+", " ", told))  # tables are as wide as what is in them
        assert said[0] == said[1] != ""
    names = {path.name for path in local.iterdir() if path.name != "observations.jsonl"}
    held = server.objects("teams/one/")
    assert {name for name in held if "/" not in name} == names
    assert {
        "fits.json",
        "ranking.csv",
        "ranking.json",
        "report.md",
        "report.html",
        "ado.csv",
    } < names
    assert held["ranking.csv"] == (local / "ranking.csv").read_bytes()
    assert json.loads(held["ranking.json"])
    assert not any(secret.encode() in b"".join(held.values()) for secret in (KEY, SECRET, TOKEN))
