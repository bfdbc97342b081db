"""Export of a run as a CSV of IBM's ado."""

from pathlib import Path

import pandas as pd
import pytest
from builders.observations import observation
from builders.runs import made_run

from fitting.tables.csv_table import read_csv
from fitting.tables.observations_table import read_frame
from orchestrator.cli.main import main
from orchestrator.run_folder.observation_writer import ObservationWriter
from orchestrator.run_folder.run_folder import RunFolder
from trials.records.observation import Outcome


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A made run in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    return made_run(tmp_path / "run")


def test_a_run_is_written_in_ados_columns_and_can_be_read(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file lies beside the observations; a failure for another reason than memory is no row."""
    with ObservationWriter(run) as writer:
        writer.append(observation(3, Outcome.FAILED))
    observations = run.observations()
    assert main(["export", "run", "--format", "ado"]) == 0
    path = Path("run/ado.csv")
    rows = len(observations) - 1
    shown = capsys.readouterr().out
    assert shown.startswith(f"{path}: {rows} observations")
    assert f" {rows} measured; 1 not" in shown
    assert shown.count("\n") == 1
    assert list(pd.read_csv(path)["basis"].unique()) == ["measured"]
    frame, _ = read_csv(path)
    read = read_frame(frame)
    steps = {o.batch_size: o.measurement for o in observations if o.measurement is not None}
    assert set(read.rows.batch_size) <= set(steps)
    # made_runs: 10 ms a step and 1 ms an example.
    assert read.rows.seconds.tolist() == pytest.approx(list(0.010 + 0.001 * read.rows.batch_size))


def test_the_file_may_be_named(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that cannot be written gives one line with its path."""
    del run
    assert main(["export", "run", "--format", "ado", "--out", "mine.csv"]) == 0
    assert Path("mine.csv").exists()
    assert main(["export", "run", "--format", "ado", "--out", "no/where.csv"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("no/where.csv: ")
    assert err.count("\n") == 1
    assert main(["export", "none", "--format", "ado"]) == 1
    assert "none: no such run folder" in capsys.readouterr().err
