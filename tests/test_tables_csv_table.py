"""Tables of users: reading, and mistakes with their lines."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from builders.messages import assert_lines

from fitting.tables.csv_table import CsvFile, CsvTable, UnusedRows, read_csv
from fitting.tables.table_error import TableError

SYNONYMS = {"gpu": ("device",), "batch_size": ("batch",)}
RAGGED = "the head has 2"


def positive(value: float) -> str | None:
    """Error of a number that is not above 0."""
    return None if value > 0 else "above 0"


def file_of(tmp_path: Path, content: str | bytes) -> Path:
    """File with this content."""
    path = tmp_path / "a.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_rows_are_named_by_their_line_numbers(tmp_path: Path) -> None:
    """Blank lines and multi-line fields do not shift later numbers."""
    path = file_of(tmp_path, 'gpu,note\nA40,x\n\nA10,"two\nlines"\nT4,y\n')
    frame, _ = read_csv(path)
    assert list(frame.index) == [2, 5, 6]
    assert list(frame["gpu"]) == ["A40", "A10", "T4"]


@pytest.mark.parametrize("content", ["gpu;n\nA40;1\n", "gpu\tn\nA40\t1\n", "\ufeffgpu,n\nA40,1\n"])
def test_files_of_spreadsheets_are_read(tmp_path: Path, content: str) -> None:
    """They may have semicolons, tabs or a byte order mark."""
    frame, _ = read_csv(file_of(tmp_path, content))
    assert list(frame.columns) == ["gpu", "n"]
    assert frame.to_numpy().tolist() == [["A40", "1"]]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no rows"),
        ("gpu,n\n", "no rows"),
        (b"gpu,n\n\xff,1\n", "byte 6"),
    ],
)
def test_a_file_that_is_no_table_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | bytes, words: str
) -> None:
    """The error names the file."""
    file_of(tmp_path, content)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TableError) as error:
        read_csv(Path("a.csv"))
    assert_lines(str(error.value), ("a.csv: ", words))


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (
            "gpu,batch\nA40\nA40,x\nA40,1,2\n",
            [f"2: fields: 1, where {RAGGED}", "3: batch: must be", f"4: fields: 3, where {RAGGED}"],
        ),
        (
            'gpu,batch\nA40,0\n"A40,1\n',
            ["2: batch: must be above 0", "3: is no CSV (unexpected end of data)"],
        ),
        ("gpu,batch\nA40,0\nA40\n" + 99 * "A40,1,2\n", ["2: batch: ", "3: fields: 1"]),
    ],
)
def test_malformed_lines_do_not_hide_other_mistakes(
    tmp_path: Path, content: str, lines: list[str]
) -> None:
    """The first twenty malformed lines are listed among the other mistakes."""
    frame, file = read_csv(file_of(tmp_path, content))
    table = CsvTable(frame, SYNONYMS, file)
    table.numbers("batch_size", positive)
    with pytest.raises(TableError) as error:
        table.check()
    mistakes = str(error.value).split("\n")
    for line, begin in zip(mistakes, lines, strict=False):
        assert line.startswith(f"{tmp_path}/a.csv:{begin}")
    assert len(mistakes) == min(content.count("\n") - 1, 21)
    assert ("80 more" in mistakes[-1]) == (len(mistakes) == 21)


def test_a_missing_file_and_a_folder_are_errors(tmp_path: Path) -> None:
    """The message names the path."""
    with pytest.raises(TableError, match=r"none\.csv: no such file"):
        read_csv(tmp_path / "none.csv")
    with pytest.raises(TableError, match="is a folder"):
        read_csv(tmp_path)


def test_a_column_is_recognised_by_any_of_its_names() -> None:
    """Case, spaces and punctuation do not matter; unknown columns are listed."""
    frame = pd.DataFrame({"Device ": ["A40", None], "BATCH-size": [8, 4], "colour": [1, 2]})
    table = CsvTable(frame, SYNONYMS)
    assert table.texts("gpu") == ["A40", None]
    assert table.numbers("batch_size", positive).tolist() == [8.0, 4.0]
    assert table.unused == ["colour"]


def test_a_column_under_two_names_is_a_mistake() -> None:
    """The message has both of them."""
    frame = pd.DataFrame([["A40", "A10"]], columns=["gpu", "device"])
    with pytest.raises(TableError, match="'gpu' and 'device'"):
        CsvTable(frame, SYNONYMS).check()


def test_every_mistake_is_reported_once_and_in_order() -> None:
    """A line has the row, the column as the table names it, and the value."""
    values = ["8", "x", 0, "1,5", "inf", True, "1_0", "", None, np.nan]
    frame = pd.DataFrame({"Batch": values}, index=range(2, 12))
    table = CsvTable(frame, SYNONYMS, CsvFile("a.csv"))
    numbers = table.numbers("batch_size", positive)
    table.row_is_wrong("batch_size", 1, "is wrong in another way, too")
    table.head_is_wrong("no column gpu")
    with pytest.raises(TableError) as error:
        table.check()
    assert_lines(
        str(error.value),
        ("a.csv:1: ", "gpu"),
        ("a.csv:3: Batch: ", "'x'"),
        ("a.csv:4: Batch: ", "above 0, not 0"),
        ("a.csv:5: Batch: ", "'1,5'", "point"),
        ("a.csv:6: Batch: ", "'inf'"),
        ("a.csv:7: Batch: ", "True"),
        ("a.csv:8: Batch: ", "'1_0'"),
    )
    assert np.flatnonzero(np.isfinite(numbers)).tolist() == [0]


def test_a_column_that_is_wrong_throughout_has_twenty_lines() -> None:
    """The last line says how many more there are."""
    table = CsvTable(pd.DataFrame({"batch": ["x"] * 1000}), SYNONYMS)
    table.numbers("batch_size", positive)
    with pytest.raises(TableError) as error:
        table.check()
    lines = str(error.value).split("\n")
    assert len(lines) == 20
    assert lines[0].startswith("row 0: batch: ")
    assert "980 more" in lines[-1]


def test_excluded_rows_are_counted_once_and_not_checked() -> None:
    """A row counts for its first reason; a reason without rows is not listed."""
    table = CsvTable(pd.DataFrame({"batch": ["x", "1", "y"]}), SYNONYMS)
    table.leave_out(np.array([True, False, False]), "first")
    table.leave_out(np.array([True, False, True]), "second")
    table.leave_out(np.array([True, False, True]), "third")
    assert table.numbers("batch_size", positive).tolist()[1] == 1.0
    table.check()
    assert table.left_out == [UnusedRows("first", 1), UnusedRows("second", 1)]
