"""Text from outside, made safe for terminals, comments, spreadsheets and paths."""

import re
from pathlib import PurePosixPath

# Control characters but tab and newline, line ends of YAML and Unicode, changes of direction, and
# what no file of YAML or UTF-8 may have.
UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]"
)
FORMULA = ("=", "+", "-", "@", "\t", "\r")


def printable(text: str) -> str:
    r"""Text whose control characters are written out as ``\uXXXX``, as JSON does.

    A terminal would obey them, and some end a line, and with it a comment.
    """
    return UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def spreadsheet_cell(value: object) -> object:
    """Value for a CSV file; text that a spreadsheet would run as a formula is quoted.

    Text that looks quoted already gets a further quote, so that ``from_spreadsheet_cell`` gives
    back whatever was written.
    """
    return f"'{value}" if isinstance(value, str) and _is_formula(value.lstrip("'")) else value


def from_spreadsheet_cell(cell: str) -> str:
    """Text of a cell without the quote that ``spreadsheet_cell`` added."""
    is_quoted = cell.startswith("'") and _is_formula(cell.lstrip("'"))
    return cell[1:] if is_quoted else cell


def _is_formula(text: str) -> bool:
    return text.startswith(FORMULA)


def inner_path(name: str) -> PurePosixPath:
    """Relative path for a name with slashes, which stays inside the folder it is added to."""
    parts = (re.sub(r"[^\w.=+-]", "_", part) for part in name.split("/"))
    return PurePosixPath(*(part for part in parts if part.strip(".")))
