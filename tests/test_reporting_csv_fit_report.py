"""``fit`` on a CSV, as a user meets it: what is printed where, files, mistakes."""

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
    """Seven batch sizes of one GPU, their steps a floor and a slope."""
    return "".join(
        f"{gpu},{model},1,128,{size},{size / (floor + slope * size):.6f}\n" for size in range(1, 8)
    )


def test_a_csv_is_fitted_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Law, rivals, coefficients; files in a folder beside it."""
    Path("mine.csv").write_text(HEAD + rows_of("A40") + rows_of("NVIDIA L4", slope=1.0))
    assert main(["fit", "mine.csv"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "## m/unknown-recipe/measured/unknown-stack\n\n14 points. t = t0 + " in said.out
    assert "chosen" in said.out
    assert "| logarithm" in said.out
    assert "| L4 " in said.out
    assert "does not believe" not in said.out
    assert said.out.endswith("mine.fits: fits.json, coefficients.csv\n")
    fits = Fits.model_validate_json(Path("mine.fits/fits.json").read_text())
    assert [family.points for family in fits.families] == [14]
    told = pd.read_csv("mine.fits/coefficients.csv").set_index(["group", "parameter"])
    floors = told.xs("t0", level="parameter")
    assert floors["value"].tolist() == pytest.approx([1.0, 1.0], rel=1e-3)
    assert floors["unit"].tolist() == ["s", "s"]


def test_questions_are_answered_with_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    """Beside what was asked; what lies beyond says so, and what has no answer why."""
    rows = rows_of("A40") + rows_of("L4", slope=1.0)
    Path("mine.csv").write_text(HEAD + rows)
    Path("asked.csv").write_text(
        "gpu,model,seq_len,batch_size,who\nA40,m,128,4,a\nl4,m,128,64,b\nT4,m,128,4,c\nA40,n,128,4,d\n"
    )
    assert main(["fit", "mine.csv", "--predict", "asked.csv", "--out", "out"]) == 0
    said = capsys.readouterr()
    assert "2 of 4 questions answered; 1 of them beyond what was observed" in said.out
    assert (
        "- 1 not: no observation of T4, but of A40, L4\n- 1 not: nothing was fitted to 'n'\n"
        in said.out
    )
    told = pd.read_csv("out/predictions.csv")
    assert told["who"].tolist() == ["a", "b", "c", "d"]
    assert told["predicted_step_seconds"].tolist()[0] == pytest.approx(3.0, rel=1e-3)
    assert told["predicted_examples_per_second"].tolist()[0] == pytest.approx(4 / 3, rel=1e-3)
    assert told["extrapolated"].tolist()[:2] == [False, True]
    for name in ("step_seconds", "examples_per_second"):
        low, value, high = (told[f"predicted_{name}{end}"][0] for end in ("_low", "", "_high"))
        assert low <= value <= high


def test_the_papers_points_are_fitted_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """With the lengths of its data sets; without them one line asks for them."""
    for name in ("throughput.csv", "lengths.csv"):
        shutil.copy(DATA / name, name)
    assert main(["fit", "throughput.csv"]) == 1
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith(
        "throughput.csv:1: no column says how long examples are: add seq_len"
    )
    assert not Path("throughput.fits").exists()
    assert main(["fit", "throughput.csv", "--lengths", "lengths.csv"]) == 0
    said = capsys.readouterr()
    assert said.err == "columns not used: 'figure'\n"
    assert "## mixtral-8x7b/" in said.out
    assert "## blackmamba-2.8b/" in said.out
    # Line 44 of the file: the dense MATH point that everything else contradicts.
    assert any("A40/math_14k" in line and "| 44 " in line for line in said.out.splitlines())


def test_what_was_left_out_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """With how many rows and why; nothing left at all is told, too."""
    one = HEAD.strip() + ",number_gpus\n"
    rows = "".join(f"{line},1\n" for line in rows_of("A40").splitlines())
    Path("mine.csv").write_text(one + rows + "A40,m,1,128,8,9,8\nA40,m,1,128,8,,1\n")
    assert main(["fit", "mine.csv"]) == 0
    out = capsys.readouterr().out
    assert "- 1 row: ran on several GPUs (number_gpus above 1)\n" in out
    assert "- 1 row: have no throughput\n" in out
    Path("none.csv").write_text(one + "A40,m,1,128,8,9,8\n")
    assert main(["fit", "none.csv"]) == 0
    assert "nothing is fitted" in capsys.readouterr().out


def test_a_family_of_too_few_points_is_told_what_to_measure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In place of a law; a question to it is not answered."""
    Path("mine.csv").write_text(HEAD + "A40,m,1,128,4,1\n")
    Path("asked.csv").write_text("gpu,model,seq_len,batch_size\nA40,m,128,4\n")
    assert main(["fit", "mine.csv", "--predict", "asked.csv"]) == 0
    out = capsys.readouterr().out
    assert "No law of 1 points: " in out
    assert "measure at least 3 points" in out
    assert "0 of 1 questions answered" in out


