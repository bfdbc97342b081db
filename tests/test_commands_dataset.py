"""Data sets on the command line: ``dataset`` and ``what-if``."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from builders.dataset_files import FIELDS, as_csv, lengths_of, written
from builders.runs import made_run

from orchestrator.cli.main import main
from orchestrator.reporting.dataset_tables import PADDINGS
from orchestrator.spec.job import Job

pytest_plugins = ["builders.dataset_counting"]


def test_the_command_prints_lengths_and_padding(
    count: Callable[..., Job],
    tokenizer_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Text and JSON agree, and --save writes the histogram."""
    monkeypatch.chdir(tmp_path)
    as_csv(tmp_path)
    options = ["--text-fields", "question,answer", "--tokenizer", str(tokenizer_folder)]
    assert main(["dataset", "data.csv", *options, "--cutoff", "90", "--save", "kept.csv"]) == 0
    said = capsys.readouterr().out
    lengths = lengths_of(count("data.csv", text_fields=FIELDS))
    assert said.startswith("data.csv ")
    assert f"700 examples, {lengths.tokens:,} tokens" in said
    table = {
        cells[1].strip(): [float(cell) for cell in cells[2:5]]
        for line in said.splitlines()
        if len(cells := line.split("|")) == 6 and cells[1].strip().isdigit()
    }
    assert list(table) == ["1", "2", "4", "8", "16", "32", "64"]
    for longest, grouped, packed in table.values():
        assert longest >= grouped >= packed
    assert main(["dataset", "--length-histogram", "kept.csv", "--cutoff", "90", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["source"] == "kept.csv (data)"
    assert [tuple(pair) for pair in printed["histogram"]] == list(lengths.histogram)
    assert printed["cut_off_examples"] == lengths.cut_off(90)
    for size, row in table.items():
        padded = [printed["padded_tokens_per_example"][name][size] for name in PADDINGS]
        assert padded == pytest.approx(row, abs=0.06)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "no data set: name a file, a folder or OWNER/NAME, or give --length-histogram"),
        (["openorca", "--save", "x.csv"], "--save x.csv: it is not known how long examples are"),
        (["gsm8k", "--save", "/none/x.csv"], "--save /none/x.csv: cannot be written: No such file"),
        (["math_14k", "--split", "test"], "--split 'test': "),
    ],
)
def test_an_error_of_the_command_is_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It exits with 1 and writes to stderr alone."""
    assert main(["dataset", *arguments]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(line)
    assert said.err.count("\n") == 1


def test_a_run_is_priced_for_other_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``what-if`` prices another histogram and packing."""
    monkeypatch.chdir(tmp_path)
    made_run(tmp_path / "run")
    written(tmp_path, "lengths.csv", "tokens,examples\n5,900\n12,100\n")
    other = ["--length-histogram", "lengths.csv", "--cutoff", "16"]
    steps_alone = ["--startup-minutes", "0", "--checkpoint-seconds", "0"]
    rankings = []
    for more in ([], other, [*other, "--packing"]):
        assert main(["what-if", "run", "--json", *steps_alone, *more]) == 0
        rankings.append(json.loads(capsys.readouterr().out))
    assert [ranking["workload"]["examples"] for ranking in rankings] == [1000, 1000, 1000]
    assert [ranking["workload"]["padding"] for ranking in rankings] == [
        "longest",
        "longest",
        "packed",
    ]
    hours = [ranking["offers"][0]["hours"] for ranking in rankings]
    assert hours[2] < hours[0] / 2
