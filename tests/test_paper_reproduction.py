"""The paper reproduced: its own numbers, the errors of the laws on its points, and the report."""

import json
from pathlib import Path

import numpy as np
import pytest

from fitting.paper.published import EQ1_TEXT, dataset_lengths, throughput_points
from fitting.paper.reproduction import Reproduction, projected_max_batch, reproduction
from orchestrator.cli.main import main
from orchestrator.reporting.paper_report import ON_UNSEEN_POINTS, as_markdown, text_rows
from orchestrator.tables_in_terminal import fitted


@pytest.fixture(scope="module")
def reproduced() -> Reproduction:
    """Reproduction, computed once."""
    return reproduction()


def test_all_96_points_of_the_paper_are_there() -> None:
    """They are of two models, on four GPUs, over two data sets."""
    points = throughput_points()
    assert len(points.rows) == 96
    assert set(points.gpu) == {"A40", "A100-40GB", "A100-80GB", "H100-80GB"}
    assert sorted(np.unique(points.dataset)) == ["commonsense_15k", "math_14k"]


def test_padded_lengths_rise_with_the_batch_size_to_the_longest_example() -> None:
    """A batch of one example has the mean length."""
    for lengths in dataset_lengths().values():
        mean = float(lengths.tokens @ lengths.examples / lengths.examples.sum())
        assert lengths.padded(1, multiple=1) == pytest.approx(mean)
        padded = [lengths.padded(size) for size in (1, 2, 8, 64, 10**6)]
        assert padded == sorted(padded)
        assert padded[-1] <= np.ceil(lengths.tokens.max() / 8) * 8


@pytest.mark.parametrize(
    ("figure", "at_most"),
    [
        ("loo_mape_pct.chosen", 4.0),
        ("extrapolation_mape_pct.chosen", 7.5),
        ("extrapolation_mape_pct.chosen_without_h100", 4.0),
        ("dataset_transfer_mape_pct.mixtral", 1.0),
        ("dataset_transfer_mape_pct.blackmamba", 9.0),
        ("gpu_transfer_mape_pct.a40_only_mean", 8.0),
        ("gpu_transfer_mape_pct.a40_only_worst", 12.0),
        ("leave_one_gpu_out_mape_pct.mean", 6.0),
        ("leave_one_gpu_out_mape_pct.worst", 10.0),
        ("interval_half_width_pct", 7.0),
    ],
)
def test_the_laws_predict_held_out_points(
    reproduced: Reproduction, figure: str, at_most: float
) -> None:
    """Errors are at most those of the prototypes, and below 60 % of those of the paper's law."""
    assert reproduced.figures[figure] <= at_most
    rival = figure.replace("chosen", "paper")
    if rival != figure:
        assert reproduced.figures[figure] < 0.6 * reproduced.figures[rival]


def test_90_percent_intervals_cover_nine_in_ten_points(reproduced: Reproduction) -> None:
    """Each interval is computed without its point."""
    assert 87 <= reproduced.figures["interval_coverage_pct"] <= 95


def test_largest_batches_follow_from_what_cuda_reports(reproduced: Reproduction) -> None:
    """The one exception is the row that the paper contradicts; the model memory is plausible."""
    largest = reproduced.largest
    assert reproduced.figures["max_batch_exact_of_12"] == 11
    assert reproduced.figures["max_batch_exact_of_12.paper"] == 6
    (missed,) = np.flatnonzero(largest.ours != largest.published)
    assert "Table III says 3" in largest.rows[missed]["note"]
    assert 27.3 <= largest.model_gib <= 28.7


def test_the_papers_own_figures_are_reproduced(reproduced: Reproduction) -> None:
    """Table IV, OpenOrca and Fig. 13 follow from the paper's constants and prices."""
    figures = reproduced.figures
    published = {"A40": 32.7, "A100-80GB": 25.4, "H100": 17.9}
    for gpu, usd in published.items():
        assert figures[f"table_iv_usd.{gpu}"] == pytest.approx(usd, rel=0.005)
    assert figures["openorca_usd"] == pytest.approx(3460, rel=0.005)
    assert figures["projected_max_batch.100GB"] == pytest.approx(27.9, abs=0.05)
    assert figures["projected_max_batch.120GB"] == pytest.approx(35.2, abs=0.05)
    assert projected_max_batch(80, EQ1_TEXT) == pytest.approx(31.6, abs=0.05)


@pytest.fixture(scope="module")
def report(reproduced: Reproduction) -> str:
    """The report, computed once."""
    return as_markdown(reproduced)


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


def test_the_report_fits_a_terminal(report: str) -> None:
    """No line is wider."""
    for columns in (80, 200):
        assert max(map(len, fitted(report, columns).split("\n"))) <= columns


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
