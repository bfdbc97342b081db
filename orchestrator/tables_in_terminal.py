"""Markdown tables in a terminal that is narrower than they are. Pure.

The column of long text moves to a line below each row. If that does not suffice, columns that
decide nothing are hidden, and a line below the table names them.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from orchestrator.markdown_table import table

# Columns in the order in which they are hidden.
MINOR = (
    *("stack", "price date", "condition number", "reserved GiB", "peak GiB", "s/step"),
    *("source", "region", "examples/s", "largest", "$/h", "basis"),
)
# Columns of long text, one of which moves to a line below each row.
LONG = ("offer", "why", "detail", "cell", "trial")
CELL_END = re.compile(r"(?<!\\)\|")
INDENT = "    "


def fitted(text: str, width: int) -> str:
    """Text with every Markdown table in it at most as wide as a terminal, where that is possible.

    Args:
        text: Markdown.
        width: columns of the terminal.
    """
    parts: list[str] = []
    for is_table, group in groupby(text.split("\n"), key=lambda line: line.startswith("|")):
        lines = list(group)
        is_wide = is_table and max(map(len, lines)) > width
        parts += _narrowed(lines, width) if is_wide else lines
    return "\n".join(parts)


def _narrowed(lines: Sequence[str], width: int) -> list[str]:
    headers, _, *rows = ([cell.strip() for cell in CELL_END.split(line)[1:-1]] for line in lines)
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    below = next((headers.index(name) for name in LONG if name in headers[1:]), None)
    shown = [place for place in range(len(headers)) if place != below]
    hidden = []
    for name in MINOR:
        if sum(widths[place] + 3 for place in shown) + 1 <= width:
            break
        places = [place for place in shown if headers[place] == name]
        hidden += [name] * len(places)
        shown = [place for place in shown if place not in places]
    made = table(
        [headers[place] for place in shown],
        [[row[place].replace("\\|", "|") for place in shown] for row in rows],
    ).split("\n")
    return [
        *_with_lines_below(made, [] if below is None else [row[below] for row in rows]),
        *_note(hidden),
    ]


def _with_lines_below(made: Sequence[str], texts: Sequence[str]) -> Iterator[str]:
    yield from made[:2]
    for place, line in enumerate(made[2:]):
        yield line
        if texts and texts[place]:
            yield f"{INDENT}{texts[place]}"


def _note(hidden: Sequence[str]) -> Iterator[str]:
    if hidden:
        yield f"Hidden in this narrow terminal: {', '.join(hidden)}; --wide shows them."
