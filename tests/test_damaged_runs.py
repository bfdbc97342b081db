"""Damaged runs: a line whose numbers are impossible is one line of an error, never a traceback."""

import copy
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from builders.runs import made_run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.cli.main import main
from orchestrator.storage.append_log import AppendFile
from orchestrator.storage.run_storage import StoreError
from trials.records.observation import LOG_VERSION

EXTREMES = st.sampled_from(
    [None, 0, -1, 1, 10**9, 10**30, -(10**30), 1e-300, 1e300, 1e-9, 1e9, True, "", "x", [], {}]
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Path of every part of a JSON value."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, part in value.items():
            yield from places(part, (*path, key))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from places(part, (*path, index))


def altered(line: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A line with another value at a path."""
    whole = copy.deepcopy(line)
    part: Any = whole
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return whole


@dataclass(frozen=True)
class FinishedRun:
    """A run to damage.

    Attributes:
        log: its log.
        lines: the log's lines, undamaged; an example that fails is printed without them.
    """

    log: Path
    lines: list[dict[str, Any]] = field(repr=False)

    def write(self, lines: list[dict[str, Any]]) -> None:
        """Replace the log's lines."""
        self.log.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """A finished run."""
    log = made_run(tmp_path_factory.mktemp("damaged") / "run").path / "observations.jsonl"
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return FinishedRun(log, lines)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    number=st.integers(0, 1000),
    place=st.integers(0, 1000),
    value=EXTREMES,
    command=st.sampled_from(["status", "fit", "rank", "report", "plan"]),
)
def test_a_line_with_another_value_is_read_or_one_line(
    *,
    run: FinishedRun,
    number: int,
    place: int,
    value: Any,
    command: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each command ends with 0, or with 1 and a line."""
    damaged = [*run.lines]
    number %= len(damaged)
    every = list(places(damaged[number]))
    damaged[number] = altered(damaged[number], every[place % len(every)], value)
    run.write(damaged)
    ended = main([command, str(run.log.parent)])
    assert ended in {0, 1}
    lines_of_error = capsys.readouterr().err.splitlines()
    assert not ended or len(lines_of_error) == 1


@pytest.mark.parametrize("command", ["fit", "rank"])
def test_a_batch_of_no_examples_is_refused(
    run: FinishedRun, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No probe has one; a law through it would divide by zero."""
    run.write([run.lines[0] | {"batch_size": 0}, *run.lines[1:]])
    assert main([command, str(run.log.parent)]) == 1
    assert "observations.jsonl:1: not an observation (batch_size: " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["fit", "report"])
def test_a_peak_of_zero_bytes_enters_no_law(run: FinishedRun, command: str) -> None:
    """Laws weigh peaks by their inverse; the other probes suffice."""
    path = ("measurement", "memory", "peak_allocated_bytes")
    largest = max(line["batch_size"] for line in run.lines if line["outcome"] == "FITS")
    run.write(
        [altered(line, path, 0) if line["batch_size"] == largest else line for line in run.lines]
    )
    assert main([command, str(run.log.parent)]) == 0


@pytest.mark.parametrize("addition", [{"log_version": LOG_VERSION + 1}, {"new": 1}])
def test_a_line_of_a_newer_version_is_not_to_be_deleted(
    run: FinishedRun,
    addition: dict[str, int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The error asks for an update."""
    run.write([run.lines[0] | addition])
    assert main(["status", str(run.log.parent)]) == 1
    error = capsys.readouterr().err
    assert "newer" in error
    assert "delete" not in error


@pytest.mark.parametrize("name", ["observations.jsonl", "sweep.yaml"])
def test_a_pipe_among_the_files_of_a_run_is_one_line(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It could keep a reader for ever; a run has no pipes."""
    run = made_run(tmp_path / "run")
    (run.path / name).unlink()
    os.mkfifo(run.path / name)
    with pytest.raises(StoreError, match="not a regular file"):
        AppendFile(run.path / name).open()
    for command in ("status", "report", "rank"):
        assert main([command, str(run.path)]) == 1
        output = capsys.readouterr().err
        assert f"{name}: cannot be" in output
        assert "not a regular file" in output
        assert output.count("\n") == 1
