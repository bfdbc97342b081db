"""A run in a bucket is read and reported as a local one."""

import json
import re
from pathlib import Path

import pytest
from builders.observations import observation
from builders.runs import ONE_CELL, TWO_CELLS, made_run, spec_of
from builders.s3_runs import (
    URL,
    batches,
    one_line,
    the_run,
)
from fakes.s3_server import BUCKET, KEY, SECRET, TOKEN, S3Server

from orchestrator.cli.main import main
from orchestrator.run_folder.observation_writer import ObservationWriter
from orchestrator.run_folder.run_folder import RunFolder, open_run
from orchestrator.storage import s3_storage
from orchestrator.storage.run_storage import S3Url
from orchestrator.storage.s3_bucket import Bucket


@pytest.mark.usefixtures("run")
def test_a_long_run_is_read_a_few_files_at_a_time_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The result is the same for any size of the cache."""
    monkeypatch.setattr(s3_storage, "AT_ONCE", 2)
    for size in range(1, 6):
        with ObservationWriter(the_run()) as writer:
            writer.append(observation(size))
    for cached_bytes in (0, 5000, 10**6):
        monkeypatch.setattr(s3_storage, "MOST_CACHED_BYTES", cached_bytes)
        run = the_run()
        for _ in range(2):
            assert sorted(batches(run)) == [1, 2, 3, 4, 5], cached_bytes


@pytest.mark.usefixtures("server")
def test_a_damaged_line_of_observations_is_reported_by_object_and_line() -> None:
    """The object has a name in the bucket, as a file has a path."""
    made_run(URL)
    damaged = "observations/000009-x-000001.jsonl"
    Bucket(URL, 1.0).put(damaged, b"{}\n")
    text = one_line(the_run().observations)
    assert text.startswith(f"{URL}/{damaged}:1: ")


@pytest.mark.usefixtures("server")
def test_an_object_of_observations_that_is_cut_off_is_an_error() -> None:
    """Objects are written whole, so a line without an end means that lines are missing."""
    made_run(URL)
    cut = "observations/000009-x-000001.jsonl"
    Bucket(URL, 1.0).put(cut, b'{"key"')
    assert one_line(the_run().observations).startswith(f"{URL}/{cut}: ")


def test_another_sweeps_run_is_refused_and_left_as_it_was(server: S3Server) -> None:
    """A folder with other objects is refused as well."""
    made_run(URL)
    before = server.objects()
    text = one_line(lambda: open_run(URL, TWO_CELLS, spec_of(TWO_CELLS)))
    assert text.startswith(f"{URL}: ")
    assert "cells differ" in text
    other = S3Url(BUCKET, "teams")
    text = one_line(lambda: open_run(other, ONE_CELL, spec_of()))
    assert text.startswith(f"{other}: ")
    assert "'one'" in text
    assert one_line(lambda: RunFolder.existing(other)).endswith("it has no sweep.yaml")
    none = "s3://runs/none"
    assert one_line(lambda: RunFolder.existing(none)).startswith(f"{none}: no such run")
    assert server.objects() == before


def test_every_command_that_takes_a_run_takes_one_in_a_bucket(
    server: S3Server, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """They write the same files and print the same text as for a local run."""
    made_run(URL)
    local = made_run(tmp_path / "local").path
    for command in (
        ["status"],
        ["fit"],
        ["rank"],
        ["what-if", "--examples", "7"],
        ["plan"],
        ["plan", "--next"],
        ["report"],
        ["export", "--format", "ado"],
    ):
        printed = []
        for run in (URL, local):
            assert main([command[0], str(run), *command[1:]]) == 0
            text = capsys.readouterr().out.replace(str(run), "RUN")
            printed.append(re.sub("[ -]+", " ", text))  # widths of tables depend on the path
        assert printed[0] == printed[1] != ""
    names = {path.name for path in local.iterdir() if path.name != "observations.jsonl"}
    held = server.objects("teams/one/")
    assert {name for name in held if "/" not in name} == names
    assert {
        "fits.json",
        "ranking.csv",
        "ranking.json",
        "report.md",
        "report.html",
        "ado.csv",
    } < names
    assert held["ranking.csv"] == (local / "ranking.csv").read_bytes()
    assert json.loads(held["ranking.json"])
    assert not any(secret.encode() in b"".join(held.values()) for secret in (KEY, SECRET, TOKEN))
