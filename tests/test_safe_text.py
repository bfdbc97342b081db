"""Text from outside reaches no terminal, comment, spreadsheet or folder as a command."""

import csv
import io
from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_catalog.safe_text import (
    from_spreadsheet_cell,
    inner_path,
    printable,
    spreadsheet_cell,
)
from orchestrator.console import print_result, remark


@given(st.text())
def test_printable_text_keeps_its_lines(text: str) -> None:
    """Only newlines end a line; all that is printable stays."""
    shown = printable(text)
    assert shown.splitlines() == shown.removesuffix("\n").split("\n") or not text.strip("\n")
    assert "\x1b" not in shown
    assert printable(shown) == shown
    if text.isprintable():
        assert shown == text


def test_bytes_that_are_no_text_are_printable() -> None:
    """As Python has them in names of files; no file of UTF-8 could have them."""
    assert printable("a\udcff\uffff") == "a\\udcff\\uffff"


def test_a_terminal_gets_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    """In results and in remarks."""
    print_result("a\x1b[2Jb")
    remark("a\x9bb")
    assert capsys.readouterr() == ("a\\u001b[2Jb\n", "a\\u009bb\n")


@given(st.text())
def test_an_inner_path_stays_in_its_folder(name: str) -> None:
    """Whatever the name of a model."""
    path = inner_path(f"cpu/{name}/full")
    assert not path.is_absolute()
    assert not {"..", "."} & set(path.parts)


def test_an_ordinary_name_is_its_own_path() -> None:
    """Organisations of the hub are folders."""
    name = "A40/meta-llama/Llama-3.1-8B/lora-r16+head/dense/seq512"
    assert inner_path(name) == PurePosixPath(name)


@pytest.mark.parametrize("text", ["=1+1", "+a", "-a", "@a", "\ta"])
def test_a_formula_is_text_in_a_spreadsheet(text: str) -> None:
    """Numbers stay numbers."""
    buffer = io.StringIO()
    csv.writer(buffer).writerow(map(spreadsheet_cell, [text, -1.5, "a-b", None]))
    assert next(csv.reader([buffer.getvalue()])) == [f"'{text}", "-1.5", "a-b", ""]


@given(st.text("'=-a\t", max_size=4))
def test_a_cell_is_read_as_it_was_given(text: str) -> None:
    """Also where the text begins with a quote of its own."""
    cell = spreadsheet_cell(text)
    assert isinstance(cell, str)
    assert not cell.startswith(("=", "-", "\t"))
    assert from_spreadsheet_cell(cell) == text
