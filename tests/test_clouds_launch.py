"""`launch` takes a cluster down when Ray has said that the job has ended, and never on a guess."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.cli.main import main
from orchestrator.clouds import launch

SPEC = """\
name: small
gpus: [L4]
cells:
  - {models: [llama-tiny], recipes: [{method: full, precision: fp32}], seq_lens: [32]}
workload: {examples: 100, epochs: 1}
"""
BUCKET = ("--out", "s3://bucket/run")
ABSENT = "echo 'RuntimeError: 404: Job launch-my does not exist' >&2; exit 1"
CLOSED = "echo 'ConnectionError: Failed to connect to Ray' >&2; exit 1"
ENDED = "echo \"Job 'launch-my' {}\""
RUNS = "echo \"Status for job 'launch-my': RUNNING\""


@pytest.fixture
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Launches with a `ray` that answers from scripts; what it was asked for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(launch, "POLL_SECONDS", 0.0)
    Path("my.yaml").write_text(SPEC, encoding="utf-8")
    Path("cluster.yaml").write_text("cluster_name: x\n", encoding="utf-8")

    def launched(
        *options: str,
        spec: str = "my.yaml",
        status: list[str],
        up: str = "true",
        submit: str = "true",
        fetch: str = "true",
        is_absent: str = "true",
        down: str = "true",
    ) -> list[str]:
        answers = [f"{n}) {text} ;;" for n, text in enumerate(status, start=1)]
        script = [
            f'#!/bin/sh\necho "$@" >> {tmp_path}/calls',
            f"n=$(grep -c '^job status' {tmp_path}/calls)",
            'case "$1 $2" in',
            f'"job status") case $n in {" ".join(answers)} *) {status[-1]} ;; esac ;;',
            f'"job submit") {submit} ;;',
            '"job logs") echo one; echo two ;;',
            f"up*) {up} ;;",
            f"rsync-down*) {fetch} ;;",
            f"exec*) {is_absent} ;;",
            f"down*) {down} ;;",
            "esac",
        ]
        ray = tmp_path / "ray"
        ray.write_text("\n".join(script), encoding="utf-8")
        ray.chmod(0o755)
        ended = main(["launch", "cluster.yaml", spec, *options])
        calls = tmp_path / "calls"
        said = calls.read_text(encoding="utf-8").splitlines() if calls.exists() else []
        return [str(ended), *(line for line in said if not line.startswith("dashboard"))]

    return launched


def test_it_waits_until_the_job_has_ended(
    laptop: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Through lost connections; the log of every new one begins anew, and is said once."""
    states = [CLOSED, ABSENT, RUNS, CLOSED, RUNS, ENDED.format("succeeded")]
    ended, *calls = laptop(*BUCKET, "--budget-usd", "20", status=states)
    assert ended == "0"
    assert calls[0] == "up --yes --no-restart cluster.yaml"
    assert calls[-1] == "down --yes cluster.yaml"
    assert sum(call.startswith("down") for call in calls) == 1
    (submit,) = (call for call in calls if call.startswith("job submit"))
    sweep = "-- python -m orchestrator sweep my.yaml --out s3://bucket/run --budget-usd 20"
    assert submit.endswith(sweep)
    assert "--no-wait --submission-id launch-my" in submit
    told = capsys.readouterr()
    assert told.out == "one\ntwo\n"
    assert told.err.count("Failed to connect to Ray") == 2  # once for each time it was lost


