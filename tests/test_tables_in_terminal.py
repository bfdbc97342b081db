"""Tables in a narrow terminal: the columns that decide stay, and no word breaks."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from builders.runs import made_run
from fakes.ray_sweeps import environment
from fakes.terminal import shown, without_style
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cli.main import main
from orchestrator.markdown_table import table
from orchestrator.tables_in_terminal import fitted

HEADERS = (
    "GPU",
    "offer",
    "$/h",
    "batch",
    "peak GiB",
    "reserved GiB",
    "s/step",
    "hours",
    "$",
    "basis",
)
LONG_NAMES = """\
name: long
gpus: [cpu]
cells:
  - models: [mixtral-tiny]
    active_experts: [2, 8]
    recipes:
      - method: qlora
        lora_rank: 16
        lora_targets: [experts, router]
        precision: bf16
        adapter_dtype: fp32
        gradient_checkpointing: true
        max_grad_norm: 1.0
        loss: chunked
    seq_lens: [80]
workload: {examples: 1000, epochs: 3}
max_batch_size: 64
boundary_repeats: 0
"""
OFFER = "cudo ice-lake-a40-compute_1x2v4gb on-demand"
ROW = ("A40", OFFER, "0.37", "2 x 8 of 3 (3 to 4)", "26.1", "26.5 of 43.9", "12.7")
ROW += ("1.5 (1.19 to 4.16)", "0.553 (0.441 to 1.54)", "simulated")
TABLE = table(HEADERS, [ROW])


def test_at_80_columns_the_columns_that_decide_are_left() -> None:
    """The offer and the basis stand below its row, and hidden columns are named."""
    head, _, row, below, *hidden = lines = fitted(TABLE, 80).split("\n")
    assert max(map(len, lines)) <= 80
    assert [part.strip() for part in head.strip("| ").split("|")] == ["GPU", "batch", "hours", "$"]
    assert "0.553 (0.441 to 1.54)" in row
    assert below.strip() == f"{OFFER}; basis simulated"
    assert " ".join(hidden).startswith(
        "Hidden in this narrow terminal: reserved GiB, peak GiB, s/step, $/h;"
    )


def test_a_wider_terminal_hides_less() -> None:
    """Nothing is hidden where the offer's own line suffices; nothing changes where all fits."""
    lines = fitted(TABLE, 132).split("\n")
    assert len(lines) == 4
    assert max(map(len, lines)) <= 132
    assert fitted(f"before\n{TABLE}\nafter", 200) == f"before\n{TABLE}\nafter"


@given(st.lists(st.text("ab |\\*", max_size=30), min_size=1, max_size=4), st.integers(20, 200))
def test_no_value_is_lost_or_broken(values: list[str], width: int) -> None:
    """Every cell of a column that is not minor is printed, broken between words alone."""
    printed = fitted(table([f"column {n}" for n in range(len(values))], [values]), width)
    # A table escapes pipes by backslashes, a list does not.
    words, *texts = (" ".join(text.replace("\\", "").split()) for text in (printed, *values))
    assert all(text in words for text in texts)


def test_a_list_has_no_escapes_of_a_table() -> None:
    """A pipe ends a cell of a table alone."""
    key = ("special_tokens", "{'pad_token': '<|end_of_text|>'}", "irrelevant", "tokens " * 9)
    listed = fitted(table(("key", "value", "class", "meaning"), [key]), 80)
    assert "'<|end_of_text|>'" in listed


def test_the_recipe_and_the_batch_follow_the_offer_below_a_row() -> None:
    """A long GPU name leaves no room for them at 80 columns, and nothing that decides is lost."""
    headers = ("GPU", "offer", "recipe", "batch", "hours", "$")
    row = ("RTX-PRO-6000-Workstation", OFFER, "qlora, checkpointed", ROW[3], ROW[7], ROW[8])
    head, _, numbers, *below = fitted(table(headers, [row]), 80).split("\n")
    assert [part.strip() for part in head.strip("| ").split("|")] == ["GPU", "hours", "$"]
    assert ROW[8] in numbers
    words = " ".join(line.strip() for line in below)
    assert words == f"{OFFER}; qlora, checkpointed; batch {ROW[3]}"


def test_a_ranking_keeps_gpu_hours_and_dollars() -> None:
    """What tells its rows apart stands first in the line below, in the order of the columns."""
    headers = ("experts", "tokens", "GPU", "offer", "$/h", "batch size", "hours", "$")
    headers += ("P(cheapest)", "basis")
    row = (
        "2 of 8",
        "176",
        "A100-80GB-SXM",
        OFFER,
        "0.37",
        "25 (max 55)",
        "0.393 (0.373 to 0.416) ~",
    )
    row += ("0.0479 (0.0448 to 0.0513)", "63%", "simulated")
    head, _, _, *below = fitted(table(headers, [row]), 80).split("\n")
    assert [part.strip() for part in head.strip("| ").split("|")] == ["GPU", "hours", "$"]
    assert " ".join(line.strip() for line in below[:-1]) == (
        f"experts 2 of 8; tokens 176; {OFFER}; batch size 25 (max 55); P(cheapest) 63%; "
        "basis simulated"
    )


