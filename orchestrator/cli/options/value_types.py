"""How a command line is read: values of options, and mistakes in one line with what was meant."""

import argparse
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from gpu_catalog.suggestions import did_you_mean

UNKNOWN = "unrecognized arguments: "
MISSING = "the following arguments are required: "
CHOICES = re.compile(r"invalid choice: '(.*?)' \(choose from (.*)\)")


class Parser(argparse.ArgumentParser):
    """Says a mistake in a line, with what may have been meant, not in a page of usage."""

    commands: Any = None
    _given: Any = ()

    def error(self, message: str) -> NoReturn:
        """Ends with the message and near matches of what is not known."""
        self.exit(
            2, f"{self.prog}: {'; '.join([message, *self._near(message)])} (--help tells all)\n"
        )

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As ever, but what a command does not know is for that command to say."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command = self.commands.choices.get(options.command, self)
            command.error(f"{UNKNOWN}{' '.join(unknown)}")
        return options

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As ever; what was given is kept, to tell what may have been meant."""
        self._given = args or ()
        return super().parse_known_args(args, namespace)

    def _near(self, message: str) -> list[str]:
        """What may have been meant: of options, or of the choices of one."""
        chosen = CHOICES.search(message)
        if chosen is not None:
            return _near_matches([chosen[1]], re.findall("'(.*?)'", chosen[2]))
        known = [option for action in self._actions for option in action.option_strings]
        if message.startswith(UNKNOWN):
            return _near_matches(message.removeprefix(UNKNOWN).split(), known)
        if not message.startswith(MISSING):
            return []
        # An option that is missing may be there, misspelt; argparse is content with a beginning.
        return _near_matches(
            (
                name
                for given in self._given
                if (name := given.partition("=")[0]).startswith("--")
                and not any(option.startswith(name) for option in known)
            ),
            known,
        )


def _near_matches(given: Iterable[str], known: list[str]) -> list[str]:
    return [
        f"{each}{near}" for each in given if (near := did_you_mean(each.partition("=")[0], known))
    ]


def positive(text: str) -> int:
    """A whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def above_zero(text: str) -> float:
    """A number greater than 0."""
    value = not_negative(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"must be greater than 0, not {text}")
    return value


def not_negative(text: str) -> float:
    """A number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, not {text}")
    return value


def batch_size(text: str) -> int | str:
    """Examples per step, ``fastest``, or ``largest``, for which ``max`` is another word."""
    return _or_word(text, {"fastest": "fastest", "largest": "largest", "max": "largest"})


def largest_or_size(text: str) -> int | str:
    """Examples per step, or ``largest``, for which ``max`` is another word."""
    return _or_word(text, {"largest": "largest", "max": "largest"})


def epochs(text: str) -> int | str:
    """How many, or ``auto``."""
    return _or_word(text, {"auto": "auto"})


def _or_word(text: str, words: dict[str, str]) -> int | str:
    if text in words:
        return words[text]
    try:
        return positive(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; or {', or '.join(words)}") from None
