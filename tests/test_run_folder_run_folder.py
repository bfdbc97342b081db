"""The run folder: no observation is lost, duplicated or mixed with another sweep's."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders.observations import observation
from builders.runs import ONE_CELL, TWO_CELLS, made_run, spec_of

from orchestrator.run_folder.observation_writer import ObservationWriter
from orchestrator.run_folder.run_folder import RunFolder, open_run
from orchestrator.storage.local_storage import OBSERVATIONS
from orchestrator.storage.run_storage import StoreError
from trials.records.observation import Observation

FILE = "observations.jsonl"
NOBODY = 65534


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A new run folder."""
    return open_run(tmp_path / "run", ONE_CELL, spec_of())


def append(run: RunFolder, *batch_sizes: int) -> None:
    """Append one observation of each batch size with one writer."""
    with ObservationWriter(run) as writer:
        for batch_size in batch_sizes:
            writer.append(observation(batch_size))


def batches(run: RunFolder) -> list[int]:
    """The batch sizes that are read back."""
    return [o.batch_size for o in run.observations()]


def state(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every path in a folder, with its content and time of change."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in (folder, *folder.rglob("*"))
    }


def refusal(folder: Path, text: str = ONE_CELL) -> str:
    """The one-line reason why a sweep may not use a folder."""
    with pytest.raises(StoreError) as error:
        open_run(folder, text, spec_of(text))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_observations_read_back_in_the_order_written(run: RunFolder) -> None:
    """The same driver and the next one read equal records."""
    written = [observation(2), observation(1), observation(2, repeat=1)]
    with ObservationWriter(run) as writer:
        assert [writer.append(o) for o in written] == [True, True, True]
        assert run.observations() == written
    assert run.observations() == written


def test_observation_is_in_the_file_before_append_returns(run: RunFolder) -> None:
    """A driver killed right afterwards loses nothing: no exit handler runs here."""
    program = """\
        import os, sys
        from pathlib import Path
        from builders.observations import observation
        from orchestrator.run_folder.observation_writer import ObservationWriter
        from orchestrator.run_folder.run_folder import RunFolder
        with ObservationWriter(RunFolder(Path(sys.argv[1]))) as writer:
            writer.append(observation(3))
            os.kill(os.getpid(), 9)
    """
    assert child(program, run.path).returncode == -9
    assert batches(run) == [3]
    append(run, 4)
    assert batches(run) == [3, 4]


def test_observation_of_the_same_key_is_written_once(run: RunFolder) -> None:
    """This holds within a driver and for a later one; another attempt is another observation."""
    append(run, 1, 1)
    with ObservationWriter(run) as writer:
        assert not writer.append(observation(1, seconds=9.0))
        assert writer.append(observation(1, attempt=2))
    assert [o.attempt for o in run.observations()] == [1, 2]


def test_a_line_that_is_in_the_log_twice_counts_once(run: RunFolder) -> None:
    """As after a log was appended to itself by hand."""
    append(run, 1, 2)
    log = run.path / OBSERVATIONS
    log.write_bytes(2 * log.read_bytes())
    assert batches(run) == [1, 2]


@pytest.mark.parametrize("kept", [1, 50, -2, -1], ids=["a byte", "half", "brace", "newline"])
def test_torn_last_line_is_skipped_by_readers_and_dropped_by_the_next_writer(
    run: RunFolder, kept: int
) -> None:
    """The tear may be at any byte; every line before it stays."""
    append(run, 1, 2)
    file = run.path / FILE
    whole = file.read_bytes()
    file.write_bytes(whole + (observation(3).model_dump_json().encode() + b"\n")[:kept])
    torn = file.read_bytes()
    assert batches(run) == [1, 2]
    assert file.read_bytes() == torn
    with ObservationWriter(run) as writer:
        assert file.read_bytes() == whole
        assert writer.append(observation(3))
    assert file.read_bytes().startswith(whole)
    assert batches(run) == [1, 2, 3]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"cell"', "Invalid JSON"),
        (b"", "Invalid JSON"),
        (b"\xff\xfe", "Invalid JSON"),
        (b"{}", "cell: Field required"),
    ],
)
def test_damaged_line_before_the_last_is_reported_by_its_number(
    run: RunFolder, line: bytes, reason: str
) -> None:
    """Readers and writers report it; nothing is deleted and the folder is not left locked."""
    append(run, 1, 2)
    file = run.path / FILE
    first, second = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first + line + b"\n" + second)
    before = state(run.path)
    with pytest.raises(StoreError, match=r"observations\.jsonl:2: not an observation") as error:
        run.observations()
    assert reason in str(error.value)
    with pytest.raises(StoreError, match=r"observations\.jsonl:2: "), ObservationWriter(run):
        pytest.fail("a damaged run was opened for writing")
    assert state(run.path) == before
    assert not run.is_running()


