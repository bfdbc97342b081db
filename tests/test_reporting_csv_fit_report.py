"""``fit`` on a CSV: report, files and mistakes."""

import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from builders.runs import made_run

from fitting.fit import Fits
from fitting.paper.published import DATA
from orchestrator.cli.main import main

HEAD = "GPU,Model,Sparsity,Sequence length,Batch size,Examples/s\n"


@pytest.fixture(autouse=True)
def _somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)


def rows_of(gpu: str, model: str = "m", floor: float = 1.0, slope: float = 0.5) -> str:
    """Seven batch sizes of one GPU whose step time is a floor plus a slope."""
    return "".join(
        f"{gpu},{model},1,128,{size},{size / (floor + slope * size):.6f}\n" for size in range(1, 8)
    )


def test_a_csv_is_fitted_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """The report has the law, its rivals and coefficients; a folder beside the CSV has files."""
    Path("mine.csv").write_text(HEAD + rows_of("A40") + rows_of("NVIDIA L4", slope=1.0))
    assert main(["fit", "mine.csv"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "## m/unknown-recipe/" in shown.out
    assert "\n\n14 points. t = t0 + " in shown.out
    assert "chosen" in shown.out
    assert "| logarithm" in shown.out
    assert "| L4 " in shown.out
    assert "Suspect" not in shown.out
    assert shown.out.splitlines()[-1].startswith("mine.fits: ")
    fits = Fits.model_validate_json(Path("mine.fits/fits.json").read_text())
    assert [family.points for family in fits.families] == [14]
    coefficients = pd.read_csv("mine.fits/coefficients.csv").set_index(["group", "parameter"])
    floors = coefficients.xs("t0", level="parameter")
    assert floors["value"].tolist() == pytest.approx([1.0, 1.0], rel=1e-3)
    assert floors["unit"].tolist() == ["s", "s"]


def test_steps_are_predicted_with_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the columns given; extrapolation is flagged, and a missing prediction has a reason."""
    rows = rows_of("A40") + rows_of("L4", slope=1.0)
    Path("mine.csv").write_text(HEAD + rows)
    Path("asked.csv").write_text(
        "gpu,model,seq_len,batch_size,who\nA40,m,128,4,a\nl4,m,128,64,b\nT4,m,128,4,c\nA40,n,128,4,d\n"
    )
    assert main(["fit", "mine.csv", "--predict", "asked.csv", "--out", "out"]) == 0
    shown = capsys.readouterr().out
    assert "2 of 4 steps predicted" in shown
    assert "1 of them extrapolated" in shown
    reasons = [line for line in shown.splitlines() if line.startswith("- 1 not")]
    assert ["T4" in reason for reason in reasons] == [True, False]
    assert ["'n'" in reason for reason in reasons] == [False, True]
    predicted = pd.read_csv("out/predictions.csv")
    rows = [line for line in shown.splitlines() if line.rstrip(" |").endswith((")", "yes"))]
    assert [row.split("|")[-3].split()[0] for row in rows] == [
        f"{rate:.4g}" for rate in predicted["predicted_examples_per_second"].dropna()
    ]
    assert [row.split("|")[-2].strip() for row in rows] == ["", "yes"]
    assert predicted["who"].tolist() == ["a", "b", "c", "d"]
    assert predicted["predicted_step_seconds"].tolist()[0] == pytest.approx(3.0, rel=1e-3)
    assert predicted["predicted_examples_per_second"].tolist()[0] == pytest.approx(4 / 3, rel=1e-3)
    assert predicted["extrapolated"].tolist()[:2] == [False, True]
    for name in ("step_seconds", "examples_per_second"):
        low, value, high = (predicted[f"predicted_{name}{end}"][0] for end in ("_low", "", "_high"))
        assert low <= value <= high


@pytest.mark.long
def test_the_papers_points_are_fitted_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """With the lengths of its data sets; without them, one line names the option to give."""
    for name in ("throughput.csv", "lengths.csv"):
        shutil.copy(DATA / name, name)
    assert main(["fit", "throughput.csv"]) == 1
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert shown.err.startswith("throughput.csv:1: ")
    assert "seq_len" in shown.err
    assert not Path("throughput.fits").exists()
    assert main(["fit", "throughput.csv", "--lengths", "lengths.csv"]) == 0
    shown = capsys.readouterr()
    assert "not used: 'figure'" in shown.err
    assert "## mixtral-8x7b/" in shown.out
    assert "## blackmamba-2.8b/" in shown.out
    # Line 44 of the file: the dense MATH point that everything else contradicts.
    assert any("A40/math_14k" in line and "| 44 " in line for line in shown.out.splitlines())


def test_rows_that_are_not_used_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """With their number and the reason; so is a CSV without any usable row."""
    one = HEAD.strip() + ",number_gpus\n"
    rows = "".join(f"{line},1\n" for line in rows_of("A40").splitlines())
    Path("mine.csv").write_text(one + rows + "A40,m,1,128,8,9,8\nA40,m,1,128,8,,1\n")
    assert main(["fit", "mine.csv"]) == 0
    out = capsys.readouterr().out
    reasons = [line for line in out.splitlines() if line.startswith("- 1 row: ")]
    assert ["number_gpus" in reason for reason in reasons].count(True) == 1
    assert ["throughput" in reason for reason in reasons].count(True) == 1
    Path("none.csv").write_text(one + "A40,m,1,128,8,9,8\n")
    assert main(["fit", "none.csv"]) == 0
    assert "nothing is fitted" in capsys.readouterr().out


def test_a_family_of_too_few_points_names_what_to_measure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In place of a law; no step of it is predicted."""
    Path("mine.csv").write_text(HEAD + "A40,m,1,128,4,1\n")
    Path("asked.csv").write_text("gpu,model,seq_len,batch_size\nA40,m,128,4\n")
    assert main(["fit", "mine.csv", "--predict", "asked.csv"]) == 0
    out = capsys.readouterr().out
    assert "fitted to 1 points" in out
    assert "at least 3 points" in out
    assert "0 of 1 steps predicted" in out


@pytest.mark.long
def test_many_families_share_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Each family has one row; the files have the rest."""
    rows = "".join(rows_of("A40", model=f"m{number}") for number in range(13))
    Path("mine.csv").write_text(HEAD + rows)
    assert main(["fit", "mine.csv"]) == 0
    out = capsys.readouterr().out
    assert "##" not in out
    assert out.count("/unknown-recipe/measured/unknown-stack") == 13


def assert_mistakes(err: str, *mistakes: tuple[str, str]) -> None:
    """Each line begins with a place, and has the wrong value in it."""
    lines = err.splitlines()
    assert len(lines) == len(mistakes)
    for line, (place, value) in zip(lines, mistakes, strict=True):
        assert line.startswith(place)
        assert value in line


def test_all_mistakes_are_listed_at_once_and_nothing_is_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each has file, line and column, in the observations and in the steps to predict."""
    Path("mine.csv").write_text(HEAD + "A40,m,2,128,4,1\n,m,1,128,x,0\n")
    assert main(["fit", "mine.csv"]) == 1
    assert_mistakes(
        capsys.readouterr().err,
        ("mine.csv:2: Sparsity: ", "not '2'"),
        ("mine.csv:3: GPU: ", "empty"),
        ("mine.csv:3: Batch size: ", "not 'x'"),
        ("mine.csv:3: Examples/s: ", "not '0'"),
    )
    Path("mine.csv").write_text(HEAD + rows_of("A40"))
    Path("asked.csv").write_text("gpu,model,seq_len,batch_size\nA40,m\nA40,m,128,1.5\n")
    assert main(["fit", "mine.csv", "--predict", "asked.csv"]) == 1
    assert_mistakes(
        capsys.readouterr().err,
        ("asked.csv:2: ", "4"),
        ("asked.csv:3: batch_size: ", "not '1.5'"),
    )
    assert not Path("mine.fits").exists()


def test_tables_alone_need_pandas() -> None:
    """No other command spends the half second that importing pandas takes."""
    program = """\
import sys
import orchestrator.estimating.estimate_request
import orchestrator.run_folder.rank_run
import orchestrator.running.sweep
sys.exit("pandas" in sys.modules)
"""
    root = Path(__file__).parent.parent
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True)


def test_options_of_a_csv_are_refused_with_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line each; so are a file of neither kind, a missing CSV and an impossible folder."""
    made_run(tmp_path / "run")
    assert main(["fit", "run", "--out", "x"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("run: --out ")
    assert err.count("\n") == 1
    for more in ([], ["--out", "x"]):
        assert main(["fit", "run/sweep.yaml", *more]) == 1
        err = capsys.readouterr().err
        assert err.startswith("run/sweep.yaml: ")
        assert ".csv" in err
    assert main(["fit", "none.csv"]) == 1
    assert "none.csv: no such file" in capsys.readouterr().err
    Path("mine.csv").write_text(HEAD + rows_of("A40"))
    assert main(["fit", "mine.csv", "--out", "mine.csv/below"]) == 1
    assert "mine.csv/below: " in capsys.readouterr().err
