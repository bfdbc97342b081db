"""Report and figures of `reproduce`."""

import json
from pathlib import Path

import pytest

from fitting.paper.reproduction import reproduction
from orchestrator.cli.main import main
from orchestrator.reporting.paper_report import ON_UNSEEN_POINTS, as_markdown, text_rows


@pytest.fixture(scope="module")
def report() -> str:
    """The report, computed once."""
    return as_markdown(reproduction())


def test_suspect_points_are_named(report: str) -> None:
    """BlackMamba's dense MATH point, and the H100 series' sparse ones."""
    assert "A40/math_14k s = 1 b = 2" in report
    assert "/math_14k s = 0.25 b = 9" in report


def test_each_error_has_the_papers_value_beside_ours(report: str) -> None:
    """A law that cannot make a prediction has no number."""
    for label, papers, _ in text_rows(ON_UNSEEN_POINTS):
        rows = [row for row in report.splitlines() if row.startswith(f"| {label} ")]
        assert rows, label
        for row in rows:
            _, _, paper, ours, _ = (cell.strip() for cell in row.split("|"))
            assert (paper == "not possible") is (not papers)
            assert float(ours.split()[0]) > 0


def test_the_command_prints_draws_and_answers_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Markdown and three figures, or JSON; an invalid folder gives one line."""
    out = tmp_path / "out"
    assert main(["reproduce", "--out", str(out)]) == 0
    assert "contradicts itself" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {
        *("reproduction.md", "fig13.svg", "fig14.svg", "fig15.svg")
    }
    assert main(["reproduce", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert all(isinstance(value, float) for value in figures.values())
    (tmp_path / "file").write_text("")
    assert main(["reproduce", "--out", str(tmp_path / "file")]) == 1
    assert "cannot be written" in capsys.readouterr().err
