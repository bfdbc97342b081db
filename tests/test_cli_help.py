"""What the command line prints at once: help and version."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from orchestrator.cli.main import main

HERE = Path(__file__).parent.parent
ENVIRONMENT = os.environ | {"PYTHONPATH": str(HERE)}


@pytest.mark.parametrize("arguments", [["--help"], ["sweep", "--help"]])
def test_help_imports_no_heavy_library(arguments: list[str]) -> None:
    """Help lists the commands without importing any heavy library."""
    program = """\
import sys
from orchestrator.cli.main import main
try:
    main(sys.argv[1:])
finally:
    heavy = {"torch", "ray", "scipy", "numpy", "pydantic", "rich", "yaml"} & set(sys.modules)
    print("imported:", sorted(heavy))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.endswith("imported: []\n")
    assert "finetune-cost" in ended.stdout
    assert "sweep" in ended.stdout
    assert ended.stderr == ""


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    """As in a report of a bug."""
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"finetune-cost {version('finetune-cost')}\n"
