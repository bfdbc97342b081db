"""Commands on a run: status, rank, what-if, fit and report."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from builders.runs import ONE_CELL, TWO_CELLS, made_run
from PIL import Image

from orchestrator.cli.main import main
from orchestrator.ranking.ranked_offer import Ranking

TITLE = "made: llama-tiny, 1,000 examples x 3 epochs"


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty working directory without a cluster."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)


def files_in(tmp_path: Path) -> list[str]:
    """Relative paths of everything in the working directory."""
    return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))


def test_status_shows_the_state_of_every_trial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status is read from the run's files and changes none."""
    run = made_run(tmp_path / "run", TWO_CELLS)
    before = files_in(tmp_path)
    assert main(["status", "run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in lines]
    count = str(len(run.observations()))
    assert rows[2:4] == [
        ["cpu/llama-tiny/full-fp32/dense/seq16", "done", "40", "800 examples/s", count],
        ["cpu/llama-tiny/full-fp32/dense/seq32", "waiting", "", "", "0"],
    ]
    assert lines[-1].startswith("1 of 2 trials")
    assert files_in(tmp_path) == before


def test_status_loads_no_code_of_laws_and_rankings(tmp_path: Path) -> None:
    """Much of the time of status goes into loading code."""
    made_run(tmp_path / "run")
    heavy = (
        '{"numpy", "fitting.fit", "orchestrator.ranking.ranking", "trials.simulation.recording"}'
    )
    program = f"""
import sys
from orchestrator.cli.main import main
main(["status", "run"])
print(sorted({heavy} & set(sys.modules)))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", program]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert "1 of 1 trials done" in ended.stdout
    assert ended.stdout.endswith("\n[]\n")


def test_rank_prices_the_given_job_and_writes_both_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """2 steps of 50 ms, 5 times, after 8 minutes of start-up and before a checkpoint of 5 s."""
    made_run(tmp_path / "run")
    assert main(["rank", "run", "--examples", "80", "--epochs", "5"]) == 0
    assert "80 examples x 5 epochs" in capsys.readouterr().out
    ranking = Ranking.model_validate_json((tmp_path / "run" / "ranking.json").read_bytes())
    assert {offer.batch_size for offer in ranking.offers} == {40}
    assert [offer.hours * 3600 for offer in ranking.offers] == pytest.approx(
        [485.5] * len(ranking.offers)
    )
    with (tmp_path / "run" / "ranking.csv").open(encoding="utf-8", newline="") as file:
        assert [float(row["usd"]) for row in csv.DictReader(file)] == [
            offer.usd for offer in ranking.offers
        ]


def test_reports_say_that_their_job_is_the_specifications(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So does `rank` where options make its job another, with the file to change."""
    made_run(tmp_path / "run")
    assert main(["rank", "run"]) == 0
    assert "sweep.yaml" not in capsys.readouterr().err
    for option in (("--epochs", "5"), ("--batch-size", "40"), ("--deadline", "9"), ("--no-spot",)):
        assert main(["rank", "run", *option]) == 0
        assert "Reports price the job of run/sweep.yaml" in capsys.readouterr().err
    assert main(["report", "run"]) == 0
    shown = capsys.readouterr()
    assert "Job of the specification: 1,000 examples x 3 epochs." in shown.out
    assert "run/sweep.yaml: change its workload" in shown.err


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        (("--batch-size", "41"), "the largest is 40; give --batch-size max"),
        (("--regions", "us-east-1", "--spot"), "--regions us-east-1 and --spot: relax one of them"),
        (("--deadline", "0.01"), "Give a longer --deadline."),
        (("--budget-usd", "0.001"), "Give a higher --budget-usd."),
    ],
)
def test_what_if_that_ranks_nothing_names_the_option_to_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], remedy: str
) -> None:
    """It exits 1."""
    made_run(tmp_path / "run")
    assert main(["what-if", "run", *options]) == 1
    assert remedy in capsys.readouterr().out


def test_cells_that_were_not_measured_are_excluded_with_the_command_that_measures_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One cell has no observation yet; the command names the run, as a shell takes it."""
    made_run(tmp_path / "my run", TWO_CELLS)
    assert main(["what-if", "my run"]) == 0
    assert (
        "seq32: not measured: sweep --resume --out 'my run' measures it" in capsys.readouterr().out
    )


def test_many_cells_that_miss_a_deadline_are_one_line_with_their_range(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the shortest to the longest."""
    lengths = ONE_CELL.replace("[16]", "[16, 32, 48, 64]")
    made_run(tmp_path / "run", lengths, measured=4)
    assert main(["what-if", "run", "--deadline", "0.01"]) == 1
    lead, _, excluded = capsys.readouterr().out.partition("Excluded:\n\n")
    assert lead.rstrip().endswith("Give a longer --deadline.")
    assert re.fullmatch(
        r"- 4 cells: are expected to take [\d.]+ to [\d.]+ h; the deadline is 0.01\n", excluded
    )


