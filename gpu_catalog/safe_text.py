"""Text from outside, made safe for terminals, comments, spreadsheets and paths."""

import re
from pathlib import PurePosixPath

# Control characters but tab and newline, line ends of YAML and Unicode, and changes of direction.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
FORMULA = ("=", "+", "-", "@", "\t", "\r")


def printable(text: str) -> str:
    r"""Text whose control characters are written out as ``\uXXXX``, as JSON does.

    A terminal would obey them, and some end a line, and with it a comment.
    """
    return UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def spreadsheet_cell(value: object) -> object:
    """Value for a CSV file; text that a spreadsheet would run as a formula is quoted."""
    is_formula = isinstance(value, str) and value.startswith(FORMULA)
    return f"'{value}" if is_formula else value


def inner_path(name: str) -> PurePosixPath:
    """Relative path for a name with slashes, which stays inside the folder it is added to."""
    parts = (re.sub(r"[^\w.=+-]", "_", part) for part in name.split("/"))
    return PurePosixPath(*(part for part in parts if part.strip(".")))
