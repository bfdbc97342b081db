"""Tables of users: columns by synonyms, checked values, all mistakes of a file at once.

A schema library would not shorten this module: pandera checks frames whose columns are already
named and typed, which is less than a tenth of the code here. The rest handles synonyms, broken
lines, rows to leave out and mistyped names, with the file's line, column and value in each message.
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
from gpu_catalog.user_file import text_of

LINE = "line"  # name of the index of a frame that was read from a file
BLANK = frozenset({"", "-", "na", "n/a", "nan", "none", "null", "<na>"})
MOST_OF_A_COLUMN = 20  # mistakes listed for a column, or of broken lines; the rest are counted
MOST_CHARACTERS = 60
MOST_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class CsvFile:
    """File that a frame was read from."""

    name: str
    broken: tuple[tuple[int, str], ...] = ()


def read_csv(path: Path) -> tuple[pd.DataFrame, CsvFile]:
    """Read a CSV file as texts, with the line of each row as the frame's index.

    Fields are separated by commas, semicolons or tabs. Lines with another number of fields than the
    head become mistakes that ``CsvTable.check`` lists.

    Raises:
        TableError: the file cannot be read.
    """
    text = text_of(path, TableError, MOST_BYTES)
    delimiter = next((sign for sign in ",;\t" if sign in text.partition("\n")[0]), ",")
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
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
    return frame, CsvFile(str(path), tuple(broken))


def folded(name: object) -> str:
    """Name without case and punctuation: ``Examples / s`` becomes ``exampless``."""
    return "".join(sign for sign in str(name).casefold() if sign.isalnum())


def quoted(value: object) -> str:
    """Value as messages quote it, shortened to ``MOST_CHARACTERS``."""
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 3] + "..."


def is_blank(value: object) -> bool:
    """Whether a cell is empty or holds one of the words in ``BLANK``."""
    if isinstance(value, str):
        return value.strip().casefold() in BLANK
    return value is None or value is pd.NA or value is pd.NaT or value != value  # noqa: PLR0124 - nan


@dataclass(frozen=True, slots=True)
class UnusedRows:
    """Number of rows of a table that were not used, with the reason."""

    reason: str
    rows: int


class CsvTable:
    """Frame with columns under canonical names that collects its mistakes.

    Args:
        frame: table. Messages name its rows by the index: the lines of a file.
        synonyms: ``folded`` synonyms of each column by its canonical name.
        file: file of the frame; None for a frame from elsewhere.

    Attributes:
        unused: columns that match no canonical name.
        kept: (rows,) mask of the rows that are used.
        left_out: numbers of unused rows, by reason.
    """

    def __init__(
        self,
        frame: pd.DataFrame,
        synonyms: Mapping[str, Sequence[str]],
        file: CsvFile | None = None,
    ) -> None:
        self._frame = frame
        self._file = file
        self._head_mistakes: list[str] = []
        self._row_mistakes: dict[str, dict[int, str]] = {}
        self._places: dict[str, int] = {}
        canonical = {
            other: name for name, others in synonyms.items() for other in (folded(name), *others)
        }
        self.unused: list[str] = []
        self.left_out: list[UnusedRows] = []
        self.kept: BoolArray = np.ones(len(frame), bool)
        for place, column in enumerate(frame.columns):
            name = canonical.get(folded(column))
            if name is None:
                self.unused.append(str(column))
            elif name in self._places:
                first = frame.columns[self._places[name]]
                self.head_is_wrong(
                    f"columns {quoted(str(first))} and {quoted(str(column))} are both {name}: "
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
        """Leave rows out for a reason; they are counted but not checked."""
        count = int((rows & self.kept).sum())
        if count:
            self.left_out.append(UnusedRows(reason, count))
        self.kept &= ~rows

    def head_is_wrong(self, text: str) -> None:
        """Record a mistake of the head."""
        self._head_mistakes.append(text)

    def row_is_wrong(self, name: str, place: int, text: str) -> None:
        """Record a mistake in a column of a row, counted from 0; a cell keeps its first one."""
        self._row_mistakes.setdefault(name, {}).setdefault(place, text)

    def texts(self, name: str) -> list[str | None]:
        """(rows,) stripped texts; None where blank or without such a column."""
        return [
            None if is_blank(value) else _as_text(value).strip() for value in self._values(name)
        ]

    def numbers(self, name: str, wrong: Callable[[float], str | None]) -> FloatArray:
        """(rows,) finite numbers; nan where blank, left out or without such a column.

        Args:
            name: canonical name of the column.
            wrong: requirement that a number violates, for example ``above 0``; None if it is valid.
        """
        numbers = np.full(len(self), np.nan)
        for place, value in enumerate(self._values(name)):
            if not self.kept[place] or is_blank(value):
                continue
            number = _number(value)
            if number is None:
                hint = ": no commas, a point before decimals" if str(value).count(",") == 1 else ""
                self.row_is_wrong(name, place, f"must be a number, not {quoted(value)}{hint}")
                continue
            requirement = wrong(number)
            if requirement is not None:
                self.row_is_wrong(name, place, f"must be {requirement}, not {quoted(value)}")
            else:
                numbers[place] = number
        return numbers

    def check_filled(self, name: str) -> None:
        """Record the blank cells of a column, if the table has it, as mistakes."""
        if name not in self:
            return
        for place, text in enumerate(self.texts(name)):
            if text is None and self.kept[place]:
                self.row_is_wrong(name, place, "is empty: fill it in, or leave the row out")

    def check(self) -> None:
        """Raise the recorded mistakes, in the order of the table.

        Raises:
            TableError: at least one mistake was recorded.
        """
        index = self._frame.index
        at, head, broken, keys = "row ", "", [], list(range(len(self)))
        if self._file is not None:
            at, head = f"{self._file.name}:", f"{self._file.name}:1: "
            broken = [(line, f"{at}{line}: {text}") for line, text in self._file.broken]
            keys = index.tolist()
        messages = [(line, -1, text) for line, text in first_mistakes(broken, "such lines")]
        for name, mistakes in self._row_mistakes.items():
            column = self._places.get(name, -1)
            label = name if column < 0 else self._frame.columns[column]
            texts = [(keys[p], f"{at}{index[p]}: {label}: {t}") for p, t in mistakes.items()]
            shown = first_mistakes(texts, "in this column")
            messages += [(key, column, text) for key, text in shown]
        lines = [f"{head}{text}" for text in self._head_mistakes]
        lines += [text for *_, text in sorted(messages)]
        if lines:
            raise TableError("\n".join(lines))

    def remark(self, text: str) -> str:
        """Remark on the table that is no mistake, with the file's name."""
        return text if self._file is None else f"{self._file.name}: {text}"

    def _values(self, name: str) -> list[object]:
        if name not in self._places:
            return [None] * len(self)
        values: list[object] = self._frame.iloc[:, self._places[name]].tolist()
        return values


def first_mistakes(mistakes: list[tuple[int, str]], kind: str) -> list[tuple[int, str]]:
    """First mistakes of a kind; the last one shown counts those that follow."""
    if len(mistakes) <= MOST_OF_A_COLUMN:
        return mistakes
    *first, (place, last) = mistakes[:MOST_OF_A_COLUMN]
    more = len(mistakes) - MOST_OF_A_COLUMN
    return [*first, (place, f"{last} (and {more} more {kind})")]


def _as_text(value: object) -> str:
    # pandas reads a column of whole numbers with a gap as floats: 512.0.
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _number(value: object) -> float | None:
    if isinstance(value, bool | np.bool_) or not isinstance(value, str | int | float | np.number):
        return None
    if isinstance(value, str) and "_" in value:  # float() would accept 1_000
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def positive(value: float) -> str | None:
    """Requirement of a positive number, for ``CsvTable.numbers``."""
    return None if value > 0 else "above 0"


def whole(value: float) -> str | None:
    """Requirement of a positive whole number, for ``CsvTable.numbers``."""
    return None if value >= 1 and value.is_integer() else "a whole number of at least 1"
