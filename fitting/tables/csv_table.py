"""Other people's tables: columns by our names, values checked, all mistakes at once.

A schema library does not shorten this: pandera checks a frame whose columns are named and typed
already, less than a tenth of the code here. The rest finds columns by synonyms, broken lines, rows
to leave out and near misses of names, and words messages with the file's line, column and value.
"""

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from fitting.numerics.arrays import BoolArray, FloatArray
from fitting.tables.table_error import TableError
from gpu_catalog.suggestions import did_you_mean

LINE = "line"  # what the index of a file's rows is called
BLANK = frozenset({"", "-", "na", "n/a", "nan", "none", "null", "<na>"})
MOST_OF_A_COLUMN = 20  # mistakes named of a column, or of broken lines; others are counted
MOST_CHARACTERS = 60
TIDY_ENCODING = "utf-8-sig"  # as UTF-8, and as spreadsheets write it


@dataclass(frozen=True, slots=True)
class SheetFile:
    """The file a frame was read from.

    Attributes:
        name: as messages have it.
        broken: lines that are no row of the frame, and what is wrong with each.
    """

    name: str
    broken: tuple[tuple[int, str], ...] = ()


def read_sheet(path: Path) -> tuple[pd.DataFrame, SheetFile]:
    """A CSV file as texts, its rows indexed by their lines; comma, semicolon or tab between fields.

    Lines that do not fit its head are no rows: a ``CsvTable`` lists them with the other mistakes.

    Raises:
        TableError: it cannot be read.
    """
    text = _text(path)
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(text), strict=True)
    head: list[str] = []
    rows, numbers, broken = [], [], []
    try:
        head = next(lines, [])
        for row in lines:
            if not any(field.strip() for field in row):
                continue
            if len(row) == len(head):
                rows.append(row)
                numbers.append(lines.line_num)
            else:
                counts = f"fields: {len(row)}, where the head has {len(head)}"
                hint = "quote those with commas in them, fill in missing ones"
                broken.append((lines.line_num, f"{counts}: {hint}"))
    except csv.Error as error:
        broken.append((lines.line_num, f"is no CSV ({error}): repair the line"))
    if not head or not (rows or broken):
        raise TableError(f"{path}: has no rows below a head: the first line names the columns")
    frame = pd.DataFrame(rows, columns=head, index=pd.Index(numbers, name=LINE), dtype=object)
    return frame, SheetFile(str(path), tuple(broken))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding=TIDY_ENCODING)
    except FileNotFoundError:
        raise TableError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise TableError(f"{path}: is a folder; name the CSV file in it") from None
    except UnicodeDecodeError as error:
        raise TableError(f"{path}: not UTF-8 text (byte {error.start}): save it as UTF-8") from None
    except OSError as error:
        raise TableError(f"{path}: cannot be read: {error.strerror}") from None


def _delimiter(text: str) -> str:
    head = text.partition("\n")[0]
    return next((sign for sign in ",;\t" if sign in head), ",")


def folded(name: object) -> str:
    """A name without case and punctuation: ``Queries / s`` as ``queriess``."""
    return "".join(sign for sign in str(name).casefold() if sign.isalnum())


def quoted(value: object) -> str:
    """A value as messages quote it: short."""
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 3] + "..."


def is_blank(value: object) -> bool:
    """Whether a cell is empty, or has one of the usual words for it."""
    if isinstance(value, str):
        return value.strip().casefold() in BLANK
    return value is None or value is pd.NA or value is pd.NaT or value != value  # noqa: PLR0124 - nan


@dataclass(frozen=True, slots=True)
class UnusedRows:
    """Rows that had no part in what was done with a table."""

    reason: str
    rows: int


