"""The part of ``docs/accuracy.md`` on published runs and other tools, from other_tools/errors.json.

``other_tools.py`` writes that file; nothing is simulated here.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.markdown_table import table

FOLDER = Path(__file__).with_name("other_tools")
OURS = "this project"
Tools = dict[str, Any]


def answered(record: Tools) -> list[str]:
    """Tools with an answer for any run, this project first."""
    groups = (group["errors"] for group in record["published"])
    names = {tool for errors in groups for tool in errors} - {OURS}
    return [OURS, *(tool for tool in record["versions"] if tool in names)]


def group_row(group: Tools, tools: Sequence[str]) -> tuple[object, ...]:
    """Runs of a group, then the median and the largest error of each tool."""
    errors = group["errors"]
    cells: list[object] = [group["name"], errors[OURS]["runs"]]
    for tool in tools:
        sizes = errors.get(tool)
        if sizes is None:
            cells.append("")
            continue
        few = f" (of {sizes['runs']})" if sizes["runs"] < errors[OURS]["runs"] else ""
        cells.append(f"{sizes['median']:.1%}, {sizes['largest']:.1%}{few}")
    return tuple(cells)


def published_tables(record: Tools) -> str:
    """Groups of published runs, the worst first, and summaries by GPU, method and stack."""
    tools = answered(record)
    parts = []
    for kind, title in (
        ("together", "stack, GPU, method"),
        ("GPU", "GPU"),
        ("method", "method"),
        ("stack", "stack"),
        ("all", ""),
    ):
        groups = [group for group in record["published"] if group["kind"] == kind]
        groups.sort(key=lambda group: -group["errors"][OURS]["largest"])
        rows = [group_row(group, tools) for group in groups]
        parts.append(table((title, "runs", *tools), rows))
    return "\n\n".join(parts)


def own_rows(
    record: Tools, runs: Sequence[tuple[str, int, tuple[object, ...], float, float]]
) -> str:
    """Errors of every tool for the runs that this project measured.

    Args:
        record: answers of the tools.
        runs: key and micro-batch of each run, the cells that name it, its reserved GiB, and the
            relative error of today's prediction.
    """
    answers = {(one["run"], one["batch"]): one["answers"] for one in record["own"]}
    tools = answered(record)[1:]
    rows = []
    for key, batch, cells, gib, error in runs:
        given = answers[key, batch]
        theirs = [
            f"{given[tool] / gib - 1:+.0%}" if isinstance(given[tool], float) else given[tool]
            for tool in tools
        ]
        rows.append((*cells, f"{gib:.2f}", f"{error:+.1%}", *theirs))
    return table(("model", "recipe", "batch", "reserved GiB", OURS, *tools), rows)


def section(runs: Sequence[tuple[str, int, tuple[object, ...], float, float]]) -> str:
    """The section as Markdown."""
    record = json.loads((FOLDER / "errors.json").read_text(encoding="utf-8"))
    text = (FOLDER / "page.md").read_text(encoding="utf-8")
    return text.format(
        versions=", ".join(f"{tool} {version}" for tool, version in record["versions"].items()),
        own=own_rows(record, runs),
        published=published_tables(record),
    )
