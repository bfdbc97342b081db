"""Notes below an estimate in a terminal: short lists of GPUs, and first what decides."""

import json

import pytest

from orchestrator.cli.main import main
from orchestrator.reporting.notes.estimate_notes import shortened

TINY = ["estimate", "--model", "llama-tiny", "--seq-len", "16", "--method", "lora"]
GPUS = ["A40", "A100-40GB-SXM", "A100-80GB-SXM", "H100-SXM", "L4", "L40", "L40S"]


def test_a_long_list_of_gpus_ends_with_the_number_of_the_others() -> None:
    """Each may have more to say in parentheses; a short list and other commas stay."""
    note = f"No price for {', '.join(GPUS)}: the catalog, as it is, has none."
    assert shortened(note, GPUS) == (
        "No price for A40, A100-40GB-SXM, A100-80GB-SXM and 4 more: the catalog, as it is, has "
        "none."
    )
    costs = ", ".join(f"{gpu} ($1.5, batch 1 x 16)" for gpu in GPUS)
    assert shortened(costs, GPUS).endswith("A100-80GB-SXM ($1.5, batch 1 x 16) and 4 more")
    assert shortened("On A40, L4, L40, L40S it fits.", GPUS) == "On A40, L4, L40, L40S it fits."


def test_a_terminal_gets_the_rows_and_notes_that_decide(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says what it leaves out; --wide and a pipe have all of it."""
    assert main(TINY) == 0
    whole = capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for name, value in {"TERM": "dumb", "COLUMNS": "200", "LINES": "24"}.items():
        monkeypatch.setenv(name, value)
    assert main(TINY) == 0
    brief = capsys.readouterr().out
    assert len([line for line in brief.splitlines() if line.startswith("| ")]) == 7
    assert "Not shown: " in brief
    assert "notes on approximations and assumptions; --wide shows them." in brief
    assert "Constants of the step times" in brief
    assert "CUDA's context" not in brief
    assert len(brief.splitlines()) < 40
    assert main([*TINY, "--wide"]) == 0
    assert capsys.readouterr().out == whole.replace("**", "")


def test_the_share_of_an_effective_batch_is_no_limit_of_the_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A GPU that holds its whole share has no largest batch, but one that may not hold it does."""
    tiny = ("estimate", "--model", "llama-tiny", "--seq-len", "512", "--method", "full")
    share = (*tiny, "--effective-batch", "16", "--gpu", "8xA40")
    assert main([*share, "--json"]) == 0
    estimate = json.loads(capsys.readouterr().out)
    assert estimate["max_batch_size"] == estimate["batch_limit"] == 2
    assert main(share) == 0
    shown = capsys.readouterr().out
    assert "| 2  " in shown
    assert " of 2 " not in shown
    assert "at least 2: an effective batch of 16 needs no more on 8 GPUs." in shown
    less = (*tiny, "--effective-batch", "64", "--gpu", "A40", "--memory-gib", "0.8")
    assert main([*less, "--json"]) == 0
    interval = json.loads(capsys.readouterr().out)["max_batch_size_interval"]
    assert interval["low"] < 64
    assert main(less) == 0
    bounds = f" ({interval['low']:.0f} to {interval['high']:.0f}) |"
    assert bounds in capsys.readouterr().out
