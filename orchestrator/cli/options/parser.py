"""A parser that prints mistakes in one line with near matches."""

import argparse
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from gpu_catalog.suggestions import did_you_mean

UNKNOWN = "unrecognized arguments: "
MISSING = "the following arguments are required: "
CHOICES = re.compile(r"invalid choice: '(.*?)' \(choose from (.*)\)")


class Parser(argparse.ArgumentParser):
    """Prints a mistake in one line, with near matches, in place of a page of usage."""

    commands: Any = None
    _arguments: Any = ()

    def __init__(self, run: str | None = None, **options: Any) -> None:
        """Make a parser; its command calls ``run``, a module of commands and its function."""
        super().__init__(**options)
        self.set_defaults(run_command=run)

    def error(self, message: str) -> NoReturn:
        """End with exit code 2, the message and near matches of what is unknown."""
        text = "; ".join([message, *self._near(message)])
        self.exit(2, f"{self.prog}: {text} (--help lists every option)\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and let the command itself reject arguments that it does not have."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command = self.commands.choices.get(options.command, self)
            command.error(f"{UNKNOWN}{' '.join(unknown)}")
        return options

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and keep the arguments for near matches."""
        self._arguments = args or ()
        return super().parse_known_args(args, namespace)

    def _near(self, message: str) -> list[str]:
        """Near matches of what a message calls unknown: options, or choices of one."""
        choice = CHOICES.search(message)
        if choice is not None:
            return _near_matches([choice[1]], re.findall("'(.*?)'", choice[2]))
        names = [name for action in self._actions for name in action.option_strings]
        if message.startswith(UNKNOWN):
            return _near_matches(message.removeprefix(UNKNOWN).split(), names)
        if not message.startswith(MISSING):
            return []
        # A missing option may be there, misspelt; argparse accepts the beginning of a name.
        return _near_matches(
            (
                name
                for argument in self._arguments
                if (name := argument.partition("=")[0]).startswith("--")
                and not any(existing.startswith(name) for existing in names)
            ),
            names,
        )


def _near_matches(names: Iterable[str], existing: list[str]) -> list[str]:
    return [
        f"{name}{near}"
        for name in names
        if (near := did_you_mean(name.partition("=")[0], existing))
    ]