def test_many_families_are_told_in_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    """A row each; all of it is in the files."""
    rows = "".join(rows_of("A40", model=f"m{number}") for number in range(13))
    Path("mine.csv").write_text(HEAD + rows)
    assert main(["fit", "mine.csv"]) == 0
    out = capsys.readouterr().out
    assert "##" not in out
    assert out.count("/unknown-recipe/measured/unknown-stack") == 13


def test_mistakes_are_told_all_at_once_and_nothing_is_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of the file that has them, with line and column; of questions alike."""
    Path("mine.csv").write_text(HEAD + "A40,m,2,128,4,1\n,m,1,128,x,0\n")
    assert main(["fit", "mine.csv"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        (
            "mine.csv:2: Sparsity: must be above 0 and at most 1 (active experts over experts), "
            "not '2'"
        ),
        "mine.csv:3: GPU: is empty: name the GPU, or leave the row out",
        "mine.csv:3: Batch size: must be a number, not 'x'",
        "mine.csv:3: Examples/s: must be above 0, not '0'",
    ]
    Path("mine.csv").write_text(HEAD + rows_of("A40"))
    Path("asked.csv").write_text("gpu,model,seq_len,batch_size\nA40,m\nA40,m,128,1.5\n")
    assert main(["fit", "mine.csv", "--predict", "asked.csv"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        (
            "asked.csv:2: fields: 2, where the head has 4: quote those with commas in them, fill "
            "in missing ones"
        ),
        "asked.csv:3: batch_size: must be a whole number of at least 1, not '1.5'",
    ]
    assert not Path("mine.fits").exists()


def test_tables_alone_need_pandas() -> None:
    """Half a second that no other command spends."""
    program = "import orchestrator.cli.commands.commands, sys; sys.exit('pandas' in sys.modules)"
    root = Path(__file__).parent.parent
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True)


def test_options_of_a_csv_are_refused_with_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a line; and what is neither, a CSV that is not there, a place that is no folder."""
    made_run(tmp_path / "run")
    assert main(["fit", "run", "--out", "x"]) == 1
    assert capsys.readouterr().err == (
        "run: --out goes with a CSV of observations, not with a run\n"
    )
    for more in ([], ["--out", "x"]):
        assert main(["fit", "run/sweep.yaml", *more]) == 1
        assert capsys.readouterr().err == (
            "run/sweep.yaml: give a run folder, or observations in a file that ends in .csv\n"
        )
    assert main(["fit", "none.csv"]) == 1
    assert capsys.readouterr().err == "none.csv: no such file\n"
    Path("mine.csv").write_text(HEAD + rows_of("A40"))
    assert main(["fit", "mine.csv", "--out", "mine.csv/below"]) == 1
    assert "mine.csv/below: cannot be written: " in capsys.readouterr().err