def test_second_writer_is_refused_and_the_first_goes_on(run: RunFolder) -> None:
    """The second writer, in this process or another, gets one line."""
    program = """\
        import sys
        from pathlib import Path
        from orchestrator.run_folder.observation_writer import ObservationWriter
        from orchestrator.run_folder.run_folder import RunFolder
        from orchestrator.storage.run_storage import StoreError
        try:
            ObservationWriter(RunFolder(Path(sys.argv[1]))).__enter__()
        except StoreError as error:
            sys.exit(f"refused: {error}")
    """
    words = f"{run.path}: another sweep is writing to it: wait for it, or stop it"
    with ObservationWriter(run) as first:
        first.append(observation(1))
        assert run.is_running()
        with pytest.raises(StoreError) as error, ObservationWriter(run):
            pytest.fail("two writers")
        assert str(error.value) == words
        assert child(program, run.path).stderr == f"refused: {words}\n"
        first.append(observation(2))
    assert batches(run) == [1, 2]
    assert not run.is_running()
    assert child(program, run.path).returncode == 0


def test_another_sweeps_folder_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    """The error names the differing parts."""
    run = made_run(tmp_path / "run")
    before = state(run.path)
    other = TWO_CELLS.replace("max_batch_size: 64", "seed: 5\nmax_batch_size: 64")
    assert refusal(run.path, other).startswith(f"{run.path}: ")
    assert "(cells, seed differ)" in refusal(run.path, other)
    assert state(run.path) == before


def test_sweep_whose_model_was_changed_since_is_refused_and_the_run_left_as_it_was(
    tmp_path: Path,
) -> None:
    """Two models of one name would share their cells."""
    model = tmp_path / "model"
    text = ONE_CELL.replace("llama-tiny", str(model))
    write_model(model, num_hidden_layers=2)
    run = open_run(tmp_path / "run", text, spec_of(text))
    before = state(run.path)
    write_model(model, num_hidden_layers=3)
    assert f"(models {model} differ)" in refusal(run.path, text)
    assert state(run.path) == before
    assert open_run(run.path, text, run.spec()).spec() == run.spec()


def write_model(folder: Path, **config: int) -> None:
    """Write a folder with the configuration of a model."""
    folder.mkdir(exist_ok=True)
    config |= {"vocab_size": 8, "num_attention_heads": 2}
    text = json.dumps({"model_type": "llama"} | config)
    (folder / "config.json").write_text(text, encoding="utf-8")


def test_the_same_sweep_in_another_notation_resumes(tmp_path: Path) -> None:
    """Comments and order do not matter; the first text is kept."""
    run = made_run(tmp_path / "run")
    before = state(run.path)
    again = open_run(run.path, "# again\n" + ONE_CELL, spec_of("# again\n" + ONE_CELL))
    assert state(run.path) == before
    assert again.observations() == run.observations() != []


def test_folder_with_other_files_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    """A run never mixes with other files."""
    (tmp_path / "thesis.tex").write_text("years of work", encoding="utf-8")
    before = state(tmp_path)
    reason = refusal(tmp_path)
    assert reason.startswith(f"{tmp_path}: ")
    assert "'thesis.tex'" in reason
    assert "--out" in reason
    assert state(tmp_path) == before


def test_folder_of_a_run_that_never_began_is_used(tmp_path: Path) -> None:
    """A driver killed before it wrote its specification leaves at most a partial file."""
    (tmp_path / ".sweep.yaml.part").write_text("name: ma", encoding="utf-8")
    assert open_run(tmp_path, ONE_CELL, spec_of()).spec() == spec_of()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models.json", "sweep.yaml"]


def test_run_whose_specification_was_damaged_is_refused(run: RunFolder) -> None:
    """The error names the mistake."""
    (run.path / "sweep.yaml").write_text(ONE_CELL.replace("[16]", "[0]"), encoding="utf-8")
    with pytest.raises(StoreError, match=r"sweep\.yaml:6: cells\[0\]\.seq_lens\[0\]: must be at"):
        open_run(run.path, ONE_CELL, spec_of())


def test_place_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    """A file, a path below a file, and a name too long for a file system."""
    file = tmp_path / "file"
    file.write_text("mine", encoding="utf-8")
    for place in (file, file / "run"):
        assert refusal(place).startswith(f"{place}: is a file")
    assert "File name too long" in refusal(tmp_path / ("x" * 300))
    assert state(tmp_path).keys() == {".", "file"}


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("none", "no such run folder ('sweep --out {path}' creates it)"),
        (".", "not a run folder: it has no sweep.yaml"),
        ("file", "is a file, or below one: give a folder"),
    ],
)
def test_reading_a_folder_without_a_run_is_one_line(tmp_path: Path, place: str, words: str) -> None:
    """Reading creates nothing."""
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    path = tmp_path / place
    before = state(tmp_path)
    with pytest.raises(StoreError) as error:
        RunFolder.existing(path)
    assert str(error.value) == f"{path}: {words.format(path=path)}"
    assert state(tmp_path) == before


