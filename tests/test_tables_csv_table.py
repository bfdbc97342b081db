"""Tables that anybody made: what is read, and that every mistake is told with its place."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fitting.tables.csv_table import CsvTable, SheetFile, UnusedRows, read_sheet
from fitting.tables.table_error import TableError

SYNONYMS = {"gpu": ("device",), "batch_size": ("batch",)}
RAGGED = "the head has 2: quote those with commas in them, fill in missing ones"


def positive(value: float) -> str | None:
    """A check of numbers."""
    return None if value > 0 else "above 0"


def file_of(tmp_path: Path, content: str | bytes) -> Path:
    """A file with just this in it."""
    path = tmp_path / "a.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_rows_are_known_by_their_lines(tmp_path: Path) -> None:
    """Blank lines and fields of several lines do not shift what follows."""
    path = file_of(tmp_path, 'gpu,note\nA40,x\n\nA10,"two\nlines"\nT4,y\n')
    frame, _ = read_sheet(path)
    assert list(frame.index) == [2, 5, 6]
    assert list(frame["gpu"]) == ["A40", "A10", "T4"]


@pytest.mark.parametrize("content", ["gpu;n\nA40;1\n", "gpu\tn\nA40\t1\n", "\ufeffgpu,n\nA40,1\n"])
def test_what_spreadsheets_write_is_read(tmp_path: Path, content: str) -> None:
    """Semicolons, tabs, a mark at the beginning."""
    frame, _ = read_sheet(file_of(tmp_path, content))
    assert list(frame.columns) == ["gpu", "n"]
    assert frame.to_numpy().tolist() == [["A40", "1"]]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "a.csv: has no rows below a head: the first line names the columns"),
        ("gpu,n\n", "a.csv: has no rows below a head: the first line names the columns"),
        (b"gpu,n\n\xff,1\n", "a.csv: not UTF-8 text (byte 6): save it as UTF-8"),
    ],
)
def test_files_that_are_no_tables_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | bytes, words: str
) -> None:
    """In a line."""
    file_of(tmp_path, content)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TableError) as told:
        read_sheet(Path("a.csv"))
    assert str(told.value) == words


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (
            "gpu,batch\nA40\nA40,x\nA40,1,2\n",
            [f"2: fields: 1, where {RAGGED}", "3: batch: must be", f"4: fields: 3, where {RAGGED}"],
        ),
        (
            'gpu,batch\nA40,0\n"A40,1\n',
            ["2: batch: must be above 0", "3: is no CSV (unexpected end of data): repair the line"],
        ),
        ("gpu,batch\nA40,0\nA40\n" + 99 * "A40,1,2\n", ["2: batch: ", "3: fields: 1"]),
    ],
)
def test_lines_that_are_no_rows_hide_nothing(
    tmp_path: Path, content: str, lines: list[str]
) -> None:
    """They are told among the other mistakes, the first twenty of them."""
    frame, file = read_sheet(file_of(tmp_path, content))
    sheet = CsvTable(frame, SYNONYMS, file)
    sheet.numbers("batch_size", positive)
    with pytest.raises(TableError) as told:
        sheet.check()
    found = str(told.value).split("\n")
    for line, begin in zip(found, lines, strict=False):
        assert line.startswith(f"{tmp_path}/a.csv:{begin}")
    assert len(found) == min(content.count("\n") - 1, 21)
    assert ("(and 80 more such lines)" in found[-1]) == (len(found) == 21)


def test_files_that_are_not_there_are_told(tmp_path: Path) -> None:
    """In a line."""
    with pytest.raises(TableError, match=r"none\.csv: no such file"):
        read_sheet(tmp_path / "none.csv")
    with pytest.raises(TableError, match="is a folder; name the CSV file in it"):
        read_sheet(tmp_path)


def test_columns_go_by_any_of_their_names() -> None:
    """Case, spaces and punctuation do not count; what nobody knows is kept apart."""
    frame = pd.DataFrame({"Device ": ["A40", None], "BATCH-size": [8, 4], "colour": [1, 2]})
    sheet = CsvTable(frame, SYNONYMS)
    assert sheet.texts("gpu") == ["A40", None]
    assert sheet.numbers("batch_size", positive).tolist() == [8.0, 4.0]
    assert sheet.unused == ["colour"]


def test_a_column_that_is_there_twice_is_told() -> None:
    """By both of its names."""
    frame = pd.DataFrame([["A40", "A10"]], columns=["gpu", "device"])
    with pytest.raises(TableError, match="columns 'gpu' and 'device' both are gpu: drop one"):
        CsvTable(frame, SYNONYMS).check()


def test_every_mistake_is_told_once_and_in_order() -> None:
    """With the value, the row and the column as the table has it."""
    values = ["8", "x", 0, "1,5", "inf", True, "1_0", "", None, np.nan]
    frame = pd.DataFrame({"Batch": values}, index=range(2, 12))
    sheet = CsvTable(frame, SYNONYMS, SheetFile("a.csv"))
    numbers = sheet.numbers("batch_size", positive)
    sheet.row_is_wrong("batch_size", 1, "is wrong in another way, too")
    sheet.head_is_wrong("no column gpu")
    with pytest.raises(TableError) as told:
        sheet.check()
    assert str(told.value).split("\n") == [
        "a.csv:1: no column gpu",
        "a.csv:3: Batch: must be a number, not 'x'",
        "a.csv:4: Batch: must be above 0, not 0",
        "a.csv:5: Batch: must be a number, not '1,5': no commas, a point before decimals",
        "a.csv:6: Batch: must be a number, not 'inf'",
        "a.csv:7: Batch: must be a number, not True",
        "a.csv:8: Batch: must be a number, not '1_0'",
    ]
    assert np.flatnonzero(np.isfinite(numbers)).tolist() == [0]


def test_a_column_that_is_wrong_throughout_is_told_in_twenty_lines() -> None:
    """The last of them says how many more there are."""
    sheet = CsvTable(pd.DataFrame({"batch": ["x"] * 1000}), SYNONYMS)
    sheet.numbers("batch_size", positive)
    with pytest.raises(TableError) as told:
        sheet.check()
    lines = str(told.value).split("\n")
    assert len(lines) == 20
    assert lines[0] == "row 0: batch: must be a number, not 'x'"
    assert lines[-1].endswith("(and 980 more in this column)")


def test_rows_left_out_are_counted_once_and_not_checked() -> None:
    """By the first reason that holds; a reason of none is not told."""
    sheet = CsvTable(pd.DataFrame({"batch": ["x", "1", "y"]}), SYNONYMS)
    sheet.leave_out(np.array([True, False, False]), "first")
    sheet.leave_out(np.array([True, False, True]), "second")
    sheet.leave_out(np.array([True, False, True]), "third")
    assert sheet.numbers("batch_size", positive).tolist()[1] == 1.0
    sheet.check()
    assert sheet.left_out == [UnusedRows("first", 1), UnusedRows("second", 1)]
