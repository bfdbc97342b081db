"""A parser that prints mistakes in one line with near matches."""

import argparse
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, NoReturn

from gpu_catalog.suggestions import did_you_mean
from orchestrator.console import remark

OPTION = re.compile(r"--[a-z][a-z-]*")
UNKNOWN = "unrecognized arguments: "
MISSING = "the following arguments are required: "
INSTEAD = {"resume": "sweep --resume --out RUN"}  # of words that are taken for commands
CHOICES = re.compile(r"invalid choice: '(.*?)' \(choose from (.*)\)")


class Parser(argparse.ArgumentParser):
    """Prints a mistake in one line, with near matches, in place of a page of usage."""

    commands: Any = None
    _arguments: Any = ()

    def __init__(self, run: str | None = None, *, checks: bool = False, **options: Any) -> None:
        """Make a parser; its command calls ``run``, a module of commands and its function.

        With ``checks`` the command itself adds its mistakes to those of the values, and ends by
        ``options.refuse``.
        """
        super().__init__(**options)
        self.set_defaults(run_command=run)
        self._checks = checks
        self._wrong_values: dict[str, str] = {}  # mistakes by option

    def error(self, message: str) -> NoReturn:
        """End with exit code 2, the message and near matches of what is unknown."""
        self.refuse([self._with_near(message)])

    def refuse(self, mistakes: Iterable[str]) -> NoReturn:
        """End with exit code 2 and a line for each mistake, those of values first.

        Mistakes that name an option whose value is wrong follow from that, and are left out: they
        reject the value, or ask for the option.
        """
        wrong = self._wrong_values.keys()
        others = [
            line
            for line in mistakes
            if wrong.isdisjoint([line.partition(" ")[0], *OPTION.findall(line)])
        ]
        lines = dict.fromkeys([*self._wrong_values.values(), *others])
        text = "\n".join(f"{self.prog}: {line}" for line in lines)
        remark(f"{text} (--help lists every option)")
        self.exit(2)

    def add_subparsers(self, **options: Any) -> Any:
        """Add commands, or the parts of a command, and keep them."""
        self.commands = super().add_subparsers(**options)
        return self.commands

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and let the command or its part reject arguments that it does not have."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command = self
            while command.commands is not None:
                command = command.commands.choices[getattr(options, command.commands.dest)]
            command.error(f"{UNKNOWN}{' '.join(unknown)}")
        return options

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and keep the arguments for near matches."""
        self._arguments = args or ()
        self._wrong_values = {}
        options, unknown = super().parse_known_args(args, namespace)
        if self._checks:
            options.refuse = self.refuse if self._wrong_values else None
        elif self._wrong_values and not unknown:
            self.refuse(())
        return options, unknown

    def _get_values(self, action: Any, arg_strings: Any) -> Any:
        """Value of an option; a wrong one is noted, and the option counts as not given."""
        try:
            if action.option_strings and arg_strings == ["--"]:  # argparse would drop it
                raise argparse.ArgumentError(action, "'--' is no value")  # noqa: TRY301 - as it does
            return super()._get_values(action, arg_strings)
        except argparse.ArgumentError as error:
            if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - no public name
                raise
            name = action.option_strings[-1] if action.option_strings else action.dest
            self._wrong_values[name] = self._with_near(str(error))
            return argparse.SUPPRESS

    def _with_near(self, message: str) -> str:
        near = self._near(message)
        names = {name for action in self._actions for name in action.option_strings}
        if message.startswith(MISSING) and "--config" in names:  # a file that names the model
            message = message.replace("--model", "--model or --config")
            near += [f"use --config {file}" for file in self._bare_files()]
        return "; ".join([message, *near])

    def _bare_files(self) -> Iterator[str]:
        """Configuration files among the arguments that no option stands before."""
        for before, argument in pairwise(("", *self._arguments)):
            if argument.endswith((".yaml", ".yml", ".py")) and not before.startswith("-"):
                yield argument

    def _near(self, message: str) -> list[str]:
        """Near matches of what a message calls unknown: options, or choices of one."""
        choice = CHOICES.search(message)
        if choice is not None and choice[1] in INSTEAD:
            return [f"use '{INSTEAD[choice[1]]}'"]
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
        if (word := name.partition("=")[0]) not in existing  # it is an option of another command
        and (near := did_you_mean(word, existing))
    ]
