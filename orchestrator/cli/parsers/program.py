"""The parser of every command, with examples below each help."""

import argparse
from typing import Any

from orchestrator.cli.options.help import EPILOG, PROGRAM, Help, examples_text
from orchestrator.cli.options.parser import Parser
from orchestrator.cli.options.table import add_table
from orchestrator.cli.parsers import measuring, results
from orchestrator.console import output

WIDE = "print all columns of tables, however narrow the terminal"


class Version(argparse.Action):
    """Prints the installed version."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Look it up, print it and end."""
        from importlib.metadata import version  # noqa: PLC0415 - help does without it

        with output() as stream:
            stream.write(f"{PROGRAM} {version(PROGRAM)}\n")
        parser.exit()


def build_parser() -> Parser:
    """The parser of every command."""
    parser = Parser(
        prog=PROGRAM,
        description="Find the GPU to rent for fine-tuning your language model: simulate or measure "
        "training steps, and rank offers by cost.",
        epilog=EPILOG,
        formatter_class=Help,
    )
    parser.add_argument("--version", action=Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=Parser
    )
    measuring.add_sweep(commands)
    results.add_estimate(commands)
    results.add_dataset_command(commands)
    measuring.add_learn(commands)
    results.add_run(commands)
    results.add_fit(commands)
    measuring.add_gpu_check(commands)
    results.add_catalog(commands)
    measuring.add_cluster(commands)
    measuring.add_profile(commands)
    commands.add_parser(
        "mcp",
        run="export.run_mcp",
        help="serve estimates, checks, rankings and prices to assistants (MCP, on stdio)",
        description="Serve the tools estimate, check, rank and prices of the Model Context "
        "Protocol on stdin and stdout. They start nothing, write only the cache of traces, and "
        "read no file outside the current folder except price tables and the hub's cache.",
    )
    completion = commands.add_parser(
        "completion",
        run="completion.run",
        help="print a script that completes finetune-cost with Tab",
    )
    add_table(completion, "shell {bash,zsh,tcsh}  the shell")
    summaries = {choice.dest: choice.help or "" for choice in commands._choices_actions}  # noqa: SLF001 - no public name has them
    for name, command in commands.choices.items():
        summary = summaries[name]
        command.description = command.description or f"{summary[:1].upper()}{summary[1:]}."
        command.formatter_class = Help
        command.epilog = examples_text(name)
        if name not in {"mcp", "completion"}:
            _add_wide(command)
    return parser


def _add_wide(command: Parser) -> None:
    """Add ``--wide`` to a command and its parts; where it is not given it overrides nothing."""
    command.add_argument("--wide", action="store_true", default=argparse.SUPPRESS, help=WIDE)
    for part in command.commands.choices.values() if command.commands else ():
        _add_wide(part)
