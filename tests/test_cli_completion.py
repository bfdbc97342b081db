"""Examples in the help are valid commands, and Tab completes words in a real shell."""

import argparse
import shlex
import subprocess
from pathlib import Path

import pytest

from orchestrator.cli.main import build_parser, main
from orchestrator.cli.options.help import PROGRAM, examples_of, examples_text

COMPLETION = """\
source {script}
COMP_WORDS=({words}); COMP_CWORD={last}; COMPREPLY=()
COMP_LINE={line}; COMP_POINT=${{#COMP_LINE}}
_shtab_finetune_cost
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def commands() -> dict[str, argparse.ArgumentParser]:
    """Parser of each command."""
    return dict(build_parser().commands.choices)


def test_every_command_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    """Only the commands that cluster nodes run have no examples."""
    assert {name for name in commands() if not examples_of(name)} == {"join-check", "node-notice"}
    with pytest.raises(SystemExit):
        main(["report", "--help"])
    assert "report runs/my runs/" in capsys.readouterr().out


@pytest.mark.parametrize("command", commands())
def test_every_command_has_help(command: str) -> None:
    """The help of each is formatted, whatever characters it has."""
    assert command in commands()[command].format_help()


@pytest.mark.parametrize("command", [c for c in commands() if c != "completion"])
def test_examples_in_the_help_are_valid_commands(command: str) -> None:
    """Every example of the help parses to its own command."""
    for text, description in examples_of(command):
        assert f"finetune-cost {text}" in str(examples_text(command))
        assert build_parser().parse_args(shlex.split(text)).command == command, description


def test_tab_completes_commands_options_and_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bash completes GPUs, models and shipped sweeps by name, and runs by folder."""
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out, encoding="utf-8")
    (tmp_path / "runs").mkdir()

    def complete(*words: str) -> list[str]:
        line = " ".join((PROGRAM, *words))
        program = COMPLETION.format(
            script=script, words=line, last=len(words), line=shlex.quote(line)
        )
        ended = subprocess.run(
            ["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return sorted(ended.stdout.split())

    assert complete("rep") == ["report", "reproduce"]
    assert complete("rank", "--dea") == ["--deadline"]
    assert complete("estimate", "--gpu", "A40") == ["A40"]
    assert complete("estimate", "--model", "mixtral-8") == ["mixtral-8x7b"]
    assert complete("sweep", "memory-saving-") == ["memory-saving-tiny"]
    assert complete("report", "ru") == ["runs"]


@pytest.mark.parametrize("command", ["estimate", "check", "rank"])
def test_options_that_belong_together_have_one_title(command: str) -> None:
    """Tables of options that several commands share add to the group with their title."""
    titles = {
        option: str(group.title)
        for group in commands()[command]._action_groups
        for action in group._group_actions
        for option in action.option_strings
    }
    assert titles["--json"] == "options"
    assert titles["--dataset"] == titles["--group-by-length"] == "data set"
    assert titles["--prices"] == titles["--deadline"] == "prices and offers"
    shown = commands()[command].format_help()
    assert shown.count("\nprices and offers:\n") == 1
