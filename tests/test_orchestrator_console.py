"""Output of commands: log messages on standard error, results with colours on a terminal alone."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.console import log_to_stderr, print_result

ANSWER = """\
Rent **A40** from cudo:
the job costs **$5**.

- **model**: may still be the cheapest (8%), extrapolated
| GPU | batch |
|-----|-------|
| T4  | not even one packed row fits: OUT_OF_MEMORY |"""


def test_a_log_message_is_one_line_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Repeated set-up adds no second line; messages of other libraries are not shown."""
    log_to_stderr()
    log_to_stderr()
    logging.getLogger("orchestrator.running.driver").info("%d trials", 3)
    logging.getLogger("orchestrator.running.driver").debug("not shown")
    logging.getLogger("somebody.else").info("not shown")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "3 trials\n")


@pytest.mark.parametrize("arguments", [["catalog", "gpus"], ["catalog", "snapshot", "--help"]])
def test_a_full_disk_behind_standard_output_is_one_line(arguments: list[str]) -> None:
    """It is noticed while a long output is written, or when a short one ends."""
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "orchestrator", *arguments],
            env={k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (1, "standard output: No space left on device\n")


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """The answer as a terminal of 100 columns gets it, without NO_COLOR."""
    for name, value in {"TERM": "xterm", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_result(ANSWER)
    return capsys.readouterr().out


def test_a_terminal_shows_in_colour_what_wins_what_fails_and_what_is_unsure(shown: str) -> None:
    """Green, red and yellow; other bold text has no colour."""
    assert "Rent \033[1;32mA40\033[0m from" in shown
    assert "\033[31mnot even one packed row fits: OUT_OF_MEMORY\033[0m |" in shown
    assert "\033[33mmay still be the cheapest\033[0m (8%), \033[33mextrapolated\033[0m" in shown
    assert "costs \033[1;32m$5\033[0m" in shown
    assert "- \033[1mmodel\033[0m:" in shown


def test_no_color_leaves_bold_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dumb terminal gets neither, and a pipe gets the text as it is."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    print_result(ANSWER)
    out = capsys.readouterr().out
    assert "\033[1mA40\033[0m" in out
    assert "\033[3" not in out
    assert "\033[1;" not in out
    monkeypatch.setenv("TERM", "dumb")
    print_result(ANSWER)
    assert "\033" not in capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: False)
    print_result(ANSWER)
    assert capsys.readouterr().out == f"{ANSWER}\n"
