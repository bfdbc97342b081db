"""Markdown with tables in a terminal that is narrower than they are. Pure.

The column of long text moves to a line below each row, and then the recipe. If that does not
suffice, columns that decide nothing are hidden, and a line below the table names them; then the
batch, the odds and the experts move below, too. A table that is still too wide becomes a list.
Sentences beside tables break between words, and names of cells after a slash.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from orchestrator.markdown_table import table

# Columns in the order in which they are hidden.
MINOR = (
    *("stack", "price date", "condition number", "reserved GiB", "peak GiB", "s/step"),
    *("source", "region", "examples/s", "rows/s", "largest", "$/h"),
    *("billed", "recorded", "as of"),
)
# Columns of long text, one of which moves to a line below each row.
LONG = ("offer", "why", "detail", "cell", "trial", "device name", "instance")
# Columns that follow it if the table is still too wide: before any is hidden, and after.
EARLY = ("recipe",)
LATE = ("basis", "batch", "batch size", "P(cheapest)", "experts", "tokens")
CELL_END = re.compile(r"(?<!\\)\|")
INDENT = "    "
WHOLE = re.compile(r"://|^[~.]?/|\.\w{2,4}\W?$")  # a URL or a path of a file


def fitted(text: str, width: int) -> str:
    """Text whose Markdown tables and sentences are no wider than a terminal, where possible.

    Args:
        text: Markdown.
        width: columns of the terminal.
    """
    parts: list[str] = []
    for is_table, group in groupby(text.split("\n"), key=lambda line: line.startswith("|")):
        lines = list(group)
        is_wide = is_table and max(map(len, lines)) > width
        if is_table:
            parts += _narrowed(lines, width) if is_wide else lines
        else:
            parts += [part for line in lines for part in wrapped(line, width)]
    return "\n".join(parts)


def wrapped(line: str, width: int) -> list[str]:
    """A line of text, broken between words where it is too long; indented lines stay so.

    Args:
        line: text without line ends.
        width: columns of the terminal.
    """
    start = line[: len(line) - len(line.lstrip(" "))]
    indent = start + INDENT[:2] * line.startswith("- ")
    lines, begins = [start], True
    for word in line[len(start) :].split(" "):
        for place, part in enumerate(_parts(word, width - len(indent))):
            space = " " if place == 0 and not begins else ""
            if begins or lines[-1].strip() == "-" or len(lines[-1] + space + part) <= width:
                lines[-1] += space + part
            else:
                lines.append(indent + part)
            begins = False
    return lines


def _parts(word: str, width: int) -> list[str]:
    """A word, broken where it is too long for a line: after slashes, or else after hyphens.

    URLs and paths of files stay whole, for they are copied.
    """
    if len(word) <= width or WHOLE.search(word):
        return [word]
    parts = re.findall(r"[^/]*/|[^/]+$", word)
    if len(parts) == 1:
        return re.findall(r"[^-]*-|[^-]+$", word)
    return [piece for part in parts for piece in _parts(part, width)]


def _narrowed(lines: Sequence[str], width: int) -> list[str]:
    headers, _, *rows = (
        [cell.strip().replace("\\|", "|") for cell in CELL_END.split(line)[1:-1]] for line in lines
    )
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    below = [headers.index(name) for name in LONG if name in headers[1:]][:1]
    shown = [place for place in range(len(headers)) if place not in below]
    hidden = []
    for name in (*EARLY, *MINOR, *LATE):
        if sum(widths[place] + 3 for place in shown) + 1 <= width:
            break
        places = [place for place in shown if headers[place] == name]
        if below and name in (*EARLY, *LATE):
            below += places
        else:
            hidden += [name] * len(places)
        shown = [place for place in shown if place not in places]
    if sum(widths[place] + 3 for place in shown) + 1 > width:
        return _listed(headers, rows, width)
    made = table(
        [headers[place] for place in shown],
        [[row[place] for place in shown] for row in rows],
    ).split("\n")
    return [
        *_with_lines_below(made, [_below(headers, row, below) for row in rows], width),
        *_note(hidden, width),
    ]


def _listed(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """The first cell of each row, and below it the others with the names of their columns."""
    lines: list[str] = []
    for first, *others in rows:
        texts = [f"{name} {text}" for name, text in zip(headers[1:], others, strict=True) if text]
        lines += wrapped(f"- {first}", width)
        lines += wrapped(f"{INDENT}{'; '.join(texts)}", width) if texts else []
    return lines


def _below(headers: Sequence[str], row: Sequence[str], places: Sequence[int]) -> str:
    """Texts of a row that stand below it, with the names of their columns unless they are long."""
    alone = (*LONG, *EARLY)  # texts that say themselves what they are
    texts = [
        row[place] if headers[place] in alone else f"{headers[place]} {row[place]}"
        for place in sorted(places)
        if row[place]
    ]
    return "; ".join(texts)


def _with_lines_below(made: Sequence[str], texts: Sequence[str], width: int) -> Iterator[str]:
    yield from made[:2]
    for place, line in enumerate(made[2:]):
        yield line
        if texts[place]:
            yield from wrapped(f"{INDENT}{texts[place]}", width)


def _note(hidden: Sequence[str], width: int) -> list[str]:
    if not hidden:
        return []
    note = f"Hidden in this narrow terminal: {', '.join(hidden)}; --wide shows them."
    return wrapped(note, width)
