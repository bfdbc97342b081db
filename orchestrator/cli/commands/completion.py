"""Completion of the command line by Tab, as a script for a shell.

shtab writes the script once, so that Tab starts no Python. argcomplete would start it at each Tab,
which takes a tenth of a second.
"""

import argparse
import pathlib
import shlex
from collections.abc import Iterable

import shtab

from gpu_catalog.catalog import load_catalog
from orchestrator.cli.options.help import PROGRAM
from orchestrator.cli.parsers.program import build_parser
from orchestrator.console import print_file
from orchestrator.spec.spec_file import shipped_specs
from trials.recipes.named_recipes import NAMED_RECIPES
from trials.records.model import presets

NAMES = {"--gpu": "gpus", "--model": "models", "--recipe": "recipes"}
RUNS = ("RUN", "OTHER", "DIR", "SPEC|RUN")


def run(options: argparse.Namespace) -> int:
    """Print the completion script of a shell."""
    print_file(completion_script(build_parser(), options.shell))
    return 0


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Write the completion script of a shell.

    Args:
        parser: parser of every command; the function changes it.
        shell: bash, zsh or tcsh.
    """
    named = {
        "gpus": [gpu.key for gpu in load_catalog().gpus],
        "models": presets(),
        "recipes": NAMED_RECIPES,
        "sweeps": shipped_specs(),
    }
    functions = {name: f"_{PROGRAM.replace('-', '_')}_{name}" for name in named}
    for action in _actions(parser):
        name = next((NAMES[option] for option in action.option_strings if option in NAMES), None)
        name = "sweeps" if action.dest == "spec" else name
        if name is not None:
            action.complete = {"bash": functions[name], "zsh": functions[name], "tcsh": "f"}  # type: ignore[attr-defined]
        elif action.metavar in RUNS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.type is pathlib.Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    preamble = {
        "bash": "\n".join(_bash(functions[name], words) for name, words in named.items()),
        "zsh": "\n".join(_zsh(functions[name], words) for name, words in named.items()),
    }
    return str(shtab.complete(parser, shell=shell, preamble=preamble.get(shell, "")))


def _bash(function: str, words: Iterable[str]) -> str:
    """A function that completes words and file names."""
    listed = shlex.quote(" ".join(words))
    return f'{function}() {{ compgen -W {listed} -- "$1"; compgen -f -- "$1"; }}'


def _zsh(function: str, words: Iterable[str]) -> str:
    listed = " ".join(shlex.quote(word) for word in words)
    return f"{function}() {{ compadd -- {listed}; _files }}"


def _actions(parser: argparse.ArgumentParser) -> Iterable[argparse.Action]:
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to see them
        yield action
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - as above
            for command in action.choices.values():
                yield from _actions(command)
