"""Scripts of ``tests/benchmarks``, run in the process of the tests."""

import contextlib
import io
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What a script of a name prints and returns, without the seconds of its imports."""
    script, code = str(BENCHMARKS / name), 0
    with (
        pytest.MonkeyPatch.context() as patched,
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        patched.setattr(sys, "argv", [script, *arguments])
        patched.syspath_prepend(BENCHMARKS)
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(sys.argv, code, out.getvalue(), err.getvalue())
