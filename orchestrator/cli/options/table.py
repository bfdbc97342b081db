"""Options of a command, read from a table that is written like its help.

An entry is an option and, after two spaces or on indented lines, its help::

    --json                   a flag
    --[no-]spot              a flag that can be negated
    --most N                 an option with a value
    --method {full,lora}     one of several words
    --prices FILE...         repeatable
    run RUN                  an argument by its name and how the help shows it
    [other] OTHER            an argument that may be left out
    runs RUN...              one or more of them
    prices and offers:       the options below are listed under this title; tables share titles
"""

import argparse
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from orchestrator.cli.options.value_types import above_zero, date, positive, web_address

# Types of values by how the help shows them.
TYPES: dict[str, Callable[[str], object]] = {
    "N": positive,
    "USD": above_zero,
    "HOURS": above_zero,
    "FILE": Path,
    "DATE": date,
    "URL": web_address,
}


def add_table(
    command: argparse._ActionsContainer,
    table: str,
    *,
    required: Collection[str] = (),
    **types: Callable[[str], object],
) -> None:
    """Add the options of a table.

    Args:
        command: a parser, or a group of its options.
        table: the entries.
        required: options that must be given.
        types: types of values, by option with ``_`` for ``-`` or by how the help shows them, over
            ``TYPES``; text by default.
    """
    options = command
    for entry in re.split(r"\n(?=\S)", table.strip()):
        if entry.endswith(":"):
            options = titled(command, entry.removesuffix(":"))
            continue
        usage, text = re.split(r" {2,}|\n", entry, maxsplit=1)
        name, _, value = usage.partition(" ")
        settings: dict[str, Any] = {"help": " ".join(text.split()).replace("%", "%%")}
        if name in required:
            settings["required"] = True
        if name.startswith("--[no-]"):
            settings["action"] = argparse.BooleanOptionalAction
        elif not value:
            settings["action"] = "store_true"
        else:
            settings |= _value_settings(name, value, TYPES | types)
        options.add_argument(re.sub(r"\[no-\]|[\[\]]", "", name), **settings)


def titled(command: argparse._ActionsContainer, title: str) -> argparse._ArgumentGroup:
    """The group of options with a title, made where there is none."""
    groups: list[argparse._ArgumentGroup] = command._action_groups  # noqa: SLF001 - no public name
    same = (group for group in groups if group.title == title)
    return next(same, None) or command.add_argument_group(title)


def _value_settings(
    name: str, value: str, types: dict[str, Callable[[str], object]]
) -> dict[str, Any]:
    """Settings of an option that has a value."""
    shown = value.removesuffix("...")
    settings: dict[str, Any] = {}
    if shown.startswith("{"):
        settings["choices"] = tuple(shown[1:-1].split(","))
    else:
        settings["metavar"] = shown
        settings["type"] = types.get(name.strip("-[]").replace("-", "_"), types.get(shown))
    if name.startswith("["):
        settings["nargs"] = "?"
    elif shown != value:
        settings |= {"action": "append"} if name.startswith("-") else {"nargs": "+"}
    return settings