def test_what_if_leaves_the_run_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another job, other overheads or the largest batch size, as a table, JSON or CSV."""
    made_run(tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    command = ["what-if", "run", "--examples", "80", "--epochs", "5", "--startup-minutes", "0"]
    command += ["--checkpoint-seconds", "0"]
    for largest in ("max", "largest"):
        assert main([*command, "--batch-size", largest, "--json"]) == 0
        ranking = Ranking.model_validate_json(capsys.readouterr().out)
    assert {(offer.batch_size, offer.batch) for offer in ranking.offers} == {(40, "largest")}
    assert ranking.offers[0].hours * 3600 == pytest.approx(0.5)
    assert main([*command, "--csv"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [row["instance"] for row in rows] == [offer.instance for offer in ranking.offers]
    assert main([*command, "--deadline", "0.0001", "--providers", "aws"]) == 1
    printed = capsys.readouterr().out
    assert "deadline of 0.0001 h" in printed
    assert "h, on cpu." in printed
    assert "the deadline is 0.0001" in printed
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--deadline", "0", "must be greater than 0, not 0"),
        ("--startup-minutes", "-1", "must be a number of at least 0, not -1"),
        ("--interruptions-per-day", "often", "must be a number, not 'often'"),
        ("--batch-size", "biggest", "must be a whole number, not 'biggest'"),
    ],
)
def test_a_job_option_that_is_no_valid_number_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], option: str, value: str, message: str
) -> None:
    """A value that is no number or out of range is named in the usage error."""
    with pytest.raises(SystemExit):
        main(["what-if", "run", option, value])
    assert message in capsys.readouterr().err


def test_fit_and_report_write_their_files_and_print_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``fit`` prints its file and counts; ``report`` prints the Markdown that it writes."""
    made_run(tmp_path / "run")
    assert main(["fit", "run"]) == 0
    path, _, counts = capsys.readouterr().out.strip().partition(": ")
    written = json.loads(Path(path).read_text(encoding="utf-8"))
    fits = written["fits"]
    usable = sum(bool(fit["parameters"]) for fit in fits)
    assert re.findall(r"\d+", counts) == [str(n) for n in (usable, len(fits), 1, 1)]
    assert (written["schema_version"], len(written["families"])) == (2, 1)
    assert main(["report", "run"]) == 0
    said = capsys.readouterr().out
    assert said.strip() == (tmp_path / "run" / "report.md").read_text(encoding="utf-8").strip()
    assert "cpu/llama-tiny/full-fp32/dense/seq16" in said


@pytest.mark.parametrize(("kind", "cheapest"), [("xterm", "\033[1mcpu\033[0m "), ("dumb", " cpu ")])
def test_bold_text_is_bold_in_a_terminal_and_markdown_elsewhere(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    cheapest: str,
) -> None:
    """Bold text is Markdown in a file or a pipe, an escape sequence in a terminal that has it."""
    made_run(tmp_path / "run")
    command = ["what-if", "run", "--examples", "80", "--epochs", "5"]
    assert main(command) == 0
    markdown = capsys.readouterr().out
    assert "**cpu**" in markdown
    monkeypatch.setenv("TERM", kind)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main([*command, "--wide"]) == 0
    printed = capsys.readouterr().out
    assert cheapest in printed
    assert "**" not in printed
    assert printed.replace("\033[1m", "").replace("\033[0m", "") == markdown.replace("**", "")


def test_the_picture_of_a_report_is_the_preview_of_its_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has the size of a preview, and not one colour; a page without a picture names none."""
    run = made_run(tmp_path / "run")
    assert main(["report", str(run.path)]) == 0
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert f'<meta property="og:title" content="{TITLE}: which GPU to rent">' in page
    assert re.search(r'og:description" content="(Rent|Use) cpu .*takes', page)
    assert "og:image" not in page
    assert not (tmp_path / "run" / "report.png").exists()
    assert main(["report", str(run.path), "--image"]) == 0
    assert "report.png" in capsys.readouterr().err
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert '<meta property="og:image" content="report.png">' in page
    address = "https://example.org/runs/made/report.html"
    assert main(["report", str(run.path), "--image", "--url", address]) == 0
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert 'og:image" content="https://example.org/runs/made/report.png">' in page
    picture = Image.open(tmp_path / "run" / "report.png").convert("RGB")
    assert picture.size == (1200, 630)
    assert len(picture.getcolors(2**24)) > 100


@pytest.mark.parametrize(
    ("options", "code", "mistake"),
    [
        (("--url", "https://example.org/"), 1, "--url is of the picture's preview: give --image"),
        (("--image", "--url", "example.org"), 2, "'example.org' is not an address"),
    ],
)
def test_an_address_without_a_picture_or_that_is_none_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    code: int,
    mistake: str,
) -> None:
    """In one line, and nothing is written."""
    made_run(tmp_path / "run")
    try:
        ended = main(["report", "run", *options])
    except SystemExit as usage:
        ended = int(usage.code or 0)
    assert ended == code
    assert mistake in capsys.readouterr().err
    assert not (tmp_path / "run" / "report.html").exists()


def test_a_picture_needs_a_browser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without one the reports are written, and the command ends with 1 in one line."""
    run = made_run(tmp_path / "run")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["report", str(run.path), "--image"]) == 1
    assert "install Chromium" in capsys.readouterr().err
    assert (tmp_path / "run" / "report.html").exists()
    assert main(["report", str(run.path), str(run.path), "--image"]) == 1
    assert "--image is of one run's report" in capsys.readouterr().err