class CsvTable:
    """A frame whose columns are addressed by our names, and which gathers its mistakes.

    Args:
        frame: the table. Its index is how its rows are named in messages: a file's lines.
        synonyms: what else each column is called, by our name of it, ``folded``.
        file: where the frame is from; absent for one that is no file's.

    Attributes:
        unused: columns that go by no name of ours.
        kept: (rows,) those not left out.
        left_out: the others, by reason.
    """

    def __init__(
        self,
        frame: pd.DataFrame,
        synonyms: Mapping[str, Sequence[str]],
        file: SheetFile | None = None,
    ) -> None:
        self._frame = frame
        self._file = file
        self._synonyms = synonyms
        self._of_columns: list[str] = []
        self._of_rows: dict[str, dict[int, str]] = {}
        self._places: dict[str, int] = {}
        ours = {folded(name): name for name in synonyms}
        ours |= {other: name for name, others in synonyms.items() for other in others}
        self.unused: list[str] = []
        self.left_out: list[UnusedRows] = []
        self.kept: BoolArray = np.ones(len(frame), bool)
        for place, column in enumerate(frame.columns):
            name = ours.get(folded(column))
            if name is None:
                self.unused.append(str(column))
            elif name in self._places:
                first = frame.columns[self._places[name]]
                self.head_is_wrong(
                    f"columns {quoted(str(first))} and {quoted(str(column))} both are {name}: "
                    "drop one"
                )
            else:
                self._places[name] = place

    def __len__(self) -> int:
        return len(self._frame)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    @property
    def index(self) -> pd.Index:
        """Index of the frame: a file's line numbers."""
        return self._frame.index

    def leave_out(self, rows: BoolArray, reason: str) -> None:
        """Leave rows out for a reason: they are counted, and not checked."""
        count = int((rows & self.kept).sum())
        if count:
            self.left_out.append(UnusedRows(reason, count))
        self.kept &= ~rows

    def near(self, column: str) -> str:
        """Suggestion of the column that an unknown one was meant to be; empty without one."""
        return did_you_mean(column, self._synonyms)

    def head_is_wrong(self, text: str) -> None:
        """Note a mistake of the columns."""
        self._of_columns.append(text)

    def row_is_wrong(self, name: str, place: int, text: str) -> None:
        """Note a mistake in a column of a row, counted from 0; the first of a cell is kept."""
        self._of_rows.setdefault(name, {}).setdefault(place, text)

    def texts(self, name: str) -> list[str | None]:
        """(rows,) stripped texts; None where blank, or where there is no such column."""
        return [
            None if is_blank(value) else _as_text(value).strip() for value in self._values(name)
        ]

    def numbers(self, name: str, wrong: Callable[[float], str | None]) -> FloatArray:
        """(rows,) finite numbers; nan where blank, left out, or where there is no such column.

        Args:
            name: of the column, ours.
            wrong: what a number has to be and is not: ``above 0``; None of one that is right.
        """
        found = np.full(len(self), np.nan)
        for place, value in enumerate(self._values(name)):
            if not self.kept[place] or is_blank(value):
                continue
            number = _number(value)
            if number is None:
                hint = ": no commas, a point before decimals" if str(value).count(",") == 1 else ""
                self.row_is_wrong(name, place, f"must be a number, not {quoted(value)}{hint}")
                continue
            needed = wrong(number)
            if needed is not None:
                self.row_is_wrong(name, place, f"must be {needed}, not {quoted(value)}")
            else:
                found[place] = number
        return found

    def check_filled(self, name: str) -> None:
        """Note the blank cells of a column, if there is one."""
        if name not in self:
            return
        for place, text in enumerate(self.texts(name)):
            if text is None and self.kept[place]:
                self.row_is_wrong(name, place, "is empty: fill it in, or leave the row out")

    def check(self) -> None:
        """Raise the mistakes noted.

        Raises:
            TableError: there are any.
        """
        head = "" if self._file is None else f"{self._file.name}:1: "
        lines = [f"{head}{text}" for text in self._of_columns]
        messages = []
        for name, found in self._of_rows.items():
            label, column = self._label(name), self._places.get(name, -1)
            texts = [(row, f"{self._at(row)}: {label}: {text}") for row, text in found.items()]
            messages += [(self._line(row), column, text) for row, text in found_first(texts)]
        if self._file is not None:
            broken = [
                (line, f"{self._file.name}:{line}: {text}") for line, text in self._file.broken
            ]
            messages += [(line, -1, text) for line, text in found_first(broken, of="such lines")]
        lines += [text for _, _, text in sorted(messages)]
        if lines:
            raise TableError("\n".join(lines))

    def remark(self, text: str) -> str:
        """A line on the table that is no mistake, with the file's name."""
        return text if self._file is None else f"{self._file.name}: {text}"

    def _values(self, name: str) -> list[object]:
        if name not in self._places:
            return [None] * len(self)
        values: list[object] = self._frame.iloc[:, self._places[name]].tolist()
        return values

    def _label(self, name: str) -> str:
        """Name of a column in the table itself."""
        return str(self._frame.columns[self._places[name]]) if name in self._places else name

    def _at(self, place: int) -> str:
        row = self._frame.index[place]
        return f"row {row}" if self._file is None else f"{self._file.name}:{row}"

    def _line(self, place: int) -> int:
        """Order of a row's messages: by the file's lines, else by place."""
        return place if self._file is None else int(self._frame.index[place])


def found_first(
    mistakes: list[tuple[int, str]], of: str = "in this column"
) -> list[tuple[int, str]]:
    """The first mistakes of a kind, and how many more there are."""
    if len(mistakes) <= MOST_OF_A_COLUMN:
        return mistakes
    *first, (place, last) = mistakes[:MOST_OF_A_COLUMN]
    more = len(mistakes) - MOST_OF_A_COLUMN
    return [*first, (place, f"{last} (and {more} more {of})")]


def _as_text(value: object) -> str:
    # 512.0 is how a column of whole numbers with a gap comes out of pandas.
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _number(value: object) -> float | None:
    if isinstance(value, bool | np.bool_) or not isinstance(value, str | int | float | np.number):
        return None
    if isinstance(value, str) and "_" in value:  # Python reads 1_000, no spreadsheet writes it
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
