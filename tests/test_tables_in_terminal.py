"""Tables in a narrow terminal: the columns that decide stay, and no word breaks."""

import sys
from pathlib import Path

import pytest
from fakes.ray_sweeps import environment
from fakes.terminal import shown, without_style
from hypothesis import given
from hypothesis import strategies as st

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
    words = " ".join(printed.replace("\\|", "|").split())
    assert all(" ".join(value.split()) in words for value in values)


def test_the_recipe_and_the_batch_follow_the_offer_below_a_row() -> None:
    """A long GPU name leaves no room for them at 80 columns, and nothing that decides is lost."""
    headers = ("GPU", "offer", "recipe", "batch", "hours", "$")
    row = ("RTX-PRO-6000-Workstation", OFFER, "qlora, checkpointed", ROW[3], ROW[7], ROW[8])
    head, _, numbers, *below = fitted(table(headers, [row]), 80).split("\n")
    assert [part.strip() for part in head.strip("| ").split("|")] == ["GPU", "hours", "$"]
    assert ROW[8] in numbers
    words = " ".join(line.strip() for line in below)
    assert words == f"{OFFER}; qlora, checkpointed; batch {ROW[3]}"


def test_a_table_that_nothing_narrows_enough_becomes_a_list() -> None:
    """Names of cells break after a slash."""
    cell = "A40(simulated)/mixtral-8x7b/qlora-r16-experts+router-bf16-checkpointed/2of8/seq80"
    lines = fitted(table(("trial", "plan", "why"), [(cell, "to simulate", "")]), 60).split("\n")
    assert lines == [
        "- A40(simulated)/mixtral-8x7b/",
        "  qlora-r16-experts+router-bf16-checkpointed/2of8/seq80",
        "    plan to simulate",
    ]


@pytest.mark.parametrize(("rows", "columns"), [(24, 80), (50, 200)])
def test_no_line_is_wider_than_a_terminal(tmp_path: Path, rows: int, columns: int) -> None:
    """Tables, sentences and remarks; a wider terminal shows more columns."""
    estimate = ("estimate", "--model", "llama-tiny", "--seq-len", "64", "--gpu", "A40,L4,RTX-4090")
    texts = []
    for words in (
        ("catalog", "gpus"),
        ("reproduce",),
        ("catalog", "prices", "--prices", "shipped"),
        (*estimate, "--method", "lora", "--prices", "shipped"),
    ):
        command = [sys.executable, "-m", "orchestrator", *words]
        code, written = shown(command, environment(tmp_path), tmp_path, rows=rows, columns=columns)
        texts.append(without_style(written))
        assert code == 0, texts[-1]
        assert max(map(len, texts[-1].split("\r\n"))) <= columns
    prices, estimated = texts[2:]
    assert ("| billed " in prices, "| s/step " in estimated) == (columns == 200, columns == 200)


def test_sentences_beside_a_table_break_between_words() -> None:
    """With a table or without one."""
    sentence = "An example is a sentence that no terminal of forty columns shows on one line."
    lines = fitted(f"{sentence}\n\n{TABLE}", 40).split("\n\n")[0].split("\n")
    assert " ".join(lines) == sentence
    assert max(map(len, lines)) <= 40
    assert fitted(sentence, 40).split("\n") == lines