@pytest.mark.parametrize("state", ["failed", "was stopped"])
def test_a_sweep_that_failed_takes_the_cluster_down_too(
    state: str, laptop: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Found so by a second `launch`, which hands nothing over and shows what was said."""
    ended, *calls = laptop(*BUCKET, status=[ENDED.format(state)])
    assert ended == "1"
    assert calls[-1] == "down --yes cluster.yaml"
    assert not any(call.startswith("job submit") for call in calls)
    told = capsys.readouterr()
    assert told.out == "one\ntwo\n"
    assert "launch-my is there already: the options given now are not used" in told.err


def test_a_run_is_fetched_before_the_head_goes(laptop: Callable[..., list[str]]) -> None:
    """The specification is a link, beside which its files are; it may be gone by then."""
    Path("elsewhere").mkdir()
    Path("my.yaml").rename("elsewhere/the.yaml")
    Path("my.yaml").symlink_to("elsewhere/the.yaml")
    states = [ABSENT, ENDED.format("succeeded")]
    ended, *calls = laptop(status=states, submit="rm elsewhere/the.yaml")
    assert ended == "0"
    (submit,) = (call for call in calls if call.startswith("job submit"))
    assert f'"working_dir": "{Path.cwd()}"' in submit
    assert calls[-2:] == [
        "rsync-down cluster.yaml ~/runs/small/ runs/small/",
        "down --yes cluster.yaml",
    ]


@pytest.mark.parametrize(
    ("state", "is_absent", "line"),
    [
        ("failed", "true", "launch-my failed; the cluster is down"),
        ("failed", "exit 1", "~/runs/a b: cannot be fetched: the cluster is up, and costs money"),
        ("succeeded", "true", "~/runs/a b: cannot be fetched: the cluster is up, and costs money"),
    ],
)
def test_a_run_that_cannot_be_fetched_is_not_lost(
    state: str,
    is_absent: str,
    line: str,
    laptop: Callable[..., list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The cluster goes down where the head says that there is none."""
    ended, *calls = laptop(
        *("--out", "runs/a b"), status=[ENDED.format(state)], fetch="exit 1", is_absent=is_absent
    )
    assert ended == "1"
    assert capsys.readouterr().err.splitlines()[-1].startswith(line)
    assert (calls[-1] == "down --yes cluster.yaml") is ("is down" in line)
    asked = [call for call in calls if call.startswith("exec")]
    expected = "exec cluster.yaml test ! -e ~/'runs/a b'"
    assert asked == ([] if state == "succeeded" else [expected])


def test_a_head_that_takes_no_job_yet_is_told_of_once(
    laptop: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be minutes."""
    states = [ABSENT, ABSENT, ABSENT, ENDED.format("succeeded")]
    assert laptop(*BUCKET, status=states, submit=CLOSED)[0] == "0"
    told = capsys.readouterr().err
    assert told.count("Failed to connect to Ray") == 1
    assert "is there already" not in told


@pytest.mark.parametrize(
    ("at", "status", "line"),
    [
        ("up", RUNS, "what is up costs money"),
        ("submit", ABSENT, "the cluster is up, and costs money"),
        ("status", RUNS, "launch-my goes on there: the cluster is up, and costs money"),
        ("fetch", ENDED.format("failed"), "the cluster is up, and costs money"),
        ("down", ENDED.format("failed"), "what is up costs money"),
    ],
)
def test_whoever_stops_it_is_told_what_is_up(
    at: str,
    status: str,
    line: str,
    laptop: Callable[..., list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By Ctrl-C, at any point."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    stop = "kill -INT $PPID; exit 1"
    given = {"status": [status, stop]} if at == "status" else {"status": [status], at: stop}
    try:
        ended, *_ = laptop(**given)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == "130"
    told = capsys.readouterr().err.splitlines()
    assert told[-2] == f"{line} until 'ray down cluster.yaml'"
    assert told[-1].startswith("stopped: run the same command again")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {"status": [ABSENT], "submit": CLOSED},
            "the job is not taken: ConnectionError: Failed to connect to Ray: the cluster is up",
        ),
        ({"status": [CLOSED]}, "no answer for an hour: ConnectionError"),
        (
            {"status": ["echo AuthenticationError >&2; exit 1"]},
            "the cluster has another token than this machine: the cluster is up",
        ),
        (
            {"status": [ENDED.format("succeeded")], "down": "exit 1"},
            "'ray down' failed: what is up costs money until 'ray down cluster.yaml'",
        ),
    ],
)
def test_what_is_left_up_is_told(
    given: dict[str, object],
    line: str,
    laptop: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the last line; nothing was taken down that may be at work."""
    monkeypatch.setattr(launch, "SUBMIT_SECONDS", 0.0)
    monkeypatch.setattr(launch, "SILENT_SECONDS", 60.0 if "submit" in given else 0.0)
    ended, *calls = laptop(*BUCKET, **given)
    assert ended == "1"
    assert capsys.readouterr().err.splitlines()[-1].startswith(line)
    assert any(call.startswith("down") for call in calls) is ("down" in given)


def test_ray_is_found_where_no_environment_was_activated(
    laptop: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `.venv/bin/python -m orchestrator launch` has it: beside this Python."""
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    ended, *calls = laptop(*BUCKET, status=[ENDED.format("succeeded")])
    assert ended == "0"
    assert calls[-1] == "down --yes cluster.yaml"


def test_what_cannot_be_starts_nothing(
    laptop: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of Kubernetes, a mistake in the specification, an option that no sweep has."""
    Path("cluster.yaml").write_text("kind: RayCluster\n", encoding="utf-8")
    assert laptop(status=[ENDED.format("failed")]) == ["1"]
    assert "cluster.yaml: is no file for 'ray up'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        laptop("--budget", "much", status=[ENDED.format("failed")])
    Path("my.yaml").write_text(SPEC.replace("L4", "L5"), encoding="utf-8")
    assert laptop(status=[ENDED.format("failed")]) == ["1"]
    assert "L5" in capsys.readouterr().err


def test_what_cannot_go_along_starts_nothing(
    laptop: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """All of it is told at once; nor is a run begun that there would be no folder for."""
    Path("mine.yaml").touch()
    Path("runs").write_text("", encoding="utf-8")
    files = ("--catalog", str(Path("mine.yaml").absolute()), "--prices", "../my.csv")
    more = ("--prices", "shipped", "--constants", "runs/constants.json", "--dry-run")
    assert laptop(*files, *more, status=[ENDED.format("failed")]) == ["1"]
    told = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in told] == [
        *("--dry-run:", "--catalog", "--prices", "--constants"),
    ]
    assert "../my.csv: is no file in" in told[2]
    assert laptop(status=[ENDED.format("failed")]) == ["1"]
    assert capsys.readouterr().err.startswith("runs/small: cannot be made, for the run (")
    assert laptop("--out", "gs://bucket/run", status=[ENDED.format("failed")]) == ["1"]


def test_files_beside_the_specification_go_along(laptop: Callable[..., list[str]]) -> None:
    """As seen from its folder, wherever `launch` is run; the sweep's GPU is one of theirs."""
    gpu = "{key: mine, kind: cpu, usable_memory_bytes: 50331648, source: me, recorded: 2026-11-20}"
    Path("sweeps").mkdir()
    Path("sweeps/gpus.yaml").write_text(f"gpus: [{gpu}]\n", encoding="utf-8")
    Path("my.yaml").unlink()
    Path("sweeps/my.yaml").write_text(SPEC.replace("L4", "mine"), encoding="utf-8")
    options = (*BUCKET, "--catalog", "gpus.yaml")
    assert laptop(*options, spec="sweeps/my.yaml", status=[ENDED.format("succeeded")])[0] == "0"


def test_a_command_that_wants_the_cluster_is_told_where_it_can_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """RAY_ADDRESS as it is exported for `ray job submit`."""
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    (tmp_path / "my.yaml").write_text(SPEC, encoding="utf-8")
    assert main(["plan", str(tmp_path / "my.yaml")]) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert told.startswith("RAY_ADDRESS=http://127.0.0.1:8265 is where jobs are submitted")