@pytest.fixture
def nobody(run: RunFolder) -> Iterator[None]:
    """A user who may neither read nor write the run, which belongs to root."""
    if os.geteuid() == 0:
        append(run, 1)
        for path in (run.path / FILE, run.path):
            path.chmod(0o700)
        for path in run.path.parents[:3]:
            path.chmod(0o755)
        os.seteuid(NOBODY)
        yield
        os.seteuid(0)
    else:
        append(run, 1)
        (run.path / FILE).chmod(0)
        run.path.chmod(0)
        yield
        run.path.chmod(0o700)


@pytest.mark.usefixtures("nobody")
def test_folder_without_permission_is_one_line(run: RunFolder) -> None:
    """Reading, starting and writing all report it."""
    attempts = {
        "existing": lambda: RunFolder.existing(run.path),
        "open": lambda: open_run(run.path, ONE_CELL, spec_of()),
        "open below": lambda: open_run(run.path / "run", ONE_CELL, spec_of()),
        "observations": run.observations,
        "plan": run.plan,
        "running": run.is_running,
        "append": lambda: append(run, 2),
        "write": lambda: run.write("report.md", "hello"),
    }
    for attempt in attempts.values():
        with pytest.raises(StoreError, match=r"cannot be [a-z ]+: Permission denied$"):
            attempt()


def child(program: str, *arguments: Path | str) -> subprocess.CompletedProcess[str]:
    """A separate process that runs a program with this repository's modules."""
    here = Path(__file__).parent
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": f"{here.parent}{os.pathsep}{here}"},
    )


def test_full_disk_is_reported_and_loses_no_earlier_observation(run: RunFolder) -> None:
    """A file size limit stands in for the disk: the first write is partial, the next fails."""
    append(run, 1)
    whole = (run.path / FILE).read_bytes()
    program = """\
        import resource, signal, sys
        from pathlib import Path
        from builders.observations import observation
        from orchestrator.run_folder.observation_writer import ObservationWriter
        from orchestrator.run_folder.run_folder import RunFolder
        from orchestrator.storage.run_storage import StoreError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        run, room = RunFolder(Path(sys.argv[1])), int(sys.argv[2])
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        with ObservationWriter(run) as writer:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
            for name, act in (
                ("append", lambda: writer.append(observation(2))),
                ("write", lambda: run.write("sweep.yaml", "x" * 2 * room)),
            ):
                try:
                    act()
                except StoreError as error:
                    print(name, error)
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            print(Path(run.path, "observations.jsonl").stat().st_size)
            print(writer.append(observation(2)))
    """
    ended = child(program, run.path, str(len(whole) + 10))
    append_words, write_words, *after = ended.stdout.splitlines()
    assert append_words.startswith(f"append {run.path / FILE}: ")
    assert "File too large" in append_words
    assert write_words.startswith(f"write {run.path / 'sweep.yaml'}: ")
    assert "File too large" in write_words
    assert after == [str(len(whole)), "True"]
    assert (run.path / FILE).read_bytes().startswith(whole)
    assert batches(run) == [1, 2]
    assert run.spec() == spec_of()
    assert {path.name for path in run.path.iterdir()} == {"models.json", "sweep.yaml", FILE}


def test_write_replaces_a_file_as_a_whole(run: RunFolder) -> None:
    """A reader with the old file open keeps reading the old one."""
    target = run.write("report.md", "old " * 1000)
    with target.open(encoding="utf-8") as reader:
        assert reader.read(4) == "old "
        assert run.write("report.md", "né") == target
        assert set(reader.read().split()) == {"old"}
    assert target.read_bytes() == "né".encode()
    assert {path.name for path in run.path.iterdir()} == {"models.json", "sweep.yaml", "report.md"}


def test_writing_over_a_folder_is_an_error_and_leaves_nothing(run: RunFolder) -> None:
    """A record is JSON that reads back; it cannot replace a folder."""
    record = observation(1)
    path = run.write("one.json", record)
    assert Observation.model_validate_json(path.read_bytes()) == record
    (run.path / "report.md").mkdir()
    with pytest.raises(StoreError, match=r"report\.md: cannot be written: Is a directory"):
        run.write("report.md", "x")
    names = {p.name for p in run.path.iterdir()}
    assert names == {"models.json", "sweep.yaml", "one.json", "report.md"}


def test_plan_is_absent_before_planning_and_an_error_when_damaged(run: RunFolder) -> None:
    """The error has the remedy."""
    assert run.plan() is None
    (run.path / "plan.json").write_text('{"complete": []}', encoding="utf-8")
    with pytest.raises(StoreError) as error:
        run.plan()
    assert str(error.value).startswith(f"{run.path / 'plan.json'}: not a plan (pending: ")
