"""Child processes import the installed packages, and nothing of the working directory."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from trials.child_process.child_prober import WORKER
from trials.child_process.environment import child_environment
from trials.child_process.learning_child import LEARN_WORKER
from trials.child_process.token_counter import CHILD as TOKENIZER_CHILD
from trials.simulation.tracing_child import CHILD as TRACING_CHILD

BOOTSTRAP = "trials.child_process.bootstrap"


@pytest.mark.parametrize("command", [WORKER, LEARN_WORKER, TOKENIZER_CHILD, TRACING_CHILD])
@pytest.mark.parametrize("given", [None, "", ":", "/nowhere::"])
def test_python_files_in_the_working_directory_are_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Sequence[str], given: str | None
) -> None:
    """Neither a package of ours nor a module of Python is imported from there."""
    if given is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", given)
    (tmp_path / "trials").mkdir()
    for name in ("trials/__init__.py", "runpy.py", "this.py"):
        (tmp_path / name).write_text("raise SystemExit('executed')", encoding="utf-8")
    # The commands' own modules take seconds to import; the way to them is the same.
    words = [BOOTSTRAP if word.startswith("trials.") else word for word in command[:3]]
    child = subprocess.run(
        [*words, "this"],
        cwd=tmp_path,
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    assert "Zen of Python" in child.stdout
