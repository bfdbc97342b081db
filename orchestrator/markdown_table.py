"""Markdown tables that read well as plain text too."""

from collections.abc import Iterable, Mapping, Sequence


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table, its columns padded."""
    cells = [[str(value).replace("|", "\\|") for value in row] for row in (headers, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def records_table(records: Iterable[Mapping[str, object]]) -> str:
    """A Markdown table of records with the same keys, which are its headers; at least one."""
    rows = list(records)
    return table(list(rows[0]), [list(row.values()) for row in rows])


def span(values: Iterable[float], digits: str) -> str:
    """The least and the most of some values, once where they read the same.

    Args:
        values: at least one.
        digits: how each is written, as ``format`` has it.
    """
    listed = list(values)
    low, high = format(min(listed), digits), format(max(listed), digits)
    return low if low == high else f"{low} to {high}"
