"""The search for inputs that break a command finds each kind of breakage."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import fuzz
import pytest
from builders.fuzz_inputs import Case
from builders.fuzz_written import CLUSTER, WRITTEN, wrong_file
from builders.hostile_texts import MADE
from fuzz import failure

CASE = Case("made", ("words",), {"folder/file": b"content"})


def raises(_: list[str]) -> int:
    """A command with a mistake in its code."""
    raise KeyError


def takes_memory(_: list[str]) -> int:
    """A command that asks for twice the limit, which is only exact to the size of the stack."""
    return len(bytearray(2 * fuzz.MOST_BYTES))


def takes_time(_: list[str]) -> int:
    """A command that computes without end."""
    while True:
        pass


def waits(_: list[str]) -> int:
    """A command that waits without end."""
    time.sleep(1e6)
    return 0


def refuses(words: list[str]) -> int:
    """A command that prints a line about its file, as it should."""
    sys.stderr.write(f"{words}: {Path('folder/file').read_bytes()!r}\n")
    sys.exit(2)


@pytest.mark.parametrize(
    ("run", "wrong"),
    [
        (raises, "traceback"),
        (takes_memory, "large"),
        (takes_time, "slow"),
        (waits, "slow"),
        (refuses, None),
    ],
)
def test_each_way_to_break_is_found(
    run: Callable[[list[str]], int],
    wrong: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A traceback, too much memory, too much time; an error in a line is what is wanted."""
    monkeypatch.setattr(fuzz, "CPU_SECONDS", 3.0)
    monkeypatch.setattr(fuzz, "MOST_BYTES", 2**28)
    monkeypatch.setattr(fuzz, "HANG_SECONDS", 1.0 if run is waits else 60.0)
    assert failure(CASE, tmp_path, run) == wrong


@pytest.mark.parametrize(
    ("target", "text", "wrong"),
    [
        (CLUSTER, "a: 1\n---\nb: [{c: 1}]\n", None),
        (CLUSTER, "a: 1\nb: : 1\n", "unreadable"),
        (CLUSTER, f"a: [{{b: {{{MADE}: 1}}}}]\n", "injected"),
        ("hf-jobs", "set -e\nhf run --flavor 'x'\n", None),
        ("hf-jobs", "hf run --flavor x'\n", "unreadable"),
        ("hf-jobs", f"hf run --flavor $(touch {MADE})\n", "injected"),
        ("skypilot", f"run: |\n  echo {MADE}\n", None),
        ("skypilot", f"envs: {{{MADE}: 1}}\n", "injected"),
    ],
)
def test_files_that_say_more_than_their_templates_are_found(
    target: str, text: str, wrong: str | None, tmp_path: Path
) -> None:
    """By a parser of YAML, or by bash in a folder with no other command."""
    (tmp_path / WRITTEN).write_text(text, encoding="utf-8")
    assert wrong_file(Case(target, ("--to", target), {}), tmp_path) == wrong
