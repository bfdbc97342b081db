"""The Python API: results are records with frames, mistakes are ``UserError``."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from builders.runs import ONE_CELL, TWO_CELLS, made_run

import orchestrator

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "docs" / "tutorials" / "python.ipynb"


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty working directory without a cluster."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)


def test_the_package_is_imported_without_any_library() -> None:
    """Importing the package loads no heavy library: the functions import what they need."""
    heavy = '{"numpy", "pandas", "pydantic", "ray", "torch"}'
    program = f"import orchestrator, sys; print(sorted({heavy} & set(sys.modules)))"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ended.stdout == "[]\n"


def test_every_function_is_public_and_documented() -> None:
    """``__all__`` lists them; each docstring has arguments, result, errors and an example."""
    functions = [name for name in orchestrator.__all__ if name != "UserError"]
    assert functions == ["estimate", "example_lengths", "fit", "load_run", "rank", "sweep"]
    for name in functions:
        text = str(getattr(orchestrator, name).__doc__)
        assert all(part in text for part in ("Args:", "Returns:", "Raises:", "Example:")), name


def test_rank_prices_another_job_and_leaves_the_run_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """2 steps of 50 ms, 5 times, after 8 minutes of start-up and before a checkpoint of 5 s."""
    made_run(tmp_path / "run")
    before = {path.name for path in (tmp_path / "run").iterdir()}
    frame = orchestrator.rank("run", examples=80, epochs=5).to_frame()
    assert (frame["hours"] * 3600).tolist() == pytest.approx([485.5] * len(frame))
    assert frame["usd"].is_monotonic_increasing
    html = orchestrator.rank("run", startup_minutes=0)._repr_html_()
    assert html.startswith("<table")
    assert {path.name for path in (tmp_path / "run").iterdir()} == before
    assert capsys.readouterr() == ("", "")


def test_options_have_the_names_and_the_forms_of_the_command_line(tmp_path: Path) -> None:
    """Several names are a list or a comma-separated text; ``max`` is the largest batch size."""
    made_run(tmp_path / "run")
    listed = orchestrator.rank("run", providers=["aws", "gcp"], batch_size="max")
    assert listed == orchestrator.rank("run", providers="aws,gcp", batch_size="largest")
    assert listed.constraints.providers == ("aws", "gcp")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"exampels": 3}, ("exampels", "examples")),
        ({"examples": 0}, ("examples", "0")),
        ({"deadline": -1}, ("deadline", "-1")),
        ({"batch_size": "huge"}, ("batch_size", "huge")),
        ({"providers": "awz"}, ("awz", "aws")),
        ({"prices": "papre"}, ("papre", "paper")),
    ],
)
def test_a_wrong_option_is_a_user_error(
    tmp_path: Path, options: dict[str, Any], words: tuple[str, ...]
) -> None:
    """The error names the option, its value and a suggestion."""
    made_run(tmp_path / "run")
    with pytest.raises(orchestrator.UserError) as error:
        orchestrator.rank("run", **options)
    assert all(word in str(error.value) for word in words)


def test_every_function_raises_a_user_error(tmp_path: Path) -> None:
    """A missing run, file, data set or model raises ``UserError``."""
    with pytest.raises(orchestrator.UserError):
        orchestrator.load_run(tmp_path / "none")
    with pytest.raises(orchestrator.UserError):
        orchestrator.fit("none.csv")
    with pytest.raises(orchestrator.UserError):
        orchestrator.sweep("none.yaml")
    with pytest.raises(orchestrator.UserError):
        orchestrator.example_lengths()
    with pytest.raises(orchestrator.UserError):
        orchestrator.estimate("no-such-model", seq_len=16)
    for option in ("batch_size", "seq_len", "examples"):
        with pytest.raises(orchestrator.UserError, match=rf"must be at most {10**15}$"):
            orchestrator.estimate("llama-tiny", **{"seq_len": 16, option: 10**400})


def test_a_loaded_run_is_three_lines(tmp_path: Path) -> None:
    """The repr of a run shows its cells, its observations and the cheapest offer."""
    made_run(tmp_path / "run", TWO_CELLS)
    run = orchestrator.load_run("run")
    lines = repr(run).splitlines()
    assert len(lines) == 3
    assert "1 of 2" in lines[0]
    assert lines[2].startswith("cheapest: cpu")
    assert run.to_frame() is run.ranking
    assert run._repr_html_().startswith("<table")


def test_fit_takes_a_run_a_csv_or_a_frame(tmp_path: Path) -> None:
    """Laws fitted to a CSV or a frame predict the step times of its rows; no file is written."""
    made_run(tmp_path / "run")
    laws = orchestrator.fit("run")
    assert len(laws.to_frame()) == 1
    frame = pd.DataFrame(
        {
            "gpu": "A40",
            "model": "m",
            "sparsity": 1.0,
            "seq_len": 64,
            "batch_size": [1, 2, 4, 8, 16],
        }
    )
    seconds = 0.1 + 0.02 * frame["batch_size"]
    frame["examples_per_second"] = frame["batch_size"] / seconds
    frame.to_csv("mine.csv", index=False)
    for fitted in (orchestrator.fit("mine.csv"), orchestrator.fit(frame)):
        predicted = fitted.predict(frame.drop(columns="examples_per_second"))
        assert predicted["predicted_step_seconds"].tolist() == pytest.approx(
            seconds.tolist(), rel=0.02
        )
    assert not Path("mine.fits").exists()


def test_lengths_of_a_histogram_are_a_frame() -> None:
    """Example lengths become a frame with one row per length."""
    Path("lengths.csv").write_text("tokens,examples\n40,3\n60,1\n", encoding="utf-8")
    lengths = orchestrator.example_lengths(length_histogram=Path("lengths.csv"))
    assert (lengths.examples, lengths.tokens) == (4, 180)
    assert lengths.to_frame().to_dict("list") == {"tokens": [40, 60], "examples": [3, 1]}


def test_a_sweep_returns_its_run_and_prints_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sweep of a finished run ranks and reports it without measuring again."""
    made_run(tmp_path / "run")
    Path("one.yaml").write_text(ONE_CELL, encoding="utf-8")
    run = orchestrator.sweep("one.yaml", out="run")
    assert "1 of 1" in repr(run)
    assert (tmp_path / "run" / "report.html").exists()
    assert capsys.readouterr() == ("", "")


@pytest.mark.long
def test_a_frame_of_estimates_has_the_same_columns_where_nothing_fits() -> None:
    """A price is absent then, not the column."""
    plain: dict[str, Any] = {"method": "full", "defaults": "plain", "examples": 400}
    estimates = orchestrator.estimate(
        "llama-tiny", gpu="A40", memory_gib=0.6, seq_len=512, batch_size=8, **plain
    )
    row = estimates.to_frame().iloc[0]
    assert row["outcome"] == "OUT_OF_MEMORY"
    assert row[["usd", "usd_low", "hours_high", "provider", "step_seconds_low"]].isna().all()


def test_the_notebook_of_the_documentation_runs(tmp_path: Path) -> None:
    """The notebook's code cells run in order beside a finished run."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    made_run(tmp_path / "runs" / "small", ONE_CELL.replace("name: made", "name: small"))
    names: dict[str, Any] = {}
    for source in sources:
        exec(compile(source, str(NOTEBOOK), "exec"), names)  # noqa: S102 - our own notebook
    assert len(names["estimates"]) == 2
    assert (names["estimates"].to_frame()["max_batch_size"] > 0).all()
    assert len(names["ranking"].to_frame()) > 0
    assert len(names["laws"].to_frame()) == 1