def test_names_break_after_slashes_and_paths_do_not() -> None:
    """A recipe that is longer than a line breaks after its hyphens."""
    cell = "A40/mixtral-8x7b/qlora-r16-experts-checkpointed/2of8/seq80"
    assert fitted(f"{cell}: not measured", 20).split("\n") == [
        "A40/mixtral-8x7b/",
        "qlora-r16-experts-",
        "checkpointed/2of8/",
        "seq80: not measured",
    ]
    for whole in ("https://example.org/a/long/address", "/srv/a/long/path/of/a/file/report.html"):
        assert whole in fitted(f"see {whole} there", 20).split("\n")


def test_a_table_that_nothing_narrows_enough_becomes_a_list() -> None:
    """Names of cells break after a slash."""
    cell = "A40(simulated)/mixtral-8x7b/qlora-r16-experts+router-bf16-checkpointed/2of8/seq80"
    lines = fitted(table(("trial", "plan", "why"), [(cell, "to simulate", "")]), 60).split("\n")
    assert lines == [
        "- A40(simulated)/mixtral-8x7b/",
        "  qlora-r16-experts+router-bf16-checkpointed/2of8/seq80",
        "    plan to simulate",
    ]


@pytest.fixture(params=[(24, 80), (50, 200)], ids=["24x80", "50x200"])
def columns(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> int:
    """Columns of a terminal that a command finds, in a working directory of its own."""
    rows, columns = request.param
    for name, value in {"TERM": "xterm", "COLUMNS": str(columns), "LINES": str(rows)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return int(columns)


@pytest.fixture
def printed(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """What a command prints in the terminal, without a line that is wider."""

    def printed(*words: str, code: int = 0) -> str:
        for stream in ("stdout", "stderr"):
            monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
        try:
            ended: object = main(words)
        except SystemExit as exited:
            ended = exited.code
        text = without_style("".join(capsys.readouterr()))
        assert ended == code, text
        assert max(map(len, text.split("\n"))) <= columns
        return text

    return printed


def test_no_line_is_wider_than_a_terminal(columns: int, printed: Callable[..., str]) -> None:
    """Tables, sentences and remarks; a wider terminal shows more columns."""
    estimate = ("estimate", "--model", "llama-tiny", "--seq-len", "64", "--gpu", "A40,L4,RTX-4090")
    printed("catalog", "gpus")
    prices = printed("catalog", "prices", "--prices", "shipped")
    estimated = printed(*estimate, "--method", "lora", "--prices", "shipped")
    check = ("check", *estimate[1:-1], "A40", "--method", "lora", "--batch-size", "4")
    printed(*check)
    printed(*estimate, "--deadline-in-hours", "2", code=2)
    assert ("| billed " in prices, "| s/step " in estimated) == (columns == 200, columns == 200)


def test_a_program_finds_the_size_of_its_terminal(tmp_path: Path) -> None:
    """A command that a user starts has tables and remarks that are no wider."""
    command = [sys.executable, "-m", "orchestrator", "catalog", "prices", "--prices", "shipped"]
    for columns in (80, 200):
        ended, written = shown(command, environment(tmp_path), tmp_path, columns=columns)
        lines = without_style(written).split("\r\n")
        assert ended == 0
        assert max(map(len, lines)) <= columns
        assert any("| billed " in line for line in lines) == (columns == 200)


def test_tables_of_a_run_fit_a_terminal(
    tmp_path: Path, columns: int, printed: Callable[..., str]
) -> None:
    """Names of cells are longer than 80 columns; a ranking keeps GPUs, hours and dollars."""
    for name, sizes in (("a", "[80]"), ("b", "[80, 96]")):
        made_run(tmp_path / name, LONG_NAMES.replace("[80]", sizes), measured=2)
    ranked = printed("rank", "a", "--prices", "shipped")
    heads = [line for line in ranked.split("\n") if line.startswith("| ") and "hours" in line]
    if columns == 80:
        assert [part.strip() for part in heads[0].strip("| ").split("|")][-3:] == [
            *("GPU", "hours", "$")
        ]
        assert "\n    aws m8a.large on-demand in us-east-1; " in ranked
        assert "Hidden in this narrow terminal: examples/s, $/h;" in " ".join(ranked.split())
    else:
        assert [part.strip() for part in heads[0].strip("| ").split("|")][:2] == [
            *("experts", "tokens")
        ]
    assert "the deadline is 0.01" in " ".join(
        printed("what-if", "a", "--deadline", "0.01", code=1).split()
    )
    assert "largest batch" in printed("status", "b")
    assert "usable" in printed("fit", "a")
    assert "## Only in b" in printed("report", "a", "b", "--prices", "shipped")


def test_sentences_beside_a_table_break_between_words() -> None:
    """With a table or without one."""
    sentence = "An example is a sentence that no terminal of forty columns shows on one line."
    lines = fitted(f"{sentence}\n\n{TABLE}", 40).split("\n\n")[0].split("\n")
    assert " ".join(lines) == sentence
    assert max(map(len, lines)) <= 40
    assert fitted(sentence, 40).split("\n") == lines
