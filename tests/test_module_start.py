"""``python -m orchestrator`` imports nothing of the working directory but itself."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HOSTILE = "raise SystemExit('executed')"
# Of this project, of a library, and of Python: the package's first import, and later ones.
NAMES = (
    "gpu_catalog/__init__.py",
    "trials/__init__.py",
    "json.py",
    "pydantic.py",
    "dataclasses.py",
)


def run(arguments: Sequence[str], folder: Path, packages: Path | None = ROOT) -> str:
    """Output of Python with these arguments in a folder."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    if packages is not None:
        environment["PYTHONPATH"] = str(packages)
    process = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.parametrize("options", [("-m", "orchestrator"), ("-morchestrator",)])
@pytest.mark.parametrize("name", NAMES)
def test_python_files_in_the_working_directory_are_not_executed(
    tmp_path: Path, name: str, options: tuple[str, ...]
) -> None:
    """They may lie in a run folder that somebody else wrote."""
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(HOSTILE, encoding="utf-8")
    assert "A40" in run([*options, "catalog", "gpus"], tmp_path)


def test_a_package_in_the_working_directory_is_found_there(tmp_path: Path) -> None:
    """As in a checkout, and in a Ray job whose working directory holds the project."""
    for package in ("orchestrator", "gpu_catalog", "trials", "fitting"):
        shutil.copytree(ROOT / package, tmp_path / package)
    (tmp_path / "orchestrator" / "__main__.py").write_text(
        "import trials; print(trials.__file__)", encoding="utf-8"
    )
    output = run(["-m", "orchestrator"], tmp_path, packages=None)
    assert output.strip() == str(tmp_path / "trials" / "__init__.py")


def test_a_program_that_imports_the_package_keeps_its_path(tmp_path: Path) -> None:
    """Also one that is itself run by ``-m``, with the same word among its arguments."""
    package = tmp_path / "program"
    package.mkdir()
    (package / "__init__.py").write_text("import orchestrator", encoding="utf-8")
    (package / "__main__.py").write_text("import own; print(own)", encoding="utf-8")
    (tmp_path / "own.py").write_text("", encoding="utf-8")
    assert "own.py" in run(["-m", "program", "orchestrator"], tmp_path)
