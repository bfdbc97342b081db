"""The parser of commands: mistakes in one line with near matches, examples below each help."""

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, Protocol

from gpu_catalog.suggestions import did_you_mean
from orchestrator.cli.options.help import EPILOG, Help, examples_text

UNKNOWN = "unrecognized arguments: "
MISSING = "the following arguments are required: "
CHOICES = re.compile(r"invalid choice: '(.*?)' \(choose from (.*)\)")


class Subject(Protocol):
    """A module of commands on one subject."""

    def add_options(self, commands: Any) -> None:
        """Add its commands, each with its options and the function ``run`` that it calls."""


class Parser(argparse.ArgumentParser):
    """Prints a mistake in one line, with near matches, in place of a page of usage."""

    commands: Any = None
    _arguments: Any = ()

    def __init__(
        self, run: Callable[[argparse.Namespace], int] | None = None, **options: Any
    ) -> None:
        """Make a parser whose command calls ``run`` with its options."""
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


def make_parser(subjects: Sequence[Subject]) -> Parser:
    """Make the parser of the commands on some subjects."""
    parser = Parser(
        prog="python -m orchestrator",
        description="Measures fine-tuning on the GPUs you could rent and ranks them by cost.",
        epilog=EPILOG,
        formatter_class=Help,
    )
    parser.commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=Parser
    )
    for subject in subjects:
        subject.add_options(parser.commands)
    for name, command in parser.commands.choices.items():
        command.formatter_class = Help
        command.epilog = examples_text(name)
    return parser


def _near_matches(names: Iterable[str], existing: list[str]) -> list[str]:
    return [
        f"{name}{near}"
        for name in names
        if (near := did_you_mean(name.partition("=")[0], existing))
    ]
